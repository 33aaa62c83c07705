"""Timetables by hand and against closed forms, and what has no timetable."""

from __future__ import annotations

import pytest

from moewright.rules.timetable.schedule import (
    bubble_fraction,
    check_schedule,
    max_in_flight,
    timetable,
)
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout, Overlap, Schedule


def layout(*, pp: int, vpp: int = 1, group: int = 0, overlap: tuple[Overlap, ...] = ()) -> Layout:
    schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    return Layout(
        world_size=pp, pp=pp, vpp=vpp, vpp_group=group, schedule=schedule, overlap=overlap
    )


def text(rows: tuple[TimetableRow, ...]) -> str:
    """Return each row as kind, micro-batch, and chunk as a letter: F0a B0a."""
    return " ".join(f"{row.kind}{row.micro_batch}{'abcdef'[row.chunk]}" for row in rows)


def makespan_s(chosen: Layout, table: tuple[tuple[TimetableRow, ...], ...]) -> float:
    """Return the makespan for forward, input and weight gradients of a second each."""
    unit = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
    return max(row_end_times(chosen, table, [unit] * (chosen.pp * chosen.vpp)).values())


def test_1f1b_by_hand() -> None:
    first, second = timetable(layout(pp=2), 3)
    assert text(first) == "F0a F1a B0a F2a B1a B2a"
    assert text(second) == "F0a B0a F1a B1a F2a B2a"


def test_interleaved_by_hand() -> None:
    """pp=2, v=2, N=2: warm-up of 2 (pp - r - 1) + (v - 1) N chunk forwards."""
    first, second = timetable(layout(pp=2, vpp=2), 2)
    assert text(first) == "F0a F1a F0b F1b B0b B1b B0a B1a"
    assert text(second) == "F0a F1a F0b B0b F1b B1b B0a B1a"


def test_a_last_group_that_is_smaller() -> None:
    """N=3 of m=5: the rest, 2 >= pp, is a group of its own, forwards and backwards."""
    rows = timetable(layout(pp=2, vpp=2, group=3), 5)[1]
    forwards = [row for row in rows if row.kind is RowKind.F]
    assert text(tuple(forwards)) == "F0a F1a F2a F0b F1b F2b F3a F4a F3b F4b"
    backwards = [row for row in rows if row.kind is RowKind.B]
    assert text(tuple(backwards)) == "B0b B1b B2b B0a B1a B2a B3b B4b B3a B4a"


@pytest.mark.parametrize(
    ("pp", "micro_batches", "vpp", "percent"),
    [
        (32, 256, 3, 3.88),
        (32, 512, 1, 5.71),
        (8, 128, 1, 5.19),
        (32, 512, 3, 1.98),
        (8, 128, 4, 1.35),
        (8, 256, 4, 0.68),
        (32, 128, 3, 7.47),  # micro-batches four times as large, half as many
    ],
)
def test_bubbles_of_the_catalogue(pp: int, micro_batches: int, vpp: int, percent: float) -> None:
    assert round(100 * bubble_fraction(layout(pp=pp, vpp=vpp), micro_batches), 2) == percent


@pytest.mark.parametrize(
    ("pp", "vpp", "m"), [(4, 1, 8), (4, 1, 2), (4, 2, 8), (3, 3, 6), (2, 4, 2), (8, 4, 16)]
)
def test_the_closed_form_is_the_bubble_of_the_table(pp: int, vpp: int, m: int) -> None:
    chosen = layout(pp=pp, vpp=vpp)
    span = makespan_s(chosen, timetable(chosen, m))
    busy = m * vpp * 3.0
    assert 1 - busy / span == pytest.approx(bubble_fraction(chosen, m), abs=1e-12)


def test_larger_micro_batches_at_the_same_batch_raise_the_bubble() -> None:
    chosen = layout(pp=32, vpp=3)
    assert bubble_fraction(chosen, 2048 // (4 * 8)) > bubble_fraction(chosen, 2048 // 8)


def test_in_flight_of_1f1b_tapers() -> None:
    chosen = layout(pp=4)
    assert [max_in_flight(chosen, 8, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [max_in_flight(chosen, 2, rank) for rank in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(("pp", "vpp", "factor"), [(8, 4, 9.75), (32, 3, 42.33)])
def test_in_flight_of_the_catalogue(pp: int, vpp: int, factor: float) -> None:
    """docs/formulas.md 5: pp (1 + (pp - 1) / (pp v)) full ranks of activations on rank 0."""
    chosen = layout(pp=pp, vpp=vpp)
    assert round(max_in_flight(chosen, 4 * pp, 0) / vpp, 2) == factor
    assert max_in_flight(chosen, 4 * pp, 0) == pp * (vpp + 1) - 1
    assert max_in_flight(chosen, 4 * pp, pp - 1) == (vpp - 1) * pp + 1
    overlapped = layout(pp=pp, vpp=vpp, overlap=(Overlap.EP,))
    assert max_in_flight(overlapped, 4 * pp, 0) == pp * (vpp + 1)


def test_wider_groups_hold_more_and_bubble_the_same() -> None:
    pp, vpp, group, m = 4, 3, 6, 24
    wide = layout(pp=pp, vpp=vpp, group=group)
    narrow = layout(pp=pp, vpp=vpp)
    assert max_in_flight(wide, m, 0) == 2 * (pp - 1) + (vpp - 1) * group + 1
    spans = [makespan_s(chosen, timetable(chosen, m)) for chosen in (wide, narrow)]
    assert spans[0] == spans[1]


def test_pipelining_alone_leaves_activation_memory_and_virtual_stages_raise_it() -> None:
    """docs/formulas.md 5: in units of one rank's layers times pp; the penalty falls as v rises."""
    peak = {vpp: max_in_flight(layout(pp=8, vpp=vpp), 64, 0) / vpp / 8 for vpp in (1, 2, 3, 4, 6)}
    assert peak[1] == 1.0
    assert peak[2] > peak[3] > peak[4] > peak[6] > peak[1]


def test_one_rank_needs_no_warm_up() -> None:
    (rows,) = timetable(layout(pp=1), 2)
    assert text(rows) == "F0a B0a F1a B1a"
    (paired,) = timetable(Layout(world_size=2, ep=2, overlap=(Overlap.EP,)), 3)
    assert text(paired) == "F0a F1a B0a F2a B1a B2a"


def test_a_table_that_waits_for_itself_is_found() -> None:
    first, second = timetable(layout(pp=2), 2)
    with pytest.raises(RuntimeError, match=r"deadlocks on pipeline ranks \[0, 1\]"):
        makespan_s(layout(pp=2), (first, tuple(reversed(second))))


@pytest.mark.parametrize(
    ("chosen", "m", "field", "nearest"),
    [
        (layout(pp=4, vpp=2, group=3), 8, "layout.vpp_group", "4"),
        (layout(pp=4, vpp=2, group=9), 8, "layout.vpp_group", "8"),
        (layout(pp=4, vpp=2, group=7), 9, "layout.vpp_group", "5 or 9"),
        (layout(pp=4, vpp=2), 6, "layout.vpp_group", "6"),
        (layout(pp=4, vpp=2, group=10**9), 8, "layout.vpp_group", "8"),
        (layout(pp=4, vpp=2), 3, "workload.global_batch", "4"),
        (layout(pp=2, group=2), 4, "layout.vpp_group", "0"),
        (Layout(world_size=4, vpp=2, schedule=Schedule.INTERLEAVED), 4, "layout.vpp", "1"),
        (Layout(world_size=4, pp=4, vpp=2), 4, "layout.schedule", "interleaved"),
        (Layout(world_size=4, pp=4, schedule=Schedule.INTERLEAVED), 4, "layout.schedule", "1f1b"),
        (Layout(world_size=4, schedule=Schedule.ZB_H1), 4, "layout.schedule", "1f1b"),
        (Layout(world_size=4, pp=4, vpp=2, schedule=Schedule.ZB_H1), 4, "layout.vpp", "1"),
        (Layout(world_size=4, pp=4, schedule=Schedule.ZBV), 4, "layout.vpp", "2"),
        (
            Layout(world_size=4, pp=4, vpp=2, vpp_group=4, schedule=Schedule.ZBV),
            4,
            "layout.vpp_group",
            "0",
        ),
        (
            Layout(world_size=4, pp=4, vpp=2, schedule=Schedule.DUALPIPEV),
            7,
            "workload.global_batch",
            "8",
        ),
    ],
)
def test_there_is_no_table(chosen: Layout, m: int, field: str, nearest: str) -> None:
    """docs/formulas.md 5 for the groups."""
    (reason,) = check_schedule(chosen, m)
    assert (reason.field, reason.nearest) == (field, nearest)
    with pytest.raises(BadInput):
        timetable(chosen, m)


@pytest.mark.parametrize(("group", "m"), [(4, 8), (5, 9), (6, 16), (0, 12), (8, 8)])
def test_legal_groups(group: int, m: int) -> None:
    """docs/formulas.md 5: pp <= N <= m, and a remainder of 0 or at least pp."""
    assert check_schedule(layout(pp=4, vpp=2, group=group), m) == ()


def test_no_micro_batches_no_table() -> None:
    with pytest.raises(BadInput, match="at least 1"):
        timetable(layout(pp=2), 0)
