"""Training on packed chats: any layout computes what one process does, and ledgers are exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_layouts_equal import assert_same_training
from test_ledger_equal import assert_ledgers_equal

import tiny_jobs
from chat_folders import CHATML, write_chat_folder, write_chats
from layout_space import SHAPES
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.chat_encoder import ChatOptions
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.model import RouterSpec, ScoreFunction
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, DocumentMasking, Dtype, LossSpec
from selection import thorough
from tiny_jobs import read_steps

pytestmark = pytest.mark.spawn
SIGMOID = RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, scaling_factor=2.5, selection_bias=True)
# Without the loss over the global batch: it depends on the order of micro-batches.
LOSSES = LossSpec(aux_coeff=0.02, seq_aux_coeff=0.03, z_coeff=0.001)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    folder = tmp_path_factory.mktemp("chats")
    source = write_chats(folder / "chats.jsonl", 80, turns=1)
    options = ChatOptions(tokenizer=write_chat_folder(folder / "hf", CHATML), heldout_fraction=0.2)
    data = build_chats(source, folder / "data", options).data
    return replace(data, documents=DocumentMasking.RESTARTED)


@pytest.fixture(scope="module")
def uneven_chats(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """Chats of one turn, of which two fill a sequence, and of two, which have one each."""
    folder = tmp_path_factory.mktemp("uneven")
    source = folder / "chats.jsonl"
    parts = [write_chats(folder / f"{turns}.jsonl", 40, turns=turns) for turns in (1, 2)]
    source.write_text("".join(part.read_text() for part in parts))
    options = ChatOptions(tokenizer=write_chat_folder(folder / "hf", CHATML), heldout_fraction=0.2)
    data = build_chats(source, folder / "data", options).data
    return replace(data, documents=DocumentMasking.RESTARTED)


def build_plan(
    data: DataSpec, layout: str, world_size: int, *, shape: str = "", **changes: object
) -> Plan:
    workload = tiny_jobs.build_workload(
        data, steps=3, seq_len=112, global_batch=4, loss=LOSSES, **changes
    )
    workload = replace(
        workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=workload.steps)
    )
    moe = tiny_jobs.MODEL.moe
    assert moe is not None
    model = replace(tiny_jobs.MODEL, moe=replace(moe, router=SIGMOID))
    if shape:
        model = replace(SHAPES[shape], vocab_size=tiny_jobs.VOCABULARY)
        # That of the sweep: at 1e-2 rounding shows in the third step, under ep2 too.
        workload = replace(workload, optimizer=replace(workload.optimizer, lr=2e-3))
    return tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)


@pytest.mark.parametrize(
    ("world_size", "layout", "shape"),
    [
        (4, "tp2,ep2,recompute=full", ""),
        thorough(4, "cp2,ep2", ""),
        thorough(2, "pp2,layout='Et|ttL'", ""),
        thorough(4, "etp2,ep2,recompute=moe", ""),
        thorough(4, "tp2,cp2,cp_comm=a2a,ep2", "compressed"),
    ],
)
def test_packed_chats_train_as_one_process_does(
    world_size: int, layout: str, shape: str, chats: DataSpec, tmp_path: Path
) -> None:
    for name, plan in (
        ("one", build_plan(chats, "", 1, shape=shape)),
        ("cut", build_plan(chats, layout, world_size, shape=shape)),
    ):
        assert train(plan, tmp_path / name) is ExitCode.DONE
    assert_same_training(tmp_path / "cut", tmp_path / "one")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "ep2"),
        thorough(2, "mbs2"),
        thorough(2, "pp2,layout='Et|ttL'"),
        thorough(4, "tp2,ep2,recompute=full"),
        thorough(4, "cp2,ep2,zero3"),
    ],
)
def test_steps_of_as_many_micro_batches_as_their_chats_fill_train_as_one_process_does(
    world_size: int, layout: str, uneven_chats: DataSpec, tmp_path: Path
) -> None:
    """Steps of 8 chats fill 5, 6 and 7 sequences; empty ones fill up the last micro-batches."""
    # Means over the tokens of a micro-batch depend on which sequences share it.
    loss = LossSpec(seq_aux_coeff=0.03) if "mbs2" in layout else LOSSES
    for name, cut, ranks in (("one", "", 1), ("cut", layout, world_size)):
        plan = build_plan(uneven_chats, cut, ranks, batch_samples=8)
        plan = replace(plan, workload=replace(plan.workload, loss=loss))
        assert train(plan, tmp_path / name) is ExitCode.DONE
    assert_same_training(tmp_path / "cut", tmp_path / "one")
    steps = read_steps(tmp_path / "one")
    assert [step["tokens"] for step in steps] == [112 * count for count in (5, 6, 7)]
    # Tokens that are not learnt from, which no load counts, are not dropped.
    assert {load["dropped_share"] for step in steps for load in step["loads"]} == {0.0}


def test_ledgers_of_steps_of_any_number_of_micro_batches_are_equal(
    uneven_chats: DataSpec, tmp_path: Path
) -> None:
    plan = build_plan(uneven_chats, "ep2", 2, precision=Dtype.BF16, batch_samples=8)
    assert_ledgers_equal(plan, tmp_path)
    counts = json.loads((tmp_path / "ledger" / "selection.json").read_text())["counts"]
    assert len(counts) * 2 != plan.workload.global_batch


def test_ledgers_of_packed_chats_are_equal(chats: DataSpec, tmp_path: Path) -> None:
    plan = build_plan(chats, "mbs2,ep2", 2, precision=Dtype.BF16)
    assert_ledgers_equal(plan, tmp_path)
