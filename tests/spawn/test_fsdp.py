"""ZeRO-2 and -3, and optimizers of several instances, with gradients equal to one process.

Parts are uneven and empty too; ledgers and moves of checkpoints to other layouts are checked.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.codec import parse_layout, read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.spec.ledger import Component, Ledger, Selection
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, Dtype, LossSpec, Workload
from selection import thorough
from tiny_jobs import assert_first_gradients_equal, read_state, read_steps

pytestmark = pytest.mark.spawn


def train_layout(
    workload: Workload,
    layout: str,
    world_size: int,
    run_dir: Path,
    model: ModelSpec = tiny_jobs.MODEL,
) -> Plan:
    optimizer = replace(workload.optimizer, bucket_elements=4000, decay_steps=3)
    workload = replace(
        workload,
        optimizer=optimizer,
        checkpoint=replace(workload.checkpoint, every_steps=1, keep=9),
    )
    plan = tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)
    assert train(plan, run_dir) is ExitCode.DONE
    return plan


def assert_same_training(run_dir: Path, reference: Path) -> None:
    """Compare every gradient of the first step, and the curve."""
    assert_first_gradients_equal(run_dir, reference)
    for actual, expected in zip(read_steps(run_dir), read_steps(reference), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def assert_ledgers_exact(plan: Plan, run_dir: Path) -> None:
    selection = read_json(Selection, run_dir / "ledger" / "selection.json")
    for rank in range(plan.layout.world_size):
        counted = read_json(Ledger, run_dir / "ledger" / f"rank{rank:05d}.json")
        comparison = compare_ledgers(predict_ledger(plan, rank=rank, selection=selection), counted)
        assert comparison.is_exact, [
            line for line in comparison.lines if line.predicted != line.counted
        ]


@pytest.fixture(scope="module")
def one_process(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    train_layout(tiny_jobs.build_workload(data, steps=2, global_batch=12), "", 1, folder)
    return folder


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (3, "zero3"),  # parts of 3, 3 and 2 experts, and of uneven rows
        (6, "ep2,zero3"),
        (4, "ep4,zero3,dispatcher=allgather"),  # whole experts on each rank lie in flat buffers
        (4, "cp2,ep2,zero3,recompute=core_attn+layernorm+mlp+moe_act"),
        (3, "zero2"),
        thorough(4, "ep2,zero2,shard2,recompute=full"),
        thorough(4, "tp2,ep2,zero2,offload=optimizer"),
        (4, "ep2,zero1,shard2,overlap=grad+param"),
        thorough(8, "tp2,ep2,zero1,shard2"),
        (4, "pp2,zero3,layout='Et|ttL'"),
        thorough(8, "pp2,ep2,tp2,zero3,layout='Et|ttL',recompute=full"),
        thorough(8, "pp2,ep2,zero3,shard2,layout='Et|ttL'"),
        thorough(4, "pp2,vpp2,ep2,zero3,layout='Et|t||tL',overlap=p2p"),
        thorough(4, "pp2,vpp2,zero2,layout='Et|t|t|L'"),
        thorough(6, "pp2,zero2,layout='Et|ttL'"),
        thorough(4, "pp2,order=tp-cp-ep-pp-dp,layout='Et|ttL'"),
        thorough(8, "pp2,tp2,etp2,order=tp-cp-ep-pp-dp,layout='Et|ttL'"),
    ],
)
def test_sharded_states_equal_one_process_and_their_prediction(
    world_size: int, layout: str, data: DataSpec, one_process: Path, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, global_batch=12, eval_every_steps=1)
    plan = train_layout(workload, layout, world_size, tmp_path)
    assert_same_training(tmp_path, one_process)
    assert_ledgers_exact(plan, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        "zero3,mbs2",
        pytest.param("pp2,zero2,mbs2,layout='Et|ttL'", marks=pytest.mark.thorough),
    ],
)
def test_units_are_offloaded_until_they_make_up_the_fraction_and_change_no_bit(
    layout: str, data: DataSpec, tmp_path: Path
) -> None:
    world_size = 4 if "pp2" in layout else 2
    workload = tiny_jobs.build_workload(data, steps=2)
    train_layout(workload, layout, world_size, tmp_path / "device")
    plan = train_layout(workload, f"{layout},offload=optimizer0.4", world_size, tmp_path / "host")
    device, host = (read_state(tmp_path / run, 2) for run in ("device", "host"))
    assert all(torch.equal(device[name], host[name]) for name in device)
    assert_ledgers_exact(plan, tmp_path / "host")
    for rank in range(world_size):
        ledger = read_json(Ledger, tmp_path / "host" / "ledger" / f"rank{rank:05d}.json")
        hosted, on_device = (
            sum(row.bytes for row in ledger.memory if row.component in components)
            for components in (
                {Component.HOST},
                {Component.MASTER, Component.MOMENTS, Component.GRADIENTS},
            )
        )
        assert on_device
        assert hosted >= 0.39 * (hosted + on_device)


def test_ranks_without_an_expert_and_a_tied_table_equal_zero1_in_bf16(
    data: DataSpec, tmp_path: Path
) -> None:
    """Two experts lie on four ranks; bf16 gradients are summed in fp32, as in ZeRO-1."""
    moe = tiny_jobs.MODEL.moe
    assert moe is not None
    model = replace(tiny_jobs.MODEL, tie_embeddings=True, moe=replace(moe, experts=2))
    workload = tiny_jobs.build_workload(data, steps=1, precision=Dtype.BF16)
    plan = train_layout(workload, "mbs1,zero3", 4, tmp_path / "cut", model)
    assert_ledgers_exact(plan, tmp_path / "cut")
    train_layout(workload, "mbs1", 4, tmp_path / "flat", model)
    cut = read_state(tmp_path / "cut", 1)
    flat = read_state(tmp_path / "flat", 1)
    for name, value in flat.items():
        if name.startswith("optim/exp_avg/"):
            assert (cut[name] - value).norm() <= 1e-6 * value.norm(), name


@pytest.mark.thorough
@pytest.mark.turns
def test_a_checkpoint_goes_to_another_layout_and_back(data: DataSpec, tmp_path: Path) -> None:
    workload = tiny_jobs.build_workload(data, steps=3)
    train_layout(workload, "mbs2", 1, tmp_path / "one")
    for steps, world, layout in (
        (1, 4, "tp2,zero3,offload=optimizer"),
        (2, 2, "tp2"),
        (3, 4, "ep2,zero3,shard2"),
    ):
        train_layout(replace(workload, steps=steps), f"mbs2,{layout}", world, tmp_path / "moved")
    assert_same_training(tmp_path / "moved", tmp_path / "one")


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "tp2,ep2,mbs2,zero3"),
        (2, "mbs2,zero3,recompute=full"),
        thorough(4, "pp2,mbs2,zero3,layout='Ettt|mmL'"),  # both stages hold the table
        thorough(4, "pp2,vpp2,mbs2,zero3,layout='Et|t|t|mmL'"),
        thorough(4, "pp2,mbs2,zero2,layout='Ettt|mmL'"),
    ],
)
def test_two_depths_of_prediction_equal_one_process(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    """The layer of a depth is a unit.

    Its norms and projection are the root's, together with a tied table that is used three times.
    """
    model = replace(
        tiny_jobs.MODEL, mtp_layers=2, tie_embeddings=True, layers=3, moe_layers=(True, False, True)
    )
    workload = tiny_jobs.build_workload(data, steps=2, loss=LossSpec(aux_coeff=0.02, mtp_coeff=0.3))
    train_layout(workload, "mbs2", 1, tmp_path / "one", model)
    plan = train_layout(workload, layout, world_size, tmp_path / "cut", model)
    assert_same_training(tmp_path / "cut", tmp_path / "one")
    assert_ledgers_exact(plan, tmp_path / "cut")


@pytest.mark.parametrize("zero", [2, 3])
def test_sharded_gradients_with_a_backward_in_two_rows_are_refused(zero: int) -> None:
    layout = parse_layout(f"zero{zero},pp2,schedule=zb-h1", world_size=4)
    workload = tiny_jobs.build_workload(DataSpec())
    (reason,) = unsupported_layout(Job(model=tiny_jobs.MODEL, workload=workload, layout=layout))
    assert str(reason).startswith(
        "layout.schedule=zb-h1: the engine reduces gradients as a backward"
    )
    assert reason.nearest == "1f1b"
