"""Libraries as dispatchers, with modules in their place that exchange over gloo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import stand_in_deep_ep
import stand_in_nccl_ep
from layout_proof import WORKLOAD, draw_batches, draw_test_weight, prove_layout
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.engine.comm import collectives
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.job import Job
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from tiny_jobs import build_plan

pytestmark = pytest.mark.spawn


def make_plan(shape: str, world: int, text: str) -> Plan:
    return replace(
        build_plan(WORKLOAD, "", world_size=world, model=SHAPES[shape]),
        layout=parse_layout(text, world_size=world),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(make_plan("deep", 4, "tp2,ep4,mbs2,dispatcher=deepep"), id="deepep"),
        pytest.param(
            make_plan("qwen", 2, "ep2,mbs2,dispatcher=deepep,recompute=moe,capacity=4"),
            id="deepep, replayed",
        ),
        pytest.param(
            make_plan("deepseek", 4, "ep4,ep_node2,mbs2,dispatcher=hybridep"),
            id="hybridep over nodes",
        ),
        pytest.param(
            make_plan("olmoe", 4, "pp2,ep2,mbs1,dispatcher=hybridep,capacity=4"),
            id="hybridep, capacity",
        ),
        pytest.param(
            make_plan("deepseek", 4, "tp2,ep4,mbs2,dispatcher=ncclep,recompute=moe"),
            id="ncclep, replayed",
        ),
        pytest.param(
            make_plan("olmoe", 4, "pp2,ep2,mbs1,dispatcher=ncclep,capacity=4"),
            id="ncclep, capacity",
        ),
    ],
)
def test_a_dispatch_library_equals_one_process(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_deep_ep.install(monkeypatch)
    stand_in_nccl_ep.install(monkeypatch)
    prove_layout(plan, tmp_path)


def _build_and_leave(plan: Plan, context: RankContext) -> RankOutcome:
    device = init_distributed(context)
    build_train_state(
        Job(model=plan.model, workload=plan.workload, layout=plan.layout),
        draw_batches(plan.model),
        rank=context.rank,
        device=device,
        initial_value=draw_test_weight,
    )
    collectives.leave_world()
    return RankOutcome.DONE


@pytest.mark.parametrize(
    ("text", "stand_in"),
    [
        ("ep2,dispatcher=deepep", stand_in_deep_ep),
        ("ep2,dispatcher=hybridep", stand_in_deep_ep),
        ("ep2,dispatcher=ncclep", stand_in_nccl_ep),
    ],
)
def test_a_dispatch_library_that_sums_wrong_is_refused_at_the_start(
    text: str, stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("qwen", 2, text)
    stand_in.install(monkeypatch)
    assert (
        launch(partial(_build_and_leave, plan), nproc=2, run_dir=tmp_path / "right")
        is ExitCode.DONE
    )
    stand_in.install(monkeypatch, wrong=0.01)
    with pytest.raises(
        BadInput, match="differs from the plain all-to-all in a trial at the start"
    ) as refused:
        launch(partial(_build_and_leave, plan), nproc=2, run_dir=tmp_path / "wrong")
    assert refused.value.reasons[0].nearest == "dedup"
