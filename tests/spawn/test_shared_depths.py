"""MTP depths with the same weights: as depths whose weights are equal, and in any layout alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_layouts_equal import assert_same_training
from test_ledger_equal import assert_ledgers_equal

import tiny_jobs
from moewright.engine.data.corpus_rows import open_corpora
from moewright.engine.data.sampler import SampleOrder
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.router import list_routers, load_rows
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.corpus_loader import CorpusLoader
from moewright.engine.run.step import train_step
from moewright.engine.run.train import train
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode
from moewright.engine.runtime import Runtime
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.spec.model import ModelSpec, RouterSpec, ScoreFunction
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, Dtype
from selection import thorough

pytestmark = pytest.mark.spawn
MOE = tiny_jobs.MODEL.moe
assert MOE is not None
SHARED = replace(
    tiny_jobs.MODEL,
    mtp_layers=2,
    mtp_shared=True,
    moe=replace(
        MOE,
        shared_ffn_size=16,
        router=RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, selection_bias=True),
    ),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def build_plan(
    data: DataSpec, layout: str, world_size: int, model: ModelSpec = SHARED, **changes: object
) -> Plan:
    workload = tiny_jobs.build_workload(data, steps=2, **changes)
    workload = replace(
        workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=workload.steps)
    )
    return tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)


def build_state(data: DataSpec, model: ModelSpec) -> TrainState:
    """Build the state of one process, in which both depths begin with equal weights."""
    plan = build_plan(data, "", 1, model)

    def draw(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
        return draw_initial_value(
            replace(parameter, name=parameter.name.replace("mtp.1.", "mtp.0.")), runtime
        )

    corpora = open_corpora(data.train, plan.workload, SampleOrder.SHUFFLED)
    return build_train_state(
        plan_job(plan),
        CorpusLoader(data=corpora, follows_rampup=True),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw,
    )


def take_step(data: DataSpec, model: ModelSpec) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds after a step."""
    state = build_state(data, model)
    train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
    return {shard.name: shard.tensor.clone() for shard in state.local_shards()}


def test_gradients_of_shared_depths_are_the_sums_over_the_depths(data: DataSpec) -> None:
    shared = take_step(data, SHARED)
    whole = take_step(data, replace(SHARED, mtp_shared=False))
    prefix = "optim/exp_avg/"
    compared = 0
    for name, moment in shared.items():
        if not name.startswith(prefix):
            continue
        expected = whole[name]
        if name.startswith(f"{prefix}mtp.0."):
            expected = expected + whole[name.replace("mtp.0.", "mtp.1.")]
            compared += 1
        torch.testing.assert_close(moment, expected, rtol=1e-4, atol=1e-8)
    assert compared > 10
    assert not any("mtp.1." in name for name in shared)
    biases = [name for name in shared if name.endswith("selection_bias")]
    assert len(biases) == len(SHARED.routed_layers) - 1


def test_depths_share_a_router_and_their_bias_moves_by_the_loads_of_both(data: DataSpec) -> None:
    """With the bias of two depths that have equal weights, the loads are those that each had."""
    shared, whole = take_step(data, SHARED), take_step(data, replace(SHARED, mtp_shared=False))
    state = build_state(data, SHARED)
    router = list_routers(state.model)[-1]
    assert load_rows(SHARED, router) == [2, 3]
    assert load_rows(SHARED, list_routers(state.model)[0]) == [0]
    assert router.layer_number == SHARED.layers + 1
    result = train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
    load = result.expert_loads[2:].sum(0).float()
    assert result.expert_loads[2:].sum(1).tolist() == [8 * 32 * 2] * 2
    rate = state.runtime.workload.router.bias_update_rate
    name = f"layers.{SHARED.layers + 1}.moe.router.selection_bias"
    torch.testing.assert_close(shared[name], rate * (load.mean() - load).sign())
    assert not torch.equal(shared[name], whole[name])  # which moved by the first depth alone


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "tp2,ep2,recompute=full"),
        thorough(2, "pp2,layout='Ett|tmmL'"),
        thorough(2, "pp2,schedule=zb-h1,layout='Ett|tmmL'"),
        thorough(4, "cp2,ep2,overlap=grad+param"),
        thorough(4, "ep2,etp2,overlap=ep"),
    ],
)
def test_shared_depths_train_as_in_one_process(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    for name, plan in (
        ("one", build_plan(data, "", 1)),
        ("cut", build_plan(data, layout, world_size)),
    ):
        assert train(plan, tmp_path / name) is ExitCode.DONE
    assert_same_training(tmp_path / "cut", tmp_path / "one")


def test_ledgers_of_shared_depths_are_equal(data: DataSpec, tmp_path: Path) -> None:
    plan = build_plan(data, "ep2,zero0", 2, precision=Dtype.BF16)
    assert_ledgers_equal(plan, tmp_path)


def test_what_passes_once_through_a_layer_is_refused(data: DataSpec) -> None:
    for layout, field in (("zero3", "layout.zero"), ("ep2,spare2", "layout.spare")):
        plan = build_plan(data, layout, 2)
        reasons = unsupported_layout(plan_job(plan))
        assert field in [reason.field for reason in reasons]
