"""Steps, and parts of layers, replayed from lists of operations: the bits of others.

Parts are replayed in any timetable.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.workload import DataSpec, LossSpec
from selection import thorough

pytestmark = pytest.mark.spawn

assert tiny_jobs.MODEL.moe is not None
SHARED = replace(
    tiny_jobs.MODEL, mtp_layers=1, moe=replace(tiny_jobs.MODEL.moe, shared_ffn_size=24)
)
EVERY_LOSS = LossSpec(aux_coeff=0.02, z_coeff=0.001, global_aux_coeff=0.01, seq_aux_coeff=0.01)


PARTS = "attn+moe_router+moe_preprocess"


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "ep2,mbs2,rank_capacity=2"),
        thorough(1, "mbs4,rank_capacity=1,recompute=full"),
        thorough(4, "tp2,ep2,etp2,rank_capacity=2,mbs2"),
        thorough(2, "cp2,cp_comm=allgather,ep2,capacity=1,capacity_fill=padded,recompute=moe_act"),
        thorough(2, "cp2,cp_comm=p2p,rank_capacity=2,mbs2"),
        thorough(4, "cp4,ep2,cp_comm=a2a+p2p,rank_capacity=2"),
        # Over the budget in every step: the graph is replayed, and its gradients thrown away.
        thorough(2, "ep2,mbs2,rank_capacity=1,overlap=shared"),
    ],
)
def test_replayed_steps_have_the_bits_of_others(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    assert_same_bits(world_size, layout, "full", data, tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "pp2,layout='Et|ttmL'"),
        thorough(2, "ep2,mbs2,overlap=grad+param"),
        thorough(2, "etp2,mbs2"),
        thorough(4, "pp2,ep2,capacity=1,capacity_fill=padded,layout='Et|ttmL'"),
        thorough(2, "tp2,ep2,mbs2,recompute=core_attn,overlap=tp"),
        thorough(4, "cp4,ep2,overlap=ep+wgrad"),
        thorough(4, "pp2,vpp2,tp2,ep2,overlap=p2p,layout='Et|t|t|mL'"),
    ],
)
def test_replayed_parts_have_the_bits_of_others(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    assert_same_bits(world_size, layout, PARTS, data, tmp_path)


def assert_same_bits(
    world_size: int, layout: str, graphs: str, data: DataSpec, tmp_path: Path
) -> None:
    """Train with `graphs` and without, and compare losses, weights and moments."""
    workload = tiny_jobs.build_workload(data, steps=7, loss=EVERY_LOSS)
    states = []
    curves = []
    for name, text in (("plain", layout), ("captured", f"{layout},graphs={graphs}")):
        plan = tiny_jobs.build_plan(workload, text, world_size=world_size, model=SHARED)
        assert train(plan, tmp_path / name) is ExitCode.DONE
        states.append(tiny_jobs.read_state(tmp_path / name, 7))
        steps = tiny_jobs.read_steps(tmp_path / name)
        curves.append([(step["loss"], step["aux_loss"], step["grad_norm"]) for step in steps])
    assert curves[0] == curves[1]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
