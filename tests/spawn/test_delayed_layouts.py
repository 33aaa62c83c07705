"""Delayed FP8 scales are those of one process in any layout, whatever its micro-batches are.

Activations and weights are fp64 here: numbers that differ in their last bits would now and then be
rounded to other numbers of 8 bits, which differ by a sixteenth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from layout_proof import WORKLOAD, prove_computation
from layout_space import SHAPES
from moewright.engine.runtime import Runtime
from moewright.spec.workload import DelayedScalingSpec, Dtype, LossSpec, TensorScaling
from selection import thorough

pytestmark = pytest.mark.spawn

DELAYED = replace(
    WORKLOAD,
    precision=Dtype.FP8,
    tensor_scaling=TensorScaling.DELAYED,
    delayed=DelayedScalingSpec(amax_history_len=2),
)
# By it experts are placed where a case balances them, differently in each layer.
_LOADS = (90, 10, 50, 20, 70, 30, 5, 60) * 3
# Balance losses are over a micro-batch, the other losses over the batch.
WITHOUT_BALANCE = replace(DELAYED, loss=LossSpec())


@pytest.fixture(autouse=True)
def wide_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "dtype", torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "world_size", "layout"),
    [
        ("qwen", 4, "tp2,ep2,etp2,mbs2"),
        thorough("qwen", 4, "pp2,ep2,zero0,mbs2,layout='Et|tttL'"),
        thorough("qwen", 4, "ep2,zero3,mbs2"),
        thorough("qwen", 4, "ep4,zero2,mbs2,dispatcher=dedup,overlap=grad+param"),
        thorough("qwen", 4, "cp2,ep4,mbs2,recompute=full"),
        thorough("qwen", 2, "tp2,etp2,mbs2,overlap=tp"),
        thorough("qwen", 4, "pp2,ep2,mbs1,schedule=zb-h1,layout='Ett|ttL'"),
        thorough("qwen", 2, "pp2,schedule=dualpipev,mbs1,layout='Et|t|t|tL'"),
        thorough("qwen", 4, "pp2,vpp2,ep2,mbs1,overlap=ep,layout='Et|t|t|tL'"),
        thorough("deepseek", 4, "tp2,ep4,mbs2,recompute=mla_up_proj+moe_act,offload=core_attn"),
        thorough("deep", 4, "ep4,mbs2,expert_placement=balanced,spare2"),
        thorough("ahead", 8, "tp2,ep2,etp2,pp2,mbs2"),
        thorough("latent", 4, "tp2,ep2,etp2,mbs2"),
        thorough("delta", 4, "tp2,ep2,etp2,mbs2"),
        thorough("compressed_ahead", 4, "tp2,ep2,etp2,mbs2"),
        thorough("compressed_ahead", 4, "pp2,ep2,schedule=zb-h1,mbs2,recompute=core_attn"),
        thorough("compressed_ahead", 4, "cp2,cp_comm=a2a,ep2,mbs2"),
        thorough("compressed_ahead", 2, "ep2,zero3,mbs2,recompute=full"),
    ],
)
def test_delayed_scales_compute_the_same_over_any_ranks(
    shape: str, world_size: int, layout: str, tmp_path: Path
) -> None:
    model = SHAPES[shape]
    loads = tuple(_LOADS[layer : layer + model.expert_count] for layer in range(4))
    workload = replace(DELAYED, load_histogram=loads[: model.moe_layer_count])
    plan = tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)
    prove_computation(plan, tmp_path, plan.layout.mbs)


@pytest.mark.thorough
@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "reference_mbs"),
    [(2, "ep2,mbs1", 4), thorough(4, "pp2,ep2,mbs2,layout='Et|tttL'", 8)],
)
def test_scales_do_not_depend_on_micro_batches(
    world_size: int, layout: str, reference_mbs: int, tmp_path: Path
) -> None:
    plan = tiny_jobs.build_plan(
        WITHOUT_BALANCE, layout, world_size=world_size, model=SHAPES["qwen"]
    )
    prove_computation(plan, tmp_path, reference_mbs)
