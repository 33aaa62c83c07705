"""Rows padded to the budget of a rank, and a step that is run again where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from layout_proof import assert_equal_lines
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, Dtype, Workload
from selection import thorough

pytestmark = pytest.mark.spawn

assert tiny_jobs.MODEL.moe is not None
SHARED = replace(
    tiny_jobs.MODEL, mtp_layers=1, moe=replace(tiny_jobs.MODEL.moe, shared_ffn_size=24)
)


def train_both(
    layout: str, budget: str, workload: Workload, folder: Path
) -> tuple[Plan, tuple[Path, Path]]:
    """Train without a budget and with it; return the plan with it, and both folders."""
    world_size = 4 if "etp2,ep2" in layout or "pp2,ep2" in layout else 2
    folders = folder / "whole", folder / "budget"
    texts = layout, f"{layout},rank_capacity={budget}"
    for run_dir, text in zip(folders, texts, strict=True):
        plan = tiny_jobs.build_plan(workload, text, world_size=world_size, model=SHARED)
        assert train(plan, run_dir) is ExitCode.DONE
    return plan, folders


@pytest.mark.parametrize(
    "layout",
    [
        "ep2,mbs2,overlap=grad",
        thorough("ep2,mbs2,recompute=full"),
        thorough("etp2,ep2,mbs2"),
        thorough("ep2,mbs2,overlap=ep+wgrad"),
        thorough("ep2,mbs2,overlap=shared,recompute=moe_act,offload=expert_fc1"),
        thorough("ep2,mbs2,zero2"),
        thorough("mbs2,zero0"),
        thorough("pp2,ep2,layout='Et|ttmL'"),
    ],
)
def test_padded_rows_train_as_the_others_do_and_fix_the_ledger(
    layout: str, data: DataSpec, tmp_path: Path
) -> None:
    """A product of more rows may round otherwise, so bits are not compared."""
    workload = tiny_jobs.build_workload(data, steps=1)
    plan, (whole, padded) = train_both(layout, "2", workload, tmp_path)
    tiny_jobs.assert_first_gradients_equal(padded, whole)
    assert not any(step["is_repeated"] for step in tiny_jobs.read_steps(padded))
    folder = padded / "ledger"
    selection = read_json(Selection, folder / "selection.json")
    for rank in range(plan.layout.world_size):
        counted = read_json(Ledger, folder / f"rank{rank:05d}.json")
        assert_equal_lines(predict_ledger(plan, rank=rank, selection=selection), counted)
        # The planner knows the rows before anything was chosen.
        assert_equal_lines(predict_ledger(plan, rank=rank, selection=None), counted)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("ep2,mbs2,overlap=grad+param", Dtype.FP32),
        thorough("ep2,mbs2,zero3", Dtype.BF16),
        thorough("etp2,ep2,mbs2,recompute=moe", Dtype.FP32),
    ],
)
def test_a_step_over_its_budget_is_run_again_with_the_same_bits(
    layout: str, dtype: Dtype, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=3, precision=dtype)
    plan, (whole, repeated) = train_both(layout, "1", workload, tmp_path)
    assert all(step["is_repeated"] for step in tiny_jobs.read_steps(repeated))
    selection = read_json(Selection, repeated / "ledger" / "selection.json")
    assert selection.is_repeated
    for rank in range(plan.layout.world_size):  # the second run alone is counted
        counted = read_json(Ledger, repeated / "ledger" / f"rank{rank:05d}.json")
        assert_equal_lines(predict_ledger(plan, rank=rank, selection=selection), counted)
        assert "run again" in counted.notes[0]
    expected, actual = (tiny_jobs.read_state(folder, 3) for folder in (whole, repeated))
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name
