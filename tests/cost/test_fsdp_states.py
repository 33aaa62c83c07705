"""States that fully_shard shards: parameter by parameter as unit by unit, and their least bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from moewright.codec import parse_layout
from moewright.cost.memory.fsdp_states import flat_state_rows, offloaded_rows, unit_state_rows
from moewright.cost.memory.model_states import bucket_sets, least_state_bytes, state_rows
from moewright.intake import catalogue
from moewright.rules import grid
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.rules.shapes import fsdp, shards
from moewright.spec.ledger import MemoryRow
from moewright.spec.workload import Dtype, MatrixUpdate, OptimizerSpec, Workload

WORK = Workload(seq_len=4096, global_batch=64)
WORKLOADS = (
    WORK,
    replace(WORK, optimizer=OptimizerSpec(matrix_update=MatrixUpdate.MUON)),
    replace(WORK, grad_dtype=Dtype.BF16, optimizer=OptimizerSpec(moment_dtype=Dtype.FP8)),
)
DEVICES = 16


def _draw_jobs(count: int, *texts: str) -> list[Job]:
    """Draw legal jobs, in layouts that begin with one of these texts."""
    random = Random(31)
    jobs: list[Job] = []
    while len(jobs) < count:
        degrees = [random.choice((1, 2, 4)) for _ in range(3)]
        text = "tp{},pp{},etp{}".format(*degrees)
        text += f",ep{random.choice((1, 2, 8))},{random.choice(texts)}"
        job = Job(
            model=catalogue.model(random.choice(("OLMoE-1B-7B-0924", "Moonlight-16B-A3B"))),
            workload=random.choice(WORKLOADS),
            layout=parse_layout(text, world_size=DEVICES),
        )
        if not check_legality(job):
            jobs.append(job)
    return jobs


def _sum(*rows: MemoryRow) -> Counter[object]:
    sums: Counter[object] = Counter()
    for row in rows:
        sums[row.component, row.module] += row.bytes
    return sums


def test_offloaded_parameters_take_what_the_units_that_hold_them_take() -> None:
    for job in _draw_jobs(12, "zero2,offload=optimizer", "zero3,offload=optimizer"):
        pp_rank = job.layout.pp - 1
        rank = grid.stage_rank(job.layout, pp_rank)
        params = shards.stage_parameters(job.model, job.layout, pp_rank)
        alone = _sum(*flat_state_rows(job, rank), *offloaded_rows(job, params))
        assert alone == _sum(*unit_state_rows(job, rank)), job.layout


def _state_bytes(job: Job) -> int:
    """Return the bytes of the states of all ranks."""
    layout = job.layout
    rows: list[MemoryRow] = []
    for rank in range(layout.world_size):
        if layout.zero >= 2:
            rows += unit_state_rows(job, rank)
        else:
            rows += state_rows(job.workload, layout, bucket_sets(job, rank))
    return sum(row.bytes for row in rows)


@pytest.mark.parametrize("text", ["zero0", "zero1", "zero3", "zero3,offload=optimizer"])
def test_no_layout_holds_less_than_the_least_bytes_of_states(text: str) -> None:
    for job in _draw_jobs(2, text):
        assert _state_bytes(job) >= least_state_bytes(job.model, job.workload) > 0, job.layout


def test_momentum_is_dealt_over_the_ranks_that_share_the_states() -> None:
    """Of experts too that a block of hybrid sharding holds once, which lie in flat buffers."""
    is_flat: Counter[bool] = Counter()
    for job in _draw_jobs(60, "zero1", "zero1,shard2", "zero2", "zero2,shard2", "zero3,shard4"):
        layout = job.layout
        flat_job = replace(job, layout=fsdp.flat_buffer_layout(layout))
        for bucket_set in bucket_sets(flat_job, 0):
            group = bucket_set.group
            shares = bucket_set.shards
            if fsdp.is_fsdp_sharded(layout, group):
                shares = grid.group_size(layout, fsdp.fsdp_groups(layout, group).shard_group)
            else:
                is_flat[layout.zero >= 2 and layout.shard > 0 and shares > 1] += 1
            momentum_group = fsdp.momentum_group(layout, group)
            assert momentum_group is not None
            assert grid.group_size(layout, momentum_group) == shares, job.layout
    assert is_flat[True]
