"""Choices of routing equal one process in layouts that cut tokens, experts and batches, their ledgers exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from layout_proof import WORK, prove
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.spec.plan import Plan
from moewright.spec.workload import Assignment, LossSpec, RouterDtype, RouterTraining
from tiny_jobs import plan

pytestmark = pytest.mark.spawn

# The global loss counts what came before in the step, so that ranks beside each other see less than one after another.
_EVERY_LOSS = LossSpec(aux_coeff=0.02, seq_aux_coeff=0.01, global_aux_coeff=0.03, z_coeff=0.001)
_UNTIL_SETTLED = RouterTraining(assignment=Assignment.SINKHORN)
_FIXED = RouterTraining(assignment=Assignment.SINKHORN, sinkhorn_iterations=4, jitter_eps=0.1)
_NOISY = RouterTraining(jitter_eps=0.3)
_WIDE = RouterTraining(router_dtype=RouterDtype.FP64)
_Z = LossSpec(z_coeff=0.001)


def made(shape: str, world: int, text: str, training: RouterTraining, loss: LossSpec = WORK.loss) -> Plan:
    work = replace(WORK, router=training, loss=loss)
    return replace(plan(work, "", world_size=world, model=SHAPES[shape]), layout=parse_layout(text, world_size=world))


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(made("qwen", 4, "tp2,ep4,mbs2", _UNTIL_SETTLED, _Z), id="sinkhorn over TP and EP"),
        pytest.param(made("deep", 4, "cp2,ep2,mbs2,recompute=moe", _FIXED, _Z), id="fixed sinkhorn, noise, over CP"),
        pytest.param(made("olmoe", 4, "pp2,ep2,mbs1,recompute=full", _NOISY), id="noise over stages, replayed"),
        pytest.param(made("qwen", 8, "tp2,cp2,ep4,mbs2", _NOISY), id="noise over TP, CP and DP"),
        pytest.param(made("deepseek", 2, "tp2,ep2,mbs2", _WIDE, _EVERY_LOSS), id="fp64, four losses"),
    ],
)
def test_a_choice_of_routing_equals_one_process(job: Plan, tmp_path: Path) -> None:
    prove(job, tmp_path)
