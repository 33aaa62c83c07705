"""The 2**rank proof: rank r puts 2**r into every gradient.

So a sum says exactly whose gradients are in it. Whose they ought to be is asked of no rule: they
are those of the ranks with the same box of the same parameter, as the ranks say themselves. The
norm of these gradients, counted over the world, must be that of the whole tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.codec import parse_layout
from moewright.engine.comm.collectives import all_reduce, gather_json, leave_world
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DataSpec

pytestmark = pytest.mark.spawn

LAYOUTS = [
    (8, "mbs1"),
    (8, "ep2,zero0"),
    (8, "ep8"),
    (8, "tp2,ep4"),  # EP across TP
    (8, "tp2,etp4"),  # ETP beyond TP, EP 1
    (8, "etp2,ep2"),  # ETP without TP
    (8, "tp2,cp2,ep4,overlap=grad"),
    (8, "cp4,etp2,ep2,zero0"),
    (8, "pp2,tp2,ep2"),  # the ends of the pipeline share the embedding
    (8, "pp4,ep2,overlap=grad"),
    (8, "pp2,ep2,etp2,schedule=zbv"),
]


def parameter_key(slot: NamedParameter) -> str:
    return f"{slot.name}{list(slot.placement.offsets)}"


def check_gradients(model: ModelSpec, layout: Layout, context: RankContext) -> RankOutcome:
    """Raise on a rank where a gradient is not the sum over the ranks with the parameter."""
    device = init_distributed(context)
    workload = tiny_jobs.build_workload(DataSpec())
    workload = replace(workload, optimizer=replace(workload.optimizer, bucket_elements=4000))
    no_batches: Any = None
    state = build_train_state(
        Job(model=model, workload=workload, layout=layout),
        no_batches,
        rank=context.rank,
        device=device,
        initial_value=draw_initial_value,
    )
    slots = {
        parameter_key(slot): slot
        for bucket in state.optimizer.buckets
        for slot, _ in bucket.grad_views
    }
    holders: dict[str, list[int]] = {}
    for rank, keys in enumerate(gather_json(sorted(slots))):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    for _ in range(2):  # with overlap=grad the second reduction runs under backward
        state.optimizer.begin_step(1)
        torch.stack(
            [2.0**context.rank * slot.parameter.sum() for slot in slots.values()]
        ).sum().backward()
        squared = state.optimizer.reduce_gradients()
    expected_squared = 0.0
    for slot in slots.values():
        summed = float(sum(2**rank for rank in holders[parameter_key(slot)]))
        shards = [
            shard
            for shard in state.optimizer.gradient_shards()
            if shard.name == f"grad/{slot.name}"
        ]
        for shard in shards:
            assert shard.tensor.eq(summed).all(), (
                parameter_key(slot),
                shard.tensor.unique(),
                holders[parameter_key(slot)],
            )
        expected_squared += summed**2 * slot.parameter.numel() / len(holders[parameter_key(slot)])
    both = torch.tensor([squared, expected_squared], dtype=torch.float64)
    actual, expected = all_reduce(both, state.runtime.mesh.group("world")).tolist()
    assert actual == pytest.approx(expected, rel=1e-5)
    leave_world()
    return RankOutcome.DONE


@pytest.mark.turns
@pytest.mark.parametrize(("world_size", "text"), LAYOUTS)
def test_a_gradient_is_the_sum_over_the_ranks_with_its_parameter(
    world_size: int, text: str, tmp_path: Path
) -> None:
    layout = parse_layout(text, world_size=world_size)
    base = tiny_jobs.MODEL
    assert base.moe is not None
    attention = replace(base.attention, heads=8, kv_heads=4)
    moe = replace(base.moe, shared_ffn_size=24)
    model = replace(
        base,
        attention=attention,
        moe=moe,
        layers=4,
        moe_layers=(True, False, True, True),
        tie_embeddings=True,
    )
    assert not check_legality(
        Job(
            model=model,
            workload=replace(tiny_jobs.build_workload(DataSpec()), global_batch=16),
            layout=layout,
        )
    )
    assert (
        launch(partial(check_gradients, model, layout), nproc=world_size, run_dir=tmp_path)
        is ExitCode.DONE
    )
