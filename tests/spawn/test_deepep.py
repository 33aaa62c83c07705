"""DeepEP and HybridEP behind the seam, with a module that exchanges over gloo in their place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import stand_in_deep_ep
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


def made(shape: str, world: int, text: str) -> Plan:
    return replace(
        build_plan(WORKLOAD, "", world_size=world, model=SHAPES[shape]),
        layout=parse_layout(text, world_size=world),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(made("deep", 4, "tp2,ep4,mbs2,dispatcher=deepep"), id="deepep"),
        pytest.param(
            made("qwen", 2, "ep2,mbs2,dispatcher=deepep,recompute=moe,capacity=4"),
            id="deepep, replayed",
        ),
        pytest.param(
            made("deepseek", 4, "ep4,ep_node2,mbs2,dispatcher=hybridep"), id="hybridep over nodes"
        ),
        pytest.param(
            made("olmoe", 4, "pp2,ep2,mbs1,dispatcher=hybridep,capacity=4"), id="hybridep, capacity"
        ),
    ],
)
def test_a_library_equals_one_process(
    job: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_deep_ep.install(monkeypatch)
    prove_layout(job, tmp_path)


def _begin(job: Plan, seat: RankContext) -> RankOutcome:
    device = init_distributed(seat)
    build_train_state(
        Job(model=job.model, workload=job.workload, layout=job.layout),
        draw_batches(job.model),
        rank=seat.rank,
        device=device,
        initial_value=draw_test_weight,
    )
    collectives.leave_world()
    return RankOutcome.DONE


@pytest.mark.parametrize("text", ["ep2,dispatcher=deepep", "ep2,dispatcher=hybridep"])
def test_a_library_that_sums_wrong_does_not_get_past_the_start(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = made("qwen", 2, text)
    stand_in_deep_ep.install(monkeypatch)
    assert launch(partial(_begin, job), nproc=2, run_dir=tmp_path / "right") is ExitCode.DONE
    stand_in_deep_ep.install(monkeypatch, wrong=0.01)
    with pytest.raises(
        BadInput, match="differs from the plain all-to-all in a trial at the start"
    ) as said:
        launch(partial(_begin, job), nproc=2, run_dir=tmp_path / "wrong")
    assert said.value.reasons[0].nearest == "dedup"
