"""Boxes of a tensor: which ones a flat range covers, and whether boxes tile a tensor. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

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
    for box in sorted(boxes):
        if shape:
            first_row = box[0][0]
            active = [other for other in active if _end_row(other) > first_row]
        for other in active:
            if _overlap(box, other):
                return f"boxes at {list(other[0])} and {list(box[0])} overlap"
        active.append(box)
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
