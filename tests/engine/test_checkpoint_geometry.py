"""Boxes of flat ranges and tilings, against an enumeration of every element."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.checkpoint import flat_range_boxes, flat_range_shards
from moewright.engine.checkpoint.local_shard import Box, find_tiling_fault

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Return the flat numbers of the elements in a box, row-major."""
    numbers = torch.arange(prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        numbers = numbers.narrow(dim, offset, size)
    numbers_found: list[int] = numbers.reshape(-1).tolist()
    return numbers_found


@given(ranges())
def test_boxes_are_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers_found = [
        number for box in flat_range_boxes(shape, start, stop) for number in elements(shape, box)
    ]
    assert numbers_found == list(range(start, stop))


@given(ranges())
def test_boxes_are_at_most_two_d_minus_one(case: tuple[tuple[int, ...], int, int]) -> None:
    assert len(flat_range_boxes(*case)) <= max(1, 2 * len(case[0]) - 1)


def test_the_bound_is_reached() -> None:
    assert len(flat_range_boxes((4, 4, 4), 5 + 16, 64 - 5)) == 5


def test_a_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range \[2, 7\)"):
        flat_range_boxes((2, 3), 2, 7)


@settings(max_examples=200)
@given(SHAPES, st.data())
def test_tilings_are_told_from_gaps_and_overlaps(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    cuts = sorted(
        data.draw(st.sets(st.integers(1, max(1, prod(shape) - 1)), max_size=3)) - {prod(shape)}
    )
    edges = [0, *cuts, prod(shape)]
    parts = [box for low, high in pairwise(edges) for box in flat_range_boxes(shape, low, high)]
    assert find_tiling_fault(shape, parts) == ""
    victim = data.draw(st.sampled_from(parts))
    assert "cover" in find_tiling_fault(shape, [part for part in parts if part != victim])
    assert "overlap" in find_tiling_fault(shape, [*parts, victim])


def test_an_overlap_that_makes_up_for_a_gap_is_found() -> None:
    assert "overlap" in find_tiling_fault((4,), [((0,), (2,)), ((1,), (2,))])
    assert "not within" in find_tiling_fault((4,), [((0,), (2,)), ((3,), (2,))])
    assert "not one of" in find_tiling_fault((4,), [((0, 0), (2, 2))])


@given(ranges())
def test_flat_shards_write_through_to_the_flat_buffer(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    flat = torch.zeros(stop - start, dtype=torch.int64)
    global_shape = tuple(extent + 2 for extent in shape)
    numbers = torch.arange(prod(shape)).view(shape)
    shards = flat_range_shards(
        "w",
        global_shape=global_shape,
        offsets=(1,) * len(shape),
        local_shape=shape,
        start=start,
        flat=flat,
    )
    for shard in shards:
        box = tuple(
            slice(offset - 1, offset - 1 + size)
            for offset, size in zip(shard.offsets, shard.tensor.shape, strict=True)
        )
        shard.tensor.copy_(numbers[box])
    assert flat.tolist() == list(range(start, stop))
