"""Timetables as arrays hold the rows of the timetable, and follow what is alive as a walk would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.cost.memory.snapshots import RankTable, rank_table, table_from_rows, take_snapshots
from moewright.rules.timetable import schedule, timetable_row
from moewright.rules.timetable.paired_passes import can_pair
from moewright.spec.layout import Layout, Overlap, Schedule


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Layout, int]:
    """Draw a pipeline of single ranks and a number of micro-batches."""
    pp = draw(st.sampled_from((1, 2, 3, 4)))
    vpp = draw(st.sampled_from((1, 2, 3))) if pp > 1 else 1
    overlap = draw(st.sampled_from(((), (Overlap.EP,))))
    layout = Layout(world_size=pp, pp=pp, vpp=vpp, overlap=overlap)
    if vpp > 1:
        layout = replace(layout, schedule=Schedule.INTERLEAVED)
        return layout, pp * draw(st.integers(1, 4))
    return layout, draw(st.integers(1, 12))


@given(pipelines())
def test_the_arrays_are_the_timetable(pipeline: tuple[Layout, int]) -> None:
    layout, micro_batches = pipeline
    for pp_rank, rows in enumerate(schedule.timetable(layout, micro_batches)):
        _assert_equal(rank_table(layout, micro_batches, pp_rank), table_from_rows(layout, rows))


def _assert_equal(left: RankTable, right: RankTable) -> None:
    for field in fields(RankTable):
        assert np.array_equal(getattr(left, field.name), getattr(right, field.name)), field.name


@given(pipelines())
def test_moments_are_those_of_a_walk(pipeline: tuple[Layout, int]) -> None:
    """A forward beside a backward is seen twice with a layer more, and alone as it ends."""
    layout, micro_batches = pipeline
    for pp_rank, rows in enumerate(schedule.timetable(layout, micro_batches)):
        table = rank_table(layout, micro_batches, pp_rank)
        moments = take_snapshots(table, np.eye(layout.vpp), table.chunk)
        seen = zip(
            (moments.live + moments.owed).tolist(),
            moments.forward.tolist(),
            np.maximum(moments.backward, moments.weights).tolist(),
            moments.paired.tolist(),
            strict=True,
        )
        assert list(seen) == list(_walk(layout, rows))


def _walk(
    layout: Layout, rows: Sequence[timetable_row.TimetableRow]
) -> Iterator[tuple[list[float], int, int, int]]:
    live = [0.0] * layout.vpp
    skips = False
    pairs = can_pair(layout, sum(row.chunk == 0 for row in rows) // 2)
    for row, after in zip(rows, (*rows[1:], None), strict=True):
        is_forward = row.kind is timetable_row.RowKind.F
        if skips:
            skips = False
        elif pairs and is_forward and after is not None and _runs_beside(row, after):
            yield [*live], -1, after.chunk, row.chunk
            live[after.chunk] -= 1
            live[row.chunk] += 1
            yield [*live], -1, after.chunk, row.chunk
            yield [*live], row.chunk, -1, -1
            skips = True
        elif is_forward:
            live[row.chunk] += 1
            yield [*live], row.chunk, -1, -1
        else:
            yield [*live], -1, row.chunk, -1
            live[row.chunk] -= 1


def _runs_beside(forward: timetable_row.TimetableRow, after: timetable_row.TimetableRow) -> bool:
    own = (forward.micro_batch, forward.chunk) == (after.micro_batch, after.chunk)
    return after.kind is timetable_row.RowKind.B and not own


@pytest.mark.parametrize(
    "name",
    [
        Schedule.ZB_H1,
        Schedule.ZBV,
        Schedule.V_HALF,
        Schedule.V_MIN,
        Schedule.DUALPIPEV,
    ],
)
@pytest.mark.parametrize("overlap", [(), (Overlap.EP,)])
def test_nothing_is_alive_in_the_end_and_all_of_it_is_counted(
    name: Schedule, overlap: tuple[Overlap, ...]
) -> None:
    """Chunks alive are those whose forward has begun and whose last row has not ended."""
    vpp = 1 if name is Schedule.ZB_H1 else 2
    layout = Layout(world_size=4, pp=4, vpp=vpp, schedule=name, overlap=overlap)
    for pp_rank, rows in enumerate(schedule.timetable(layout, 16)):
        table = rank_table(layout, 16, pp_rank)
        moments = take_snapshots(table, np.eye(vpp), table.chunk)
        assert min(moments.live.min(), moments.owed.min()) >= 0
        assert table.is_forward.sum() == table.frees.sum() == 16 * vpp
        if not overlap:
            alive = (moments.live + moments.owed).sum(axis=1)
            assert alive.max() == schedule.peak_live_chunks(rows)
