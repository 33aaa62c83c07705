"""ZeRO-3: the gradients of one process and of ZeRO-1, uneven and empty parts, books, and
checkpoints of any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_jobs
from moewright.codec import parse_layout, read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.engine_limits import unsupported_layout
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, Dtype, LossSpec, Workload
from tiny_jobs import assert_first_gradients_equal, read_state, read_steps

pytestmark = pytest.mark.spawn


def train_layout(
    work: Workload, layout: str, world_size: int, run_dir: Path, model: ModelSpec = tiny_jobs.MODEL
) -> Plan:
    optimizer = replace(work.optimizer, bucket_elements=4000, decay_steps=3)
    work = replace(
        work, optimizer=optimizer, checkpoint=replace(work.checkpoint, every_steps=1, keep=9)
    )
    made = tiny_jobs.build_plan(work, layout, world_size=world_size, model=model)
    assert train(made, run_dir) is ExitCode.DONE
    return made


def agree(here: Path, reference: Path) -> None:
    """Every gradient of the first step, and the curve."""
    assert_first_gradients_equal(here, reference)
    for ours, theirs in zip(read_steps(here), read_steps(reference), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def refuse_difference(made: Plan, run_dir: Path) -> None:
    selection = read_json(Selection, run_dir / "ledger" / "selection.json")
    for rank in range(made.layout.world_size):
        counted = read_json(Ledger, run_dir / "ledger" / f"rank{rank:05d}.json")
        comparison = compare_ledgers(predict_ledger(made, rank=rank, selection=selection), counted)
        assert comparison.is_exact, [
            line for line in comparison.lines if line.predicted != line.counted
        ]


@pytest.fixture(scope="module")
def one_process(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    train_layout(tiny_jobs.build_workload(data, steps=2, global_batch=12), "", 1, folder)
    return folder


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (3, "zero3"),  # parts of 3, 3 and 2 experts, and of uneven rows
        (6, "ep2,zero3"),
        (4, "ep4,zero3,dispatcher=allgather"),  # experts whole on each rank: flat buffers beside
        (4, "cp2,ep2,zero3,recompute=core_attn+layernorm+mlp+moe_act"),
    ],
)
def test_equals_one_process_and_its_prediction(
    world_size: int, layout: str, data: DataSpec, one_process: Path, tmp_path: Path
) -> None:
    work = tiny_jobs.build_workload(data, steps=2, global_batch=12, eval_every_steps=1)
    made = train_layout(work, layout, world_size, tmp_path)
    agree(tmp_path, one_process)
    refuse_difference(made, tmp_path)


def test_ranks_without_a_row_of_an_expert_and_a_tied_table_in_bf16(
    data: DataSpec, tmp_path: Path
) -> None:
    """Two experts and four ranks; fp32 sums of bf16 gradients, as ZeRO-1 makes them."""
    moe = tiny_jobs.MODEL.moe
    assert moe is not None
    model = replace(tiny_jobs.MODEL, tie_embeddings=True, moe=replace(moe, experts=2))
    work = tiny_jobs.build_workload(data, steps=1, precision=Dtype.BF16)
    made = train_layout(work, "mbs1,zero3", 4, tmp_path / "cut", model)
    refuse_difference(made, tmp_path / "cut")
    train_layout(work, "mbs1", 4, tmp_path / "flat", model)
    cut, flat = read_state(tmp_path / "cut", 1), read_state(tmp_path / "flat", 1)
    for name, value in flat.items():
        if name.startswith("optim/exp_avg/"):
            assert (cut[name] - value).norm() <= 1e-6 * value.norm(), name


def test_a_checkpoint_goes_to_another_layout_and_back(data: DataSpec, tmp_path: Path) -> None:
    work = tiny_jobs.build_workload(data, steps=3)
    train_layout(work, "mbs2", 1, tmp_path / "one")
    for steps, world, layout in (
        (1, 4, "tp2,zero3,offload=optimizer"),
        (2, 2, "tp2"),
        (3, 4, "ep2,zero3,shard2"),
    ):
        train_layout(replace(work, steps=steps), f"mbs2,{layout}", world, tmp_path / "moved")
    agree(tmp_path / "moved", tmp_path / "one")


@pytest.mark.parametrize(
    ("world_size", "layout"), [(4, "tp2,ep2,mbs2,zero3"), (2, "mbs2,zero3,recompute=full")]
)
def test_two_depths_of_prediction_ahead(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    """The layer of a depth is a unit; its norms and projection are the root's, beside a tied table
    used thrice."""
    model = replace(
        tiny_jobs.MODEL, mtp_layers=2, tie_embeddings=True, layers=3, moe_layers=(True, False, True)
    )
    work = tiny_jobs.build_workload(data, steps=2, loss=LossSpec(aux_coeff=0.02, mtp_coeff=0.3))
    train_layout(work, "mbs2", 1, tmp_path / "one", model)
    made = train_layout(work, layout, world_size, tmp_path / "cut", model)
    agree(tmp_path / "cut", tmp_path / "one")
    refuse_difference(made, tmp_path / "cut")


def test_a_pipeline_is_refused_with_it() -> None:
    layout = parse_layout("zero3,pp2", world_size=4)
    (reason,) = unsupported_layout(
        layout, model=tiny_jobs.MODEL, workload=tiny_jobs.build_workload(DataSpec())
    )
    assert "layout.pp=2: the engine cuts weights without a pipeline alone" in str(reason)
