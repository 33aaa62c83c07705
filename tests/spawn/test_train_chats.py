"""Training on packed chats: any layout computes what one process does, and ledgers are exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_layouts_equal import assert_same_training
from test_ledger_equal import assert_ledgers_equal

import tiny_jobs
from chat_folders import CHATML, write_chat_folder, write_chats
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.chat_encoder import ChatOptions
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.model import RouterSpec, ScoreFunction
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, DocumentMasking, Dtype, LossSpec
from selection import thorough

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


def build_plan(data: DataSpec, layout: str, world_size: int, **changes: object) -> Plan:
    workload = tiny_jobs.build_workload(
        data, steps=3, seq_len=112, global_batch=4, loss=LOSSES, **changes
    )
    workload = replace(
        workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=workload.steps)
    )
    moe = tiny_jobs.MODEL.moe
    assert moe is not None
    model = replace(tiny_jobs.MODEL, moe=replace(moe, router=SIGMOID))
    return tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "tp2,ep2,recompute=full"),
        thorough(4, "cp2,ep2"),
        thorough(2, "pp2,layout='Et|ttL'"),
        thorough(4, "etp2,ep2,recompute=moe"),
    ],
)
def test_packed_chats_train_as_one_process_does(
    world_size: int, layout: str, chats: DataSpec, tmp_path: Path
) -> None:
    for name, plan in (
        ("one", build_plan(chats, "", 1)),
        ("cut", build_plan(chats, layout, world_size)),
    ):
        assert train(plan, tmp_path / name) is ExitCode.DONE
    assert_same_training(tmp_path / "cut", tmp_path / "one")


def test_ledgers_of_packed_chats_are_equal(chats: DataSpec, tmp_path: Path) -> None:
    plan = build_plan(chats, "mbs2,ep2", 2, precision=Dtype.BF16)
    assert_ledgers_equal(plan, tmp_path)
