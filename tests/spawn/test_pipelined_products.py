"""Products beside the exchange of their rows: the same sums, and the messages that were predicted.

Over more than two ranks the ring sums in another order than a reduce-scatter; the sweep of layouts
proves those (layout_space).
"""

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
from moewright.spec.hardware import Collective
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.workload import DataSpec, Dtype
from selection import thorough

pytestmark = pytest.mark.spawn

assert tiny_jobs.MODEL.moe is not None
SHARED = replace(
    tiny_jobs.MODEL, mtp_layers=1, moe=replace(tiny_jobs.MODEL.moe, shared_ffn_size=24)
)


@pytest.mark.parametrize(
    ("layout", "overlap", "precision"),
    [
        ("tp2,ep2", "tp", Dtype.FP32),
        thorough("tp2,ep2,recompute=full", "ep+tp+wgrad", Dtype.BF16),
        thorough("tp2,etp2,recompute=mlp+shared_experts", "tp", Dtype.FP32),
        thorough("tp2,etp2,zero3", "tp", Dtype.FP32),
    ],
)
def test_two_ranks_compute_the_same_bits(
    layout: str, overlap: str, precision: Dtype, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=precision)
    states = []
    for name, text in (("whole", layout), ("pipelined", f"{layout},overlap={overlap}")):
        plan = tiny_jobs.build_plan(workload, text, world_size=2, model=SHARED)
        assert train(plan, tmp_path / name) is ExitCode.DONE
        states.append(tiny_jobs.read_state(tmp_path / name, 2))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    folder = tmp_path / "pipelined" / "ledger"
    selection = read_json(Selection, folder / "selection.json")
    for rank in range(2):
        counted = read_json(Ledger, folder / f"rank{rank:05d}.json")
        assert_equal_lines(predict_ledger(plan, rank=rank, selection=selection), counted)
        assert any(row.op is Collective.P2P and row.group == "tp" for row in counted.comm)
