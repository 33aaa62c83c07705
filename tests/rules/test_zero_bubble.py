"""Timetables with split backwards, against what their papers promise."""

from __future__ import annotations

from collections import Counter

import pytest

from moewright.rules.timetable.schedule import max_in_flight, timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import stage_position, virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.layout import Layout, Schedule

SPLIT = [Schedule.ZB_H1, Schedule.ZBV, Schedule.V_HALF, Schedule.V_MIN, Schedule.DUALPIPEV]


def layout(schedule: Schedule, pp: int) -> Layout:
    return Layout(world_size=pp, pp=pp, vpp=1 + schedule.is_v_shaped, schedule=schedule)


def idle_s(
    chosen: Layout, m: int, *, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0
) -> float:
    """Return the seconds of the step in which a rank does nothing, with all chunks alike."""
    chunk = StageSeconds(forward=forward, input_backward=backward, weight_backward=weight)
    ended = row_end_times(chosen, timetable(chosen, m), [chunk] * (chosen.pp * chosen.vpp))
    return max(ended.values()) - m * chosen.vpp * (forward + backward + weight)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("pp", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16, 21])
def test_every_row_comes_once_and_nobody_waits_for_ever(
    schedule: Schedule, pp: int, m: int
) -> None:
    chosen = layout(schedule, pp)
    if schedule is Schedule.DUALPIPEV and m < 2 * pp:
        m += 2 * pp
    table = timetable(chosen, m)
    every = {(micro_batch, chunk) for micro_batch in range(m) for chunk in range(chosen.vpp)}
    for rows in table:
        assert max(Counter(rows).values()) == 1
        for kind in (RowKind.F, RowKind.B):
            assert {(row.micro_batch, row.chunk) for row in rows if row.kind is kind} == every
    assert idle_s(chosen, m) > 0


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(
    ("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.5, 1.5)]
)
def test_zb_h1_leaves_forward_and_backward_less_weight(
    pp: int, forward: float, backward: float, weight: float
) -> None:
    """See arXiv 2401.10241, table 2: (p - 1)(F + B - W), where 1F1B idles (p - 1)(F + B + W)."""
    seconds = {"forward": forward, "backward": backward, "weight": weight}
    assert idle_s(layout(Schedule.ZB_H1, pp), 3 * pp, **seconds) == pytest.approx(
        (pp - 1) * (forward + backward - weight)
    )
    assert idle_s(layout(Schedule.ONE_F_ONE_B, pp), 3 * pp, **seconds) == pytest.approx(
        (pp - 1) * (forward + backward + weight)
    )


@pytest.mark.parametrize("schedule", [Schedule.ZBV, Schedule.DUALPIPEV])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_v_leaves_its_fill(schedule: Schedule, pp: int) -> None:
    """See arXiv 2405.15362: with F = B = W only the fill remains, half a stage for each rank."""
    assert idle_s(layout(schedule, pp), 4 * pp) == pp - 1


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_rank_of_zbv_never_waits_once_it_has_begun(pp: int) -> None:
    chosen = layout(Schedule.ZBV, pp)
    chunk = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
    table = timetable(chosen, 4 * pp)
    ended = row_end_times(chosen, table, [chunk] * (2 * pp))
    for rank, rows in enumerate(table):
        own = [
            ended[row.kind, row.micro_batch, virtual_stage(chosen, rank, row.chunk)] for row in rows
        ]
        assert max(own) - (min(own) - 1) == 4 * pp * 2 * 3


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_what_the_ranks_hold(pp: int) -> None:
    """Ranks of ZB-H1 and ZBV hold what the first of 1F1B holds; DualPipeV half a stage more."""
    m = 4 * pp
    assert {max_in_flight(layout(Schedule.ZB_H1, pp), m, rank) for rank in range(pp)} == {pp}
    assert {max_in_flight(layout(Schedule.ZBV, pp), m, rank) for rank in range(pp)} == {2 * pp}
    assert {max_in_flight(layout(Schedule.DUALPIPEV, pp), m, rank) for rank in range(pp)} == {
        2 * pp + 1
    }


# The table of sail-sg/zero-bubble-pipeline-parallelism and of arXiv 2405.15362, F = B = W: what the
# ranks hold as micro-batches, and the share of the idle time of 1F1B that is left.
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize(
    ("schedule", "added", "divisor", "idle"),
    [(Schedule.V_HALF, 2, 2, 1 / 2), (Schedule.V_MIN, 4, 3, 2 / 3)],
)
def test_controlled_memory_holds_what_the_paper_says(
    schedule: Schedule, added: int, divisor: int, idle: float, pp: int
) -> None:
    for m in (pp, 4 * pp):
        chosen = layout(schedule, pp)
        held = [max_in_flight(chosen, m, rank) for rank in range(pp)]
        if m > pp:
            assert max(held) == chosen.vpp * ((pp + added) // divisor)
        assert max(held) <= chosen.vpp * ((pp + added) // divisor)
        # A chunk takes a second, a whole rank of 1F1B two.
        whole = idle_s(layout(Schedule.ONE_F_ONE_B, pp), m, forward=2, backward=2, weight=2)
        assert idle_s(chosen, m) <= idle * whole + 2


@pytest.mark.parametrize(
    ("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.3, 0.8), (1.0, 0.8, 1.2)]
)
def test_v_half_is_faster_than_1f1b_and_zbv_is_faster_still(
    forward: float, backward: float, weight: float
) -> None:
    """Their F, B and W satisfy what the paper asks for: W + 2B >= 2F and W + 2F >= 2B."""
    pp, m = 8, 32
    seconds = {"forward": forward, "backward": backward, "weight": weight}
    whole = {key: 2 * value for key, value in seconds.items()}
    idle = {name: idle_s(layout(name, pp), m, **seconds) for name in SPLIT}
    assert idle[Schedule.ZBV] < idle[Schedule.V_HALF]
    assert idle[Schedule.V_HALF] < idle_s(layout(Schedule.ONE_F_ONE_B, pp), m, **whole)


def test_a_v_comes_back_to_the_first_rank() -> None:
    chosen = layout(Schedule.ZBV, 3)
    assert [stage_position(chosen, stage) for stage in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    assert [virtual_stage(chosen, *stage_position(chosen, stage)) for stage in range(6)] == list(
        range(6)
    )
    around = Layout(world_size=3, pp=3, vpp=2, schedule=Schedule.INTERLEAVED)
    assert [stage_position(around, stage) for stage in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 1),
        (1, 1),
        (2, 1),
    ]
