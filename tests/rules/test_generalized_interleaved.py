"""The generalized interleaved schedule, against the code that was published with its paper.

The numbers are those that sail-sg/zero-bubble-pipeline-parallelism counts (commit 3fd87fd1,
`GroupBuildingBlockScheduler` with group size 1, `get_peak_memory` after `add_offload`); rows of all
752 combinations of 2 to 12 ranks, 2 to 5 chunks, every interval and four numbers of micro-batches
were equal in kind, micro-batch and chunk (docs/log/layouts_proven_equal.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.intake import catalogue
from moewright.rules.saved.saved_tensor import offloading_layers
from moewright.rules.timetable.schedule import (
    check_schedule,
    max_in_flight,
    peak_live_chunks,
    timetable,
)
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import pipeline_chunks
from moewright.spec.layout import Layout, Offload, Schedule


def layout(pp: int, vpp: int, interval: int = 0) -> Layout:
    return Layout(world_size=pp, pp=pp, vpp=vpp, schedule=Schedule.GIS, vpp_group=interval)


def interleaved(pp: int, vpp: int) -> Layout:
    return Layout(world_size=pp, pp=pp, vpp=vpp, schedule=Schedule.INTERLEAVED)


def staying(chosen: Layout, offloaded: int) -> list[int]:
    """Return the chunk activations that each rank holds at most beside `offloaded` chunks."""
    return [
        peak_live_chunks([row for row in rows if row.chunk >= offloaded])
        for rows in timetable(chosen, 4 * chosen.pp)
    ]


def idle_s(chosen: Layout, m: int) -> float:
    chunk = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
    ended = row_end_times(chosen, timetable(chosen, m), [chunk] * (chosen.pp * chosen.vpp))
    return max(ended.values()) - 3 * m * chosen.vpp


@pytest.mark.parametrize(
    ("pp", "vpp", "interval", "held"),
    [
        (2, 2, 1, [3, 2]),
        (4, 2, 2, [7, 6, 5, 4]),
        (4, 2, 4, [9, 8, 7, 6]),
        (4, 3, 2, [8, 7, 6, 5]),
        (6, 2, 3, [9, 8, 7, 6, 5, 4]),
        (8, 2, 4, [13, 12, 11, 10, 9, 8, 7, 6]),
        (8, 2, 8, [17, 16, 15, 14, 13, 12, 11, 10]),
        (8, 3, 4, [16, 15, 14, 13, 12, 11, 10, 9]),
        (8, 4, 4, [23, 22, 21, 20, 19, 18, 17, 16]),
        (8, 4, 8, [35, 34, 33, 32, 31, 30, 29, 28]),
    ],
)
def test_ranks_hold_as_many_chunks_as_in_the_published_code(
    pp: int, vpp: int, interval: int, held: list[int]
) -> None:
    chosen = layout(pp, vpp, interval)
    assert [max_in_flight(chosen, 4 * pp, rank) for rank in range(pp)] == held


# What the published code holds while it copies whole chunks, one out and one back: what stays, and
# two chunks more. The engine copies layer by layer.
@pytest.mark.parametrize(
    ("pp", "vpp", "interval", "offloaded", "with_copies"),
    [
        (4, 2, 4, 1, [4, 4, 3, 3]),
        (8, 2, 4, 1, [6, 6, 5, 5, 4, 4, 3, 3]),
        (8, 2, 8, 1, [6, 6, 5, 5, 4, 4, 3, 3]),
        (8, 4, 4, 2, [9, 8, 8, 8, 7, 6, 6, 6]),
        (8, 4, 8, 2, [11, 10, 10, 10, 9, 8, 8, 8]),
    ],
)
def test_what_stays_beside_offloaded_chunks(
    pp: int, vpp: int, interval: int, offloaded: int, with_copies: list[int]
) -> None:
    chosen = layout(pp, vpp, interval)
    assert [chunks + 2 for chunks in staying(chosen, offloaded)] == with_copies


@pytest.mark.parametrize("pp", [4, 8, 16])
def test_half_of_the_chunks_take_three_quarters_with_them(pp: int) -> None:
    """See arXiv 2503.01328, figure 2: half in the interleaved timetable, three quarters here."""
    whole, plain = layout(pp, 2, pp), interleaved(pp, 2)
    assert staying(whole, 1)[0] <= staying(whole, 0)[0] / 4
    assert staying(plain, 1)[0] > staying(plain, 0)[0] / 3


@pytest.mark.parametrize("pp", range(2, 10))
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_every_row_comes_once_and_nobody_waits_for_ever(pp: int, vpp: int, m: int) -> None:
    for interval in range((pp + 1) // 2, pp + 1):
        chosen = layout(pp, vpp, interval)
        for rows in timetable(chosen, m):
            assert len(set(rows)) == len(rows) == 3 * m * vpp
        assert idle_s(chosen, m) > 0


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_two_chunks_take_no_longer_than_interleaved_and_hold_less(pp: int) -> None:
    m = 4 * pp
    assert idle_s(layout(pp, 2, pp), m) == idle_s(interleaved(pp, 2), m) == 3 * (pp - 1)
    assert idle_s(layout(pp, 2), m) < 1.15 * 3 * (pp - 1) or pp == 2
    assert staying(layout(pp, 2), 0)[0] <= 0.66 * staying(interleaved(pp, 2), 0)[0] or pp == 2


@pytest.mark.parametrize(
    ("fields", "rule", "nearest"),
    [
        ({"vpp": 1}, "gis needs vpp > 1", "2"),
        (
            {"vpp": 2, "vpp_group": 3},
            "gis takes pp / 2 to pp micro-batches between chunks: 4 to 8",
            "4",
        ),
        (
            {"vpp": 2, "vpp_group": 9},
            "gis takes pp / 2 to pp micro-batches between chunks: 4 to 8",
            "8",
        ),
    ],
)
def test_other_intervals_are_refused(fields: dict[str, int], rule: str, nearest: str) -> None:
    chosen = Layout(world_size=8, pp=8, schedule=Schedule.GIS, **fields)
    (reason,) = check_schedule(chosen, 16)
    assert (reason.rule, reason.nearest) == (rule, nearest)


def test_the_first_chunks_of_each_rank_offload() -> None:
    model = catalogue.model("Qwen3-30B-A3B")  # 48 layers
    chosen = Layout(
        world_size=4,
        pp=4,
        vpp=4,
        schedule=Schedule.GIS,
        offload=(Offload.CORE_ATTN,),
        offload_chunks=2,
    )
    own = [chunk for chunk in pipeline_chunks(model, chosen) if chunk.pp_rank == 1]
    assert offloading_layers(model, chosen, own) == {3, 4, 5, 15, 16, 17}
    halves = replace(chosen, offload_layers=0.5)
    assert offloading_layers(model, halves, own) == {3, 4, 15, 16}
