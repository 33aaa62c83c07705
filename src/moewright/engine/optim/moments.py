"""Optimizer moments: flat tensors of fp32, bf16, or 8-bit numbers with scales of their blocks.

Updates read them in fp32 and write them back. 8-bit moments are OCP Microscaling numbers: E4M3, a
power of two in 8 bits for each 32 consecutive elements (rules.moments).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from moewright.engine.kernels.low_precision import ONE_GROUP, NarrowTensor, convert
from moewright.engine.runtime import torch_dtype
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat
from moewright.rules.optimizers import MOMENT_BLOCK, is_scaled
from moewright.spec.workload import Dtype

# Moments that are not fp32 are read and written so many elements at a time, so that their fp32
# copies stay small.
PIECE_NUMEL = 1 << 20
_OPERAND = OperandFormat(number=NarrowFormat.E4M3, scale=ScaleFormat.E8M0, block=MOMENT_BLOCK)
_LEAST_CODE = 1  # of the least number of E4M3 above 0


class Moment(Protocol):
    """A moment of the elements of a shard."""

    @property
    def is_narrow(self) -> bool: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...
    def read(self, part: slice) -> torch.Tensor: ...
    def write(self, part: slice, values: torch.Tensor) -> None: ...
    def to_stored(self) -> torch.Tensor: ...
    def take_stored(self, stored: torch.Tensor) -> None: ...


class PlainMoment:
    """A moment that is one tensor of fp32 or bf16."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    @property
    def is_narrow(self) -> bool:
        return self.flat.dtype != torch.float32

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return (self.flat,)

    def read(self, part: slice) -> torch.Tensor:
        """Return elements in fp32; of an fp32 moment they are a view."""
        return self.flat[part].float()

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Round elements, which an fp32 moment has already."""
        if self.is_narrow:
            self.flat[part].copy_(values)

    def to_stored(self) -> torch.Tensor:
        """Return the moment as checkpoints hold it: itself."""
        return self.flat

    def take_stored(self, stored: torch.Tensor) -> None:
        """Take what a checkpoint held, which was read into the moment itself."""


class BlockMoment:
    """A moment of 8-bit numbers, with a scale for each block of them.

    Of a second moment, whose root divides, no number above 0 is rounded to 0. Checkpoints hold it
    in bf16, which has room for every such number but those below 1e-38.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, *, is_second: bool) -> None:
        self._codes = codes
        self._scales = scales
        self._is_second = is_second

    @property
    def is_narrow(self) -> bool:
        return True

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._codes, self._scales

    def read(self, part: slice) -> torch.Tensor:
        """Return elements in fp32; they begin with a block."""
        numel = part.stop - part.start
        narrow = NarrowTensor(
            codes=_to_blocks(self._codes[part]).view(torch.float8_e4m3fn),
            scales=self._scales[_blocks_of(part)].view(torch.float8_e8m0fnu)[:, None],
            group_scales=None,
            groups=ONE_GROUP,
            operand=_OPERAND,
            columns=MOMENT_BLOCK,
        )
        return narrow.widen(torch.float32).view(-1)[:numel]

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Round elements to the nearest, ties to even; they begin with a block."""
        narrow = convert(_to_blocks(values), _OPERAND)
        assert narrow.scales is not None  # blocks have them
        codes = narrow.codes.view(torch.uint8).view(-1)[: len(values)]
        if self._is_second:
            codes = torch.where((codes == 0) & (values > 0), _LEAST_CODE, codes)
        self._codes[part].copy_(codes)
        self._scales[_blocks_of(part)].copy_(narrow.scales.view(torch.uint8).view(-1))

    def to_stored(self) -> torch.Tensor:
        """Return a copy in bf16, in host memory."""
        stored = torch.empty(len(self._codes), dtype=torch.bfloat16)
        # Each begins with a block, of whose size PIECE_NUMEL is a multiple.
        for part in split_into_pieces(0, len(stored)):
            stored[part].copy_(self.read(part))
        return stored

    def take_stored(self, stored: torch.Tensor) -> None:
        """Take a moment in bf16; what `to_stored` returned makes the same numbers again."""
        for part in split_into_pieces(0, len(stored)):
            self.write(part, stored[part].to(self._codes.device).float())


def build_moment(
    numel: int, dtype: Dtype, state_device: torch.device, device: torch.device, *, is_second: bool
) -> Moment:
    """Return a moment of zeros on `state_device`, for parameters on `device`."""
    if not is_scaled(dtype):
        return PlainMoment(new_state(numel, torch_dtype(dtype), state_device, device))
    return BlockMoment(
        new_state(numel, torch.uint8, state_device, device),
        new_state(-(-numel // MOMENT_BLOCK), torch.uint8, state_device, device),
        is_second=is_second,
    )


def new_state(
    numel: int, dtype: torch.dtype, state_device: torch.device, device: torch.device
) -> torch.Tensor:
    """Return zeros for optimizer state; what a GPU offloads lies in page-locked host memory.

    Copies to and from other memory are staged, and wait.
    """
    is_offloaded = device.type == "cuda" and state_device.type == "cpu"
    return torch.zeros(numel, dtype=dtype, device=state_device, pin_memory=is_offloaded)


def split_into_pieces(start: int, numel: int) -> Iterator[slice]:
    """Yield the elements from `start` on in pieces that fp32 copies are made of."""
    for first in range(start, start + numel, PIECE_NUMEL):
        yield slice(first, min(first + PIECE_NUMEL, start + numel))


def _to_blocks(flat: torch.Tensor) -> torch.Tensor:
    """Return elements as rows of a block each, the last one filled with zeros."""
    missing = -len(flat) % MOMENT_BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, MOMENT_BLOCK)


def _blocks_of(part: slice) -> slice:
    return slice(part.start // MOMENT_BLOCK, -(-part.stop // MOMENT_BLOCK))
