"""Weights in 8 bits: e4m3 with a scale for 128 rows and columns, as DeepSeek-V3 is published.

A matrix is cut into blocks of 128 x 128, the last of which may be shorter. A block is divided by
its largest magnitude over 448, e4m3's largest number, and each of its numbers becomes the nearest
of e4m3. What a published folder holds in such blocks is held in the same numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moewright.rules.packed_base import CHUNK_NUMEL, FP8_BLOCK

_LARGEST = 448.0
_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Weight:
    """A rank's part of a stack of matrices [M,N,K]: its numbers, and fp32 scales of blocks."""

    dtype: torch.dtype
    codes: torch.Tensor
    scales: torch.Tensor  # [M, row blocks, column blocks]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scales

    def unpack(self) -> torch.Tensor:
        """Return the numbers that it stands for, rounded once to `dtype`."""
        rows, columns = self.codes.shape[-2:]
        out = torch.empty_like(self.codes, dtype=self.dtype)
        step = max(1, CHUNK_NUMEL // (FP8_BLOCK * columns))
        matrices = zip(
            self.codes.view(-1, rows, columns),
            self.scales,
            out.view(-1, rows, columns),
            strict=True,
        )
        for codes, scales, wide in matrices:
            for first in range(0, len(scales), step):
                part = slice(first * FP8_BLOCK, (first + step) * FP8_BLOCK)
                blocks = _cut_into_blocks(codes[part].to(self.dtype).float()[None])[0]
                blocks.mul_(scales[first : first + step, None, :, None])
                wide[part] = blocks.flatten(0, 1).flatten(1, 2)[: len(wide[part]), :columns]
        return out


def pack_fp8(weight: torch.Tensor, dtype: torch.dtype) -> Fp8Weight:
    """Pack a rank's part of a weight for products in `dtype`; no block is cut by the ranks."""
    rows, columns = weight.shape[-2:]
    blocks = _cut_into_blocks(weight.reshape(-1, rows, columns).float())
    largest = blocks.abs().amax((2, 4))
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    codes = (blocks / scales[:, :, None, :, None]).flatten(1, 2).flatten(2, 3)
    codes = codes[:, :rows, :columns].to(_DTYPE).reshape(weight.shape)
    return Fp8Weight(dtype=dtype, codes=codes, scales=scales)


def _cut_into_blocks(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [M,N,K] as [M, row blocks, 128, column blocks, 128], filled with zeros."""
    rows, columns = matrices.shape[-2:]
    padded = F.pad(matrices, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(2, (-1, FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
