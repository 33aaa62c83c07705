"""What the step does for a GPU, on a CPU: its clock, its waits, its copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny_jobs
from layout_proof import WORKLOAD, draw_test_weight
from moewright.codec import parse_layout
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.observe.phase_clock import PhaseClock
from moewright.engine.optim import distributed_optimizer, moments, update_rules
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.rank_checks import describe_device_queues
from moewright.engine.run.step import compute_heldout_loss, train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.job import plan_job
from moewright.spec.hardware import DeviceKind
from moewright.spec.ledger import StepPhase


class LaggingStamps:
    """A device that runs 10 s behind the host, and that is asked only when it has come there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = -1.0

    def take(self) -> float:
        self.now += 1.0
        return self.now

    def wait(self, last: float) -> None:
        self.reached = last

    def seconds(self, start: float, stop: float) -> float:
        assert stop <= self.reached, "read before the device was there"
        return 10 * (stop - start)


def test_phases_last_as_long_as_the_device_works() -> None:
    clock = PhaseClock(LaggingStamps())
    with clock.phase(StepPhase.FORWARD):
        pass
    with clock.phase(StepPhase.BACKWARD):
        pass
    seconds = {row.phase: row.seconds for row in clock.time_rows()}
    assert (seconds[StepPhase.FORWARD], seconds[StepPhase.BACKWARD]) == (10, 10)
    assert sum(seconds.values()) == 50


class NoTargets:
    """A source of micro-batches in which no token has a target."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        shape = (runtime.mesh.layout.mbs, runtime.workload.seq_len)
        tokens = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(micro_batch))
        return build_micro_batch(runtime, tokens, torch.full(shape, -1), None)


def build_state(data: Any) -> TrainState:
    return build_train_state(
        plan_job(tiny_jobs.build_plan(WORKLOAD, "", world_size=1)),
        data,
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
    )


def test_a_step_without_a_target_has_no_loss_and_goes_on() -> None:
    state = build_state(NoTargets())
    result = train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
    assert result.backward.loss == 0.0
    assert not result.skipped
    heldout = compute_heldout_loss(state, state.train_data, 1, lambda: None)
    assert (heldout.loss, heldout.terms) == (0.0, 0)


def test_the_norm_of_many_elements_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads none of its parts: each read waits for the device."""
    monkeypatch.setattr(distributed_optimizer, "_NORM_ELEMENTS", 7)
    flat = torch.randn(40, generator=torch.Generator().manual_seed(1))
    with torch.utils._python_dispatch._disable_current_modes(), ReadCounter() as reads:
        squared = distributed_optimizer._squared_norm(flat)
    assert not reads.count
    assert squared.dtype == torch.float64
    torch.testing.assert_close(squared, flat.double().square().sum(), rtol=1e-6, atol=0.0)


class ReadCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """A dispatch mode that counts the numbers that the host reads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


def test_the_host_reads_as_often_whatever_the_micro_batches() -> None:
    """It waits for the device at the end of a step, not after each micro-batch."""
    counts = []
    for sequences in (4, 8):
        work = tiny_jobs.build_workload(WORKLOAD.data, global_batch=sequences)
        state = build_train_state(
            plan_job(tiny_jobs.build_plan(work, "", world_size=1, model=tiny_jobs.DENSE)),
            NoTargets(),
            rank=0,
            device=torch.device("cpu"),
            initial_value=draw_test_weight,
        )
        with ReadCounter() as reads:
            train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_counts_of_updates_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor, not a copy to the device for every parameter."""
    steps: list[torch.Tensor] = []
    monkeypatch.setattr(update_rules, "adamw", lambda *args, **_: steps.extend(args[5]))
    state = build_state(None)
    state.optimizer.begin_step(1)
    state.optimizer.reduce_gradients()
    state.optimizer.update(lr=1e-3, scale=1.0)
    buckets = 2 * len(state.optimizer.buckets)  # matrices, then vectors
    assert len(steps) > buckets
    assert len({step.untyped_storage()._cdata for step in steps}) <= buckets
    assert all(float(step) == 0.0 for step in steps)


@pytest.mark.parametrize(
    ("text", "kind", "queues", "is_noted"),
    [
        ("tp2", DeviceKind.CUDA, "", True),
        ("tp2", DeviceKind.CUDA, "32", True),
        ("tp2", DeviceKind.CUDA, "1", False),
        ("overlap=grad", DeviceKind.CUDA, "", True),
        ("ep2", DeviceKind.CUDA, "", False),
        ("tp2", DeviceKind.CPU, "", False),
    ],
)
def test_queues_that_let_products_overtake_are_told(
    text: str, kind: DeviceKind, queues: str, is_noted: bool
) -> None:
    note = describe_device_queues(parse_layout(text, world_size=2), kind, queues)
    assert ("set it to 1" in note) == bool(note) == is_noted


def test_offloaded_state_lies_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def zeros(numel: int, *, pin_memory: bool, **_: Any) -> None:
        pinned.append(pin_memory)

    monkeypatch.setattr(torch, "zeros", zeros)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for state_device, device in ((cpu, cuda), (cpu, cpu), (cuda, cuda)):
        moments.new_state(4, torch.float32, state_device, device)
    assert pinned == [True, False, False]
