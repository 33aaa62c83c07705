"""Boxes of a tensor: what a flat range covers, and whether a set of boxes covers a tensor exactly
once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes; one entry a dim


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The rectangular boxes that elements [start, stop) of a row-major tensor cover, in flat order.

    Each box is one contiguous run of the range, so the k-th box is the next prod(sizes) elements.
    At most 2d-1 boxes for d dims: a partial first row, the whole rows, a partial last row, and the
    same again inside the partial rows.
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
    row = prod(shape[1:])
    first, last = start // row, -(-stop // row)
    if (start, stop) == (first * row, last * row):
        whole = (last - first, *shape[1:])
        return [((first, *(0,) * (len(shape) - 1)), whole)]
    if last - first == 1:
        return _inside(shape, first, start - first * row, stop - first * row)
    cuts = sorted({start, -(-start // row) * row, stop // row * row, stop})
    return [box for low, high in pairwise(cuts) for box in _boxes(shape, low, high)]


def _inside(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in _boxes(shape[1:], start, stop)]


def find_box_fault(shape: Sequence[int], box: Box) -> str:
    """Why `box` is not a non-empty box of a tensor of `shape`; "" when it is."""
    offsets, sizes = box
    if not len(shape) == len(offsets) == len(sizes):
        return f"a box of {len(offsets)} offsets and {len(sizes)} sizes is not one of a {len(shape)}-dim tensor"
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        if offset < 0 or size < 1 or offset + size > extent:
            return f"box {list(offsets)} + {list(sizes)} is not within shape {list(shape)}"
    return ""


def find_tiling_fault(shape: Sequence[int], parts: Sequence[Box]) -> str:
    """Why `parts` do not cover a tensor of `shape` exactly once; "" when they do."""
    for part in parts:
        if fault := find_box_fault(shape, part):
            return fault
    active: list[Box] = []
    for part in sorted(parts):
        active = [other for other in active if not shape or other[0][0] + other[1][0] > part[0][0]]
        for other in active:
            if _overlap(part, other):
                return f"boxes at {list(other[0])} and {list(part[0])} overlap"
        active.append(part)
    covered = sum(prod(sizes) for _, sizes in parts)
    return "" if covered == prod(shape) else f"boxes cover {covered} of {prod(shape)} elements"


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other, strict=True))
