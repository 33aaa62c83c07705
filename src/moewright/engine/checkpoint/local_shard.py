"""The part of a global tensor that this rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

# Offsets and sizes, with one entry for each dim.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes that elements [start, stop) of a row-major tensor cover, in flat order.

    Each box is contiguous in the range: the k-th box is the next prod(sizes) elements. There are at
    most 2d-1 boxes for d dims: a partial first row, the whole rows, a partial last row, and the
    same again inside the partial rows.

    Raises:
        ValueError: when the range is not within the tensor.
    """
    numel = prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"range [{start}, {stop}) is not within the {numel} elements of shape {tuple(shape)}"
        )
    return tuple(_boxes(tuple(shape), start, stop)) if start < stop else ()


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if not shape:
        return [((), ())]
    row_numel = prod(shape[1:])
    first_row = start // row_numel
    end_row = -(-stop // row_numel)
    if (start, stop) == (first_row * row_numel, end_row * row_numel):
        offsets = (first_row, *(0,) * (len(shape) - 1))
        return [(offsets, (end_row - first_row, *shape[1:]))]
    if end_row - first_row == 1:
        row_start = first_row * row_numel
        return [
            ((first_row, *offsets), (1, *sizes))
            for offsets, sizes in _boxes(shape[1:], start - row_start, stop - row_start)
        ]
    first_whole = -(-start // row_numel) * row_numel
    end_whole = stop // row_numel * row_numel
    # A set: a range that begins or ends on a row has no partial first or last one.
    cuts = sorted({start, first_whole, end_whole, stop})
    return [box for low, high in pairwise(cuts) for box in _boxes(shape, low, high)]


def find_box_fault(shape: Sequence[int], box: Box) -> str:
    """Return why `box` is not a non-empty box of a tensor of `shape`; "" when it is one."""
    offsets, sizes = box
    if not len(shape) == len(offsets) == len(sizes):
        return (
            f"a box of {len(offsets)} offsets and {len(sizes)} sizes is not one of a "
            f"{len(shape)}-dim tensor"
        )
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        if offset < 0 or size < 1 or offset + size > extent:
            return f"box {list(offsets)} + {list(sizes)} is not within shape {list(shape)}"
    return ""


def find_tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return why `boxes` do not cover a tensor of `shape` exactly once; "" when they do."""
    for box in boxes:
        if fault := find_box_fault(shape, box):
            return fault
    active: list[Box] = []  # the boxes that reach the first row of the next one
    # Sorted by first row: a box that has ended meets none of those to come.
    for box in sorted(boxes):
        if shape:
            first_row = box[0][0]
            active = [other for other in active if _end_row(other) > first_row]
        for other in active:
            if _overlap(box, other):
                return f"boxes at {list(other[0])} and {list(box[0])} overlap"
        active.append(box)
    # No two overlap and all lie within, so equal counts mean that nothing is left out.
    covered = sum(prod(sizes) for _, sizes in boxes)
    return "" if covered == prod(shape) else f"boxes cover {covered} of {prod(shape)} elements"


def _end_row(box: Box) -> int:
    offsets, sizes = box
    return offsets[0] + sizes[0]


def _overlap(box: Box, other: Box) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(*box, *other, strict=True)
    )


# The names safetensors gives to dtypes.
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]*(/[A-Za-z0-9_][\w.\-]*)*", re.ASCII)


# eq=False: tensors compared give a tensor, no bool.
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalShard:
    """A box of the global tensor `name`, which lies at `offsets` and is as large as `tensor`.

    The tensor is on any device and of any of SAFETENSORS_DTYPES. An empty one holds nothing and is
    passed over.

    Raises:
        ValueError: when the box is not within `global_shape`.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not is_legal_name(self.name):
            raise ValueError(
                f"{self.name!r} is not a name of letters, digits, '_', '.', '-' and single '/'"
            )
        if self.tensor.dtype not in SAFETENSORS_DTYPES.values():
            raise ValueError(f"{self.name}: {self.tensor.dtype} is not a dtype of safetensors")
        fault = find_box_fault(self.global_shape, self.box) if self.tensor.numel() else ""
        if fault:
            raise ValueError(f"{self.name}: {fault}")

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.tensor.shape)

    def contains(self, box: Box) -> bool:
        """Tell whether a box of the global tensor lies in this one."""
        return all(
            outer <= offset and offset + size <= outer + extent
            for outer, extent, offset, size in zip(
                self.offsets, self.tensor.shape, *box, strict=True
            )
        )

    def part(self, box: Box) -> LocalShard:
        """Return what lies in a box within this one, as a view of it."""
        offsets, sizes = box
        region = tuple(
            slice(offset - outer, offset - outer + size)
            for outer, offset, size in zip(self.offsets, offsets, sizes, strict=True)
        )
        return replace(self, offsets=offsets, tensor=self.tensor[region])

    @property
    def dtype(self) -> str:
        """The safetensors name of the dtype."""
        dtype = self.tensor.dtype
        return next(name for name, candidate in SAFETENSORS_DTYPES.items() if candidate == dtype)


def whole_shard(name: str, tensor: torch.Tensor) -> LocalShard:
    """Return the shard of a tensor that every rank which has it holds whole."""
    return LocalShard(
        name=name,
        global_shape=tuple(tensor.shape),
        offsets=(0,) * tensor.dim(),
        tensor=tensor,
    )


def is_legal_name(name: str) -> bool:
    """Tell whether a tensor may have this name."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def flat_range_shards(
    name: str,
    *,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    local_shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
) -> Iterator[LocalShard]:
    """Yield the flat range [start, start + flat.numel()) of a rank's part as views of `flat`.

    The part is the box of `local_shape` at `offsets` of the global tensor; `flat` is 1-D and
    contiguous, so that a load writes through the views (a ZeRO range of an optimizer buffer).
    """
    used = 0
    for inner_offsets, sizes in flat_range_boxes(local_shape, start, start + flat.numel()):
        count = prod(sizes)
        yield LocalShard(
            name=name,
            global_shape=tuple(global_shape),
            offsets=tuple(
                outer + inner for outer, inner in zip(offsets, inner_offsets, strict=True)
            ),
            tensor=flat[used : used + count].view(sizes),
        )
        used += count


def find_nonfinite(shards: Sequence[LocalShard]) -> str:
    """Return the name of the first shard with a NaN or an infinite number; "" where there is none.

    The smallest and the largest number of a tensor are NaN where any is: that takes one pass.
    """
    for shard in shards:
        tensor = shard.tensor.detach()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() == 1:  # 8-bit numbers have no minimum
            tensor = tensor.to(torch.bfloat16)
        if not torch.isfinite(torch.stack(tensor.aminmax())).all():
            return shard.name
    return ""
