"""Searches bound to a trainer: what it refuses is never an answer, and what it starts is found."""

from __future__ import annotations

from functools import cache

import pytest

import moewright as mw
from moewright.api.planning import Plans
from moewright.api.running import describe_trainers, list_trainers
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.rules.limits.trainers import TargetTrainer, trainer_refusals
from moewright.search.space import activation_policies, build_search_space, layout_objections
from moewright.spec.errors import BadInput
from moewright.spec.layout import CudaGraphScope
from moewright.spec.plan import Plan

MODEL = "Qwen3-30B-A3B"
STARTED_AS = {"engine": "moewright", "megatron": "megatron", "torchtitan": "torchtitan"}


@cache
def plans(trainer: str) -> Plans:
    return mw.plan(MODEL, on="16xH100", top=4, runs_on=trainer)


def refusals(plan: Plan, trainer: str) -> tuple[object, ...]:
    return trainer_refusals(TargetTrainer(trainer), plan_job(plan), plan.hardware)


@pytest.mark.thorough
@pytest.mark.parametrize("trainer", TargetTrainer)
def test_every_answer_starts_in_the_trainer_and_none_is_faster_than_any(trainer: str) -> None:
    """Both of one search, which takes seconds, and is made again in every process of the tests."""
    free, bound = plans(""), plans(trainer)
    for plan in (*bound.plans, *bound.gambles):
        assert not refusals(plan, trainer)
        assert STARTED_AS[trainer] in list_trainers(plan)
    assert bound.best is not None
    assert free.best is not None
    longest = free.best.estimate.step_interval_80[1]
    assert longest <= bound.best.estimate.step_interval_80[1] * (1 + 1e-9)
    if not refusals(free.best, trainer):
        assert bound.best.layout == free.best.layout


@pytest.mark.thorough
def test_torchtitan_pipelines_shard_weights_too() -> None:
    """It has ZeRO-3 or nothing, so its pipelines are searched with it."""
    pinned = mw.plan(MODEL, on="16xH100", top=1, runs_on="torchtitan", layout="pp2")
    assert pinned.best is not None
    assert pinned.best.layout.pp == 2
    assert pinned.best.layout.zero == 3


@pytest.mark.thorough
def test_the_engine_captures_parts_of_layers_where_it_can() -> None:
    """Where it cannot beside sharded weights, layouts without graphs are searched too."""
    parts = (CudaGraphScope.ATTN, CudaGraphScope.MOE_ROUTER)
    best = next(plan for plan in plans("engine").plans if plan.layout.graphs)
    assert best.layout.graphs == parts
    allowed = layout_objections(best.model, best.workload, unsupported_layout)
    expected = {"": [parts, ()], "zero1": [parts], "zero3": [()], "pp2,schedule=zb-h1": [()]}
    for fixed, graphs in expected.items():
        space = build_search_space(best.model, best.workload, best.hardware, fixed, allowed=allowed)
        found = [
            policy.graphs
            for policy in activation_policies(space)
            if not policy.recompute and not policy.offload
        ]
        assert found == graphs, fixed


def test_a_job_that_a_trainer_has_no_model_for_is_refused_at_once() -> None:
    with pytest.raises(BadInput, match="torchtitan has no flavour of this model"):
        mw.plan("Mixtral-8x7B-v0.1", on="8xH100", runs_on="torchtitan")
    with pytest.raises(BadInput, match="must be one of engine, megatron, torchtitan"):
        mw.plan(MODEL, on="8xH100", runs_on="nemo")


@pytest.mark.parametrize("part", ["TPU-v5p", "Ascend-910B"])
@pytest.mark.parametrize("trainer", TargetTrainer)
def test_no_trainer_starts_on_a_part_that_torch_does_not_drive(part: str, trainer: str) -> None:
    with pytest.raises(BadInput, match=r"hardware\.device\.kind"):
        mw.plan(MODEL, on=f"16x{part}", runs_on=trainer)
    own = mw.estimate(MODEL, "ep8,recompute=full", on=f"16x{part}")
    assert list_trainers(own) == ()
    with pytest.raises(BadInput, match="not on"):
        mw.export(own, to="slurm", job="recipes/quickstart_2cpu_bf16.toml")


def test_what_stops_a_plan_that_no_trainer_starts_is_told() -> None:
    on_tpu = mw.estimate(MODEL, "ep8,recompute=full", on="16xTPU-v5p")
    graphs = mw.estimate(
        "Kimi-K2", "ep8,mbs1,dispatcher=dedup,graphs=moe_router+moe_preprocess", on="256xH100"
    )
    lines = list(describe_trainers((on_tpu, graphs)))
    assert lines == [
        "Plans 1, 2: no trainer known here can start it. Megatron-LM trains on CUDA and ROCm "
        "devices (hardware.device.kind=tpu)."
    ]
    (line,) = describe_trainers((graphs,))
    assert "layout.dispatcher=dedup" in line
    assert line.endswith("--runs-on engine plans what moewright itself trains.")
    sinks = mw.estimate("gpt-oss-120b", "cp2,pp2,ep8,mbs1,dispatcher=deepep", on="16xB200")
    (line,) = describe_trainers((sinks,))
    assert "layout.cp_comm=p2p" in line
    assert "--runs-on megatron plans what it starts." in line
