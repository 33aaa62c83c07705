"""What a recorded step is made of: the same operations and shapes whatever the router chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny_jobs
from layout_proof import BATCH, LENGTH, draw_batches, draw_test_weight
from moewright.codec import parse_layout
from moewright.engine.comm import collectives
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.memory.graph_capture import WARMUP_STEPS, OperationList
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.observe.storage_census import freeze_older_objects
from moewright.engine.pipeline import run_batch
from moewright.engine.run import micro_batch_passes
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.dry_run import HostAnswers
from moewright.engine.run.step import forward_backward, train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.workload import DataSpec


class BlankBatches:
    """A source of micro-batches without content."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        tokens = torch.zeros((runtime.mesh.layout.mbs, LENGTH), dtype=torch.int64)
        return build_micro_batch(runtime, tokens, tokens, None)


def build_state(layout: str, world_size: int = 1) -> TrainState:
    workload = tiny_jobs.build_workload(DataSpec(), seq_len=LENGTH, global_batch=BATCH)
    model = replace(tiny_jobs.MODEL, mtp_layers=1)
    return build_train_state(
        Job(model=model, workload=workload, layout=parse_layout(layout, world_size=world_size)),
        draw_batches(model) if world_size == 1 else BlankBatches(),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight if world_size == 1 else draw_blank,
        kernels=torch_kernels(),
    )


def draw_blank(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
    return torch.empty(parameter.placement.local_shape)


def record_batches(
    state: TrainState, steps: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[object]]:
    """Run steps, and list the operations of each one's micro-batches with their shapes."""
    lists: list[list[object]] = []

    def train_batch(*args: Any, **kwargs: Any) -> None:
        recorded = OperationList()
        recorded.record(lambda: run_batch.train_batch(*args, **kwargs))
        lists.append([operation.shapes for operation in recorded.operations])

    monkeypatch.setattr(micro_batch_passes, "train_batch", train_batch)
    for step in range(1, steps + 1):
        forward_backward(state, build_phase_clock(torch.device("cpu")), step=step)
    return lists


def test_a_budget_fixes_every_operation_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = record_batches(
        build_state("mbs2,rank_capacity=1,recompute=moe_act"), 3, monkeypatch
    )
    assert first == second == third


@pytest.mark.parametrize(
    ("layout", "is_static"),
    [
        pytest.param("ep2,mbs2,rank_capacity=1.5", True, marks=pytest.mark.thorough),
        ("ep2,mbs2,capacity=1,capacity_fill=padded", True),
        ("ep2,mbs2", False),
        ("ep2,mbs2,capacity=1", False),
    ],
)
def test_tensors_without_data_show_whether_the_host_reads_a_size(
    layout: str, is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of two whose other does not exist, and whose routing nothing dictates."""
    collectives.join_fake_world(rank=0, world_size=2)
    try:
        with freeze_older_objects(), FakeTensorMode(), HostAnswers():
            state = build_state(layout, world_size=2)
            if is_static:
                (operations,) = record_batches(state, 1, monkeypatch)
                assert len(operations) > 500
            else:
                with pytest.raises(RuntimeError, match="host reads a number"):
                    record_batches(state, 1, monkeypatch)
    finally:
        collectives.leave_world()


@pytest.mark.thorough
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
