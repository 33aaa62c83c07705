"""A job derives from its three nouns what every part of the planner and the engine asks for."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from model_shapes import dense_model, moe_model
from moewright.rules.job import Job
from moewright.spec.errors import BadInput
from moewright.spec.layout import CapacityFill, Layout, Schedule
from moewright.spec.workload import Workload

# 16 ranks: dp = 16 / (2 * 2 * 2) = 2, so a step has 24 / (2 * 2) = 6 micro-batches of 2 sequences.
JOB = Job(
    model=moe_model(layers=8),
    workload=Workload(seq_len=1024, global_batch=24),
    layout=Layout(
        world_size=16,
        tp=2,
        sp=True,
        cp=2,
        pp=2,
        vpp=2,
        ep=4,
        etp=2,
        mbs=2,
        schedule=Schedule.INTERLEAVED,
    ),
)


def test_a_step_has_the_micro_batches_of_one_data_parallel_rank() -> None:
    assert JOB.micro_batches == 6


def test_a_global_batch_of_broken_micro_batches_is_refused_when_they_are_asked_for() -> None:
    job = replace(JOB, workload=replace(JOB.workload, global_batch=25))
    with pytest.raises(BadInput, match="mbs \\* dp = 2 \\* 2 must divide global_batch=25"):
        _ = job.micro_batches


def test_tokens_of_a_micro_batch_are_cut_by_cp_and_by_sequence_parallelism() -> None:
    """T = 1024 * 2 / cp; t = T / tp under sequence parallelism alone."""
    assert JOB.tp_group_tokens == 1024
    assert JOB.micro_batch_tokens == 512
    whole = replace(JOB, layout=replace(JOB.layout, sp=False))
    assert whole.tp_group_tokens == whole.micro_batch_tokens == 1024


def test_chunks_of_a_rank_are_its_virtual_stages_in_model_order() -> None:
    assert [chunk.layers for chunk in JOB.chunks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [chunk.layers for chunk in JOB.rank_chunks(1)] == [(2, 3), (6, 7)]
    by_rank = [chunk for pp_rank in range(2) for chunk in JOB.rank_chunks(pp_rank)]
    assert sorted(by_rank, key=lambda chunk: chunk.layers) == list(JOB.chunks)


def test_rows_of_a_rank_follow_its_load_and_its_capacity() -> None:
    """512 tokens choose 2 experts each, and the 2 ETP ranks of a group share their rows."""
    assert JOB.routed_rows() == 512 * 2 * 2
    assert JOB.routed_rows(1.5) == 512 * 2 * 2 * 3 // 2
    capped = replace(JOB, layout=replace(JOB.layout, capacity=1.0))
    assert capped.routed_rows(3.0) == 512 * 2 * 2
    padded = replace(
        JOB, layout=replace(JOB.layout, capacity=2.0, capacity_fill=CapacityFill.PADDED)
    )
    assert padded.routed_rows(0.5) == 512 * 2 * 2 * 2
    budgeted = replace(JOB, layout=replace(JOB.layout, rank_capacity=1.5))
    assert budgeted.routed_rows(0.5) == budgeted.routed_rows(9.0) == 512 * 2 * 2 * 3 // 2


def test_a_dense_model_has_no_experts_and_no_rows() -> None:
    job = replace(JOB, model=dense_model(), layout=Layout(world_size=2))
    assert job.local_experts == 0
    assert job.routed_rows() == 0
    assert JOB.local_experts == 4


def test_another_layout_takes_no_cached_value_along() -> None:
    assert JOB.micro_batches == 6
    smaller = replace(JOB, layout=replace(JOB.layout, mbs=1))
    assert smaller.micro_batches == 12
    assert smaller != JOB
    assert replace(smaller, layout=JOB.layout) == JOB


def test_a_job_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        JOB.layout = Layout(world_size=1)  # type: ignore[misc]
