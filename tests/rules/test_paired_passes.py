"""Pairs of passes: their segments, the order in which these run, and which rows make a pair."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from moewright.rules.job import Job
from moewright.rules.limits.megatron_limits import paired_pass_limits
from moewright.rules.timetable.paired_passes import (
    PassWork,
    backward_segments,
    can_pair,
    forward_segments,
    pair_passes,
    paired_rows,
)
from moewright.rules.timetable.schedule import check_schedule, timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKey, RowKind
from moewright.spec.layout import Layout, Overlap, Recompute, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DataSpec, Dtype
from tiny_jobs import MODEL, build_workload

BESIDE = Layout(world_size=2, ep=2, overlap=(Overlap.EP,))
MOE = replace(MODEL, moe_layers=(True,) * MODEL.layers)


def whole_pass(layout: Layout, model: ModelSpec) -> tuple[list[str], list[str]]:
    """Return the segments of the forward and of the backward of a model on one stage, as text."""
    (chunk,) = Job(model=model, workload=build_workload(DataSpec()), layout=layout).rank_chunks(0)
    texts = []
    for segments in (forward_segments(model, chunk), backward_segments(model, layout, chunk)):
        texts.append(
            [
                " ".join(f"{step.work.name.lower()}{step.layer}" for step in segment.steps)
                for segment in segments
            ]
        )
    return texts[0], texts[1]


def test_exchanges_cut_a_pass_into_segments() -> None:
    forward, backward = whole_pass(BESIDE, MODEL)
    assert forward == [
        "embedding-1 before0",
        "experts0",
        "after0 whole1 before2",
        "experts2",
        "after2 head-1",
    ]
    assert backward == [" ".join(reversed(text.split())) for text in reversed(forward)]


@pytest.mark.parametrize(("recompute", "exchanges"), [("full", 8), ("moe", 8), ("layernorm", 4)])
def test_a_replayed_forward_exchanges_its_rows_again(recompute: str, exchanges: int) -> None:
    layout = replace(BESIDE, recompute=(Recompute(recompute),))
    _, backward = whole_pass(layout, MODEL)
    assert len(backward) - 1 == exchanges


def test_the_windows_are_those_of_the_papers() -> None:
    """Combine' beside the work before dispatch, dispatch beside experts', combine beside before'.

    Megatron-LM's order (core/models/common/model_chunk_schedule_plan.py).
    """
    (chunk,) = Job(model=MOE, workload=build_workload(DataSpec()), layout=BESIDE).rank_chunks(0)
    merged = pair_passes(forward_segments(MOE, chunk), backward_segments(MOE, BESIDE, chunk))
    assert "".join(segment.kind for segment in merged) == "BF" * 7
    beside = [
        (before.steps[-1].work, after.steps[0].work)
        for before, after in pairwise(merged)
        if before.kind is RowKind.B
    ]
    # What ends in the exchange of a gradient, and what runs while it travels.
    assert beside[1] == (PassWork.EXPERTS, PassWork.EXPERTS)  # dispatch' beside the experts
    assert beside[2] == (PassWork.AFTER, PassWork.AFTER)  # combine', then sum and attention
    assert merged[5].steps[-1].work is PassWork.BEFORE


def test_segments_of_the_longer_pass_are_spread() -> None:
    layout = replace(BESIDE, recompute=(Recompute.FULL,))
    (chunk,) = Job(model=MODEL, workload=build_workload(DataSpec()), layout=layout).rank_chunks(0)
    merged = pair_passes(forward_segments(MODEL, chunk), backward_segments(MODEL, layout, chunk))
    assert "".join(segment.kind for segment in merged) == "BFBFBBFBBFBBFB"


def test_a_pass_without_an_exchange_runs_beside_the_first_of_the_other() -> None:
    dense = replace(MODEL, moe_layers=(False,) * MODEL.layers)
    (chunk,) = Job(model=MODEL, workload=build_workload(DataSpec()), layout=BESIDE).rank_chunks(0)
    few = backward_segments(dense, BESIDE, chunk)
    merged = pair_passes(forward_segments(MODEL, chunk), few)
    assert "".join(segment.kind for segment in merged) == "FBFFFF"
    merged = pair_passes(forward_segments(dense, chunk), backward_segments(MODEL, BESIDE, chunk))
    assert "".join(segment.kind for segment in merged) == "BFBBBB"


def paired_end_s(layout: Layout, micro_batches: int) -> float | None:
    """Return when the rows end where pairs begin and end together, and a row takes a second.

    None where ranks wait for each other for ever.
    """
    last_stage = layout.pp * layout.vpp - 1
    ends_s: dict[RowKey, float] = {}
    table = timetable(layout, micro_batches)
    places = [0] * layout.pp
    clocks_s = [0.0] * layout.pp
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, rows in enumerate(table):
            pairs = paired_rows(rows)
            while places[rank] < len(rows):
                size = 2 if places[rank] in pairs else 1
                unit = rows[places[rank] : places[rank] + size]
                keys = [
                    (row.kind, row.micro_batch, virtual_stage(layout, rank, row.chunk))
                    for row in unit
                ]
                needs = {
                    (kind, micro_batch, stage - 1 if kind is RowKind.F else stage + 1)
                    for kind, micro_batch, stage in keys
                    if kind is not RowKind.W
                }
                needs = {need for need in needs if 0 <= need[2] <= last_stage}
                if needs - ends_s.keys():
                    break
                clocks_s[rank] = max(clocks_s[rank], *(ends_s[need] for need in needs), 0) + size
                ends_s |= dict.fromkeys(keys, clocks_s[rank])
                places[rank] += size
                has_moved = True
    return max(clocks_s) if places == [len(rows) for rows in table] else None


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 3), (3, 2), (4, 2), (5, 2)])
def test_pairs_wait_for_ever_in_a_single_short_group_alone(pp: int, vpp: int) -> None:
    for group in range(pp, 2 * pp + 2):
        layout = Layout(
            world_size=pp,
            pp=pp,
            vpp=vpp,
            vpp_group=group,
            schedule=Schedule.INTERLEAVED,
            overlap=(Overlap.EP,),
        )
        for micro_batches in range(pp, 4 * pp):
            if not check_schedule(layout, micro_batches):
                ends = paired_end_s(layout, micro_batches) is not None
                assert ends == can_pair(layout, micro_batches), (group, micro_batches)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_pairs_of_dualpipev_wait_for_no_one_for_ever(pp: int) -> None:
    layout = Layout(world_size=pp, pp=pp, vpp=2, schedule=Schedule.DUALPIPEV, overlap=(Overlap.EP,))
    for micro_batches in (2 * pp, 2 * pp + 1, 4 * pp):
        assert can_pair(layout, micro_batches)
        assert paired_end_s(layout, micro_batches) is not None


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 4])
def test_pairs_make_a_step_of_gis_three_tenths_longer(pp: int, vpp: int) -> None:
    """So overlap=ep is refused: a forward that ends with a backward reaches the next rank late."""
    layout = Layout(world_size=pp, pp=pp, vpp=vpp, schedule=Schedule.GIS)
    second = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
    stages = [second] * pp * vpp
    alone_s = max(row_end_times(layout, timetable(layout, 32), stages).values())
    together_s = paired_end_s(layout, 32)
    assert together_s is not None
    assert 1.25 * alone_s < together_s < 1.35 * alone_s


def test_megatron_pairs_fewer_passes_than_the_engine() -> None:
    bf16 = build_workload(DataSpec(), precision=Dtype.BF16)
    assert not list(paired_pass_limits(Job(model=MODEL, workload=bf16, layout=BESIDE)))
    for model, workload, layout, rule in (
        (MODEL, build_workload(DataSpec()), BESIDE, "bf16 or fp16"),
        (replace(MODEL, mtp_layers=2), bf16, BESIDE, "one MTP layer"),
        (MODEL, bf16, replace(BESIDE, recompute=(Recompute.FULL,)), "recompute=full"),
        (MODEL, bf16, replace(BESIDE, recompute=(Recompute.MOE,)), "recompute=moe"),
    ):
        (reason,) = paired_pass_limits(Job(model=model, workload=workload, layout=layout))
        assert rule in reason.rule
