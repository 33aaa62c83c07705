"""What a recorded step is made of: the same operations and shapes whatever the router chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny_jobs
from layout_proof import draw_batches, draw_test_weight
from moewright.codec import parse_layout
from moewright.engine.pipeline import run_batch
from moewright.engine.run import step as step_module
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import TrainState, build_phase_clock, forward_backward, train_step
from moewright.engine.run.step_graph import WARMUP_STEPS, OperationList
from moewright.rules.job import Job
from moewright.spec.workload import DataSpec


def build_state(layout: str) -> TrainState:
    workload = tiny_jobs.build_workload(DataSpec(), global_batch=4)
    model = replace(tiny_jobs.MODEL, mtp_layers=1)
    return build_train_state(
        Job(model=model, workload=workload, layout=parse_layout(layout, world_size=1)),
        draw_batches(model),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
    )


def record_batches(state: TrainState, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Run steps, and list the operations of each one's micro-batches with their shapes."""
    lists: list[object] = []

    def train_batch(*args: Any, **kwargs: Any) -> None:
        recorded = OperationList()
        recorded.record(lambda: run_batch.train_batch(*args, **kwargs))
        lists.append([operation.shapes for operation in recorded.operations])

    monkeypatch.setattr(step_module, "train_batch", train_batch)
    for step in range(1, steps + 1):
        forward_backward(state, build_phase_clock(torch.device("cpu")), step=step)
    return lists


def test_a_budget_fixes_every_operation_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = record_batches(
        build_state("mbs2,rank_capacity=1,recompute=moe_act"), 3, monkeypatch
    )
    assert first == second == third


def test_rows_without_a_budget_are_counted_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="host reads a number"):
        record_batches(build_state("mbs2"), 1, monkeypatch)


def test_steps_are_replayed_once_they_are_warm() -> None:
    state = build_state("mbs2,rank_capacity=1,graphs=full")
    assert state.graph is not None
    for step in range(1, WARMUP_STEPS + 4):
        train_step(state, step=step, lr=1e-3, stop_requested=False, count_ledger=step == 2)
    # The counted step and the one that records are no replays.
    assert state.graph.replays == 1


def test_a_list_is_replayed_on_new_numbers() -> None:
    x, out = torch.arange(6.0), torch.zeros(3)
    recorded = OperationList()

    def body() -> None:
        out.add_((x.view(2, 3).t() * 2).sum(1))

    recorded.record(body)
    x.fill_(1.0)
    out.zero_()
    recorded.replay()
    assert out.tolist() == [4.0, 4.0, 4.0]


def test_a_list_refuses_a_number_that_the_host_reads() -> None:
    with pytest.raises(RuntimeError, match="host reads a number"), OperationList():
        float(torch.ones(2).sum())
