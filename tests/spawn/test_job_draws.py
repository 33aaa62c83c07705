"""Jobs drawn at random count what is predicted for them, and compute what one process does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from job_draws import draw_job, list_seeds, plan_draw
from layout_proof import WORKLOAD, count_layout, prove_job, prove_layout
from layout_space import SHAPES
from moewright.spec.layout import ExpertPlacement, Layout, Offload, Overlap, Recompute
from moewright.spec.plan import Plan
from moewright.spec.workload import FineTuningSpec, FrozenPart, MatrixUpdate, Task, Workload
from selection import thorough
from tiny_jobs import build_plan

pytestmark = pytest.mark.spawn

ADAPTERS = FineTuningSpec(task=Task.LORA, lora_rank=8, lora_experts=True)


@pytest.mark.parametrize("seed", list_seeds(quick=3, often=12))
def test_a_drawn_job_is_exact(seed: str, tmp_path: Path) -> None:
    draw = draw_job(seed, worlds=(1, 2, 2, 4, 4))
    print(draw)
    prove_job(plan_draw(draw), tmp_path)


# What draws have found.


def build(shape: str, workload: Workload, layout: Layout) -> Plan:
    base = build_plan(workload, "", world_size=layout.world_size, model=SHAPES[shape])
    return replace(base, layout=layout)


@pytest.mark.thorough
def test_adapters_belong_to_the_experts_that_a_placement_moves(tmp_path: Path) -> None:
    rng = random.Random(1)
    model = SHAPES["oss"]
    loads = tuple(
        tuple(rng.randrange(1, 100) for _ in range(model.expert_count))
        for _ in range(model.moe_layer_count)
    )
    workload = replace(WORKLOAD, fine_tuning=ADAPTERS, load_histogram=loads)
    layout = Layout(world_size=2, ep=2, mbs=2, expert_placement=ExpertPlacement.BALANCED)
    prove_layout(build("oss", workload, layout), tmp_path)


@pytest.mark.parametrize(
    ("shape", "fine_tuning", "recompute", "overlap"),
    [
        ("latent", FineTuningSpec(freeze=(FrozenPart.ATTENTION,)), Recompute.MLA_UP_PROJ, None),
        thorough("latent", replace(ADAPTERS, lora_experts=False), Recompute.MLA_UP_PROJ, None),
        thorough("ahead", FineTuningSpec(freeze=(FrozenPart.EMBEDDINGS,)), None, Overlap.EP),
        ("ahead", ADAPTERS, None, Overlap.EP),
    ],
)
def test_what_frozen_parts_leave_is_predicted(
    shape: str,
    fine_tuning: FineTuningSpec,
    recompute: Recompute | None,
    overlap: Overlap | None,
    tmp_path: Path,
) -> None:
    layout = Layout(
        world_size=2,
        ep=1 if recompute else 2,
        mbs=2,
        recompute=(recompute,) if recompute else (),
        overlap=(overlap,) if overlap else (),
    )
    workload = replace(WORKLOAD, fine_tuning=fine_tuning)
    count_layout(build(shape, workload, layout), tmp_path)


@pytest.mark.thorough
def test_muon_updates_experts_that_a_block_of_hybrid_sharding_holds_once(tmp_path: Path) -> None:
    """They lie in flat buffers, whose states all ranks of the experts share."""
    workload = replace(
        WORKLOAD, optimizer=replace(WORKLOAD.optimizer, matrix_update=MatrixUpdate.MUON)
    )
    layout = Layout(world_size=4, etp=2, mbs=2, zero=2, shard=2)
    prove_job(build("qwen", workload, layout), tmp_path)


@pytest.mark.thorough
def test_sequences_shorter_than_a_block_train(tmp_path: Path) -> None:
    """No query has a block to read, of either kind."""
    base = SHAPES["compressed_ahead"]
    attention = replace(base.attention, sparse_rate=32, heavy_rate=64)
    layout = Layout(world_size=2, tp=2, sp=True, ep=2, mbs=2)
    plan = build_plan(WORKLOAD, "", world_size=2, model=replace(base, attention=attention))
    count_layout(replace(plan, layout=layout), tmp_path)


def test_gradients_on_the_host_are_not_there_before_backward(tmp_path: Path) -> None:
    layout = Layout(world_size=2, mbs=2, zero=2, offload=(Offload.OPTIMIZER,))
    count_layout(build("qwen", WORKLOAD, layout), tmp_path)


def test_reduced_shards_may_outweigh_what_is_kept(tmp_path: Path) -> None:
    """Under overlap=grad they lie beside the buckets when the last backward has ended."""
    layout = Layout(world_size=2, recompute=(Recompute.FULL,), overlap=(Overlap.GRAD,))
    count_layout(build("qwen", WORKLOAD, layout), tmp_path)
