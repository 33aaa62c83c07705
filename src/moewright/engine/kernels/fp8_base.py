"""Weights in 8 bits: e4m3 with a scale for 128 rows and columns, as DeepSeek-V3 is published.

A matrix is cut into blocks of 128 x 128, the last of which may be shorter. A block is divided by
its largest magnitude over 448, e4m3's largest number, and each of its numbers becomes the nearest
of e4m3. What a published folder holds in such blocks is held in the same numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

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
        step = _rows_of_chunk(columns)
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


def pack_fp8(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Fp8Weight:
    """Pack a rank's part of a weight for products in `dtype`; no block is cut by the ranks.

    It is packed some rows at a time, and never whole on the device.
    """
    rows, columns = weight.shape[-2:]
    matrices = weight.reshape(-1, rows, columns)
    codes = torch.empty(matrices.shape, dtype=_DTYPE, device=device)
    sides = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scales = torch.empty((len(matrices), *sides), device=device)
    step = _rows_of_chunk(columns)
    for matrix in range(len(matrices)):
        for first in range(0, sides[0], step):
            part = slice(first * FP8_BLOCK, (first + step) * FP8_BLOCK)
            values = matrices[matrix, part].to(device).float()
            blocks = _cut_into_blocks(values[None])[0]
            largest = torch.linalg.vector_norm(blocks, inf, dim=(1, 3))
            own = torch.where(largest > 0, largest / _LARGEST, 1.0)
            scales[matrix, first : first + step] = own
            blocks.div_(own[:, None, :, None])
            codes[matrix, part] = blocks.flatten(0, 1).flatten(1, 2)[: len(values), :columns]
    return Fp8Weight(dtype=dtype, codes=codes.view(weight.shape), scales=scales)


def _rows_of_chunk(columns: int) -> int:
    """Return the rows of blocks that are wide at a time."""
    return max(1, CHUNK_NUMEL // (FP8_BLOCK * columns))


def _cut_into_blocks(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [M,N,K] as [M, row blocks, 128, column blocks, 128], filled with zeros."""
    rows, columns = matrices.shape[-2:]
    padded = F.pad(matrices, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(2, (-1, FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
