"""What each rank writes of a checkpoint is what the planner counts, to the byte, in any layout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
import torch

import tiny_jobs
from job_draws import draw_job, list_seeds
from moewright.codec import parse_layout
from moewright.cost.memory.saved_states import peer_copy_rows, save_copy_rows
from moewright.engine.checkpoint.index import payload_file_name
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES
from moewright.engine.checkpoint.planning import ShardSpec, describe_shards, plan_save
from moewright.engine.comm import collectives
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.corpus_loader import NoBatches
from moewright.engine.torch_private import FakeTensorMode
from moewright.rules.job import GENERATIONS, Job
from moewright.spec.workload import (
    CheckpointSpec,
    DataSpec,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    MatrixUpdate,
    OptimizerSpec,
    SaveMode,
    Task,
    TensorScaling,
    Workload,
)
from selection import thorough

ASYNC = CheckpointSpec(mode=SaveMode.ASYNC, peer_every_steps=1)
MUON = OptimizerSpec(matrix_update=MatrixUpdate.MUON)
NARROW = OptimizerSpec(moment_dtype=Dtype.BF16, second_moment_dtype=Dtype.FP32)
WORK = tiny_jobs.build_workload(DataSpec(), checkpoint=ASYNC)
DELAYED = replace(WORK, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED)
ROUTERS_KEPT = FineTuningSpec(task=Task.SFT, freeze=(FrozenPart.ROUTER, FrozenPart.EMBEDDINGS))


def list_specs(job: Job, rank: int) -> list[ShardSpec]:
    """List what a checkpoint holds of a rank, whose tensors have no data."""
    world_size = job.layout.world_size
    if world_size > 1:
        collectives.join_fake_world(rank=rank, world_size=world_size)
    try:
        with FakeTensorMode():
            state = build_train_state(
                job,
                NoBatches(),
                rank=rank,
                device=torch.device("cpu"),
                initial_value=lambda parameter, _: torch.empty(parameter.placement.local_shape),
            )
            return describe_shards(state.local_shards())
    finally:
        collectives.leave_world()


def assert_as_counted(job: Job) -> None:
    world_size = job.layout.world_size
    specs = [list_specs(job, rank) for rank in range(world_size)]
    written: dict[str, int] = defaultdict(int)
    for tensor in plan_save(specs):
        for stored in tensor.shards:
            _, sizes = stored.box
            written[stored.file] += prod(sizes) * SAFETENSORS_DTYPES[tensor.dtype].itemsize
    assert [written[payload_file_name(rank)] for rank in range(world_size)] == [
        sum(row.bytes for row in save_copy_rows(job, rank)) for rank in range(world_size)
    ]
    held = [
        sum(prod(sizes) * SAFETENSORS_DTYPES[dtype].itemsize for _, dtype, _, _, sizes in own)
        for own in specs
    ]
    if world_size > 1:
        assert [GENERATIONS * (held[rank] + held[rank - 1]) for rank in range(world_size)] == [
            sum(row.bytes for row in peer_copy_rows(job, rank)) for rank in range(world_size)
        ]


@pytest.mark.parametrize(
    ("world_size", "text", "workload"),
    [
        (1, "mbs1", WORK),
        (3, "zero0", WORK),
        (8, "tp2,ep2,zero0", WORK),
        (8, "tp2,ep4,pp2,layout='Et*2|tL'", replace(WORK, optimizer=MUON)),
        (8, "ep2,zero3,shard4", replace(WORK, optimizer=NARROW, precision=Dtype.BF16)),
        (8, "tp2,zero1,shard2", replace(WORK, precision=Dtype.FP16)),
        (4, "tp2,zero1", replace(WORK, fine_tuning=ROUTERS_KEPT)),
        (4, "ep2,zero0", DELAYED),
    ],
)
def test_each_rank_writes_what_is_counted(world_size: int, text: str, workload: Workload) -> None:
    layout = parse_layout(text, world_size=world_size)
    workload = replace(workload, global_batch=4 * layout.dp * layout.mbs)
    assert_as_counted(Job(model=tiny_jobs.MODEL, workload=workload, layout=layout))


@pytest.mark.parametrize("text", ["pp2,layout='Et*2|tL',zero0", thorough("pp2,layout='Et*2|tL'")])
def test_a_table_that_two_stages_hold_is_shared_by_both(text: str) -> None:
    model = replace(tiny_jobs.MODEL, tie_embeddings=True)
    moe = model.moe
    assert moe is not None
    model = replace(model, moe=replace(moe, router=replace(moe.router, selection_bias=True)))
    assert_as_counted(Job(model=model, workload=WORK, layout=parse_layout(text, world_size=4)))


@pytest.mark.parametrize("seed", list_seeds(quick=1, often=2))
def test_each_rank_of_a_drawn_job_writes_what_is_counted(seed: str) -> None:
    draw = draw_job(f"{seed} shares", worlds=(2, 4, 8), is_counted_dry=True)
    print(draw)
    workload = replace(draw.job.workload, checkpoint=ASYNC)
    assert_as_counted(replace(draw.job, workload=workload))
