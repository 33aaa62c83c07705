"""The workload of a question: what a job or a model brings, and what options change."""

from __future__ import annotations

from pathlib import Path

import pytest

import moewright as mw
from moewright.api.planning import estimate_request
from moewright.api.requests import WorkloadOptions, change_training, read_lora_rank
from moewright.codec import write_json
from moewright.spec.ledger import Component
from moewright.spec.plan import Plan
from moewright.spec.workload import Task, Workload


def estimate(options: WorkloadOptions, model: str | Path = "Mixtral-8x7B") -> Plan:
    return estimate_request(model, "tp2,ep4", on="8xH100", options=options)[0]


def test_lora_has_no_gradients_of_frozen_weights(tmp_path: Path) -> None:
    """Weights stay; gradients and moments are of adapters alone."""
    sizes = {}
    for task in Task:
        plan = estimate(WorkloadOptions(task=task))
        sizes[task] = {
            component: sum(
                row.bytes for row in plan.estimate.ledgers[0].memory if row.component is component
            )
            for component in (Component.WEIGHTS, Component.GRADIENTS, Component.MOMENTS)
        }
    assert sizes[Task.PRETRAIN] == sizes[Task.SFT]
    assert sizes[Task.LORA][Component.WEIGHTS] == pytest.approx(
        sizes[Task.SFT][Component.WEIGHTS], rel=0.01
    )
    for component in (Component.GRADIENTS, Component.MOMENTS):
        assert 0 < sizes[Task.LORA][component] < 0.01 * sizes[Task.SFT][component]
    path = tmp_path / "plan.json"
    write_json(path, estimate(WorkloadOptions()))
    again = estimate(WorkloadOptions(lora_rank=8), path)
    assert again.workload.fine_tuning.task is Task.LORA
    assert again.workload.fine_tuning.lora_rank == 8


def test_a_rank_is_of_lora() -> None:
    assert (read_lora_rank("r=16"), read_lora_rank("8"), read_lora_rank("")) == (16, 8, None)
    options = WorkloadOptions(task=Task.SFT, lora_rank=8)
    with pytest.raises(mw.BadInput, match=r"--lora: .* --task is sft; .* --task lora"):
        change_training(Workload(seq_len=16, global_batch=1), options)
