"""Buckets are reduced under backward, in one order, and never before their last gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.codec import parse_layout
from moewright.engine.comm.collectives import AsyncCollective
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.optim.flat_buffers import FlatBucket, GradReadyTracker
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import forward_backward
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.workload import DataSpec


def make_tracker() -> tuple[GradReadyTracker, list[int]]:
    sent: list[int] = []
    return GradReadyTracker([(7, ["a", "b"]), (3, ["c"])], sent.append), sent


def test_the_first_step_waits_and_the_next_knows_when_a_bucket_is_full() -> None:
    tracker, sent = make_tracker()
    tracker.begin_step(2)
    for name in "abcabc":
        tracker.mark_ready(name)
    assert sent == []
    tracker.flush()
    assert sent == [7, 3]
    tracker.begin_step(3)  # another number of micro-batches
    for name in "abcabcab":
        tracker.mark_ready(name)
    assert sent == [7, 3, 7]
    tracker.mark_ready("c")
    assert sent == [7, 3, 7, 3]


def test_a_full_bucket_waits_for_those_before_it_and_an_unused_parameter_for_the_end() -> None:
    tracker, sent = make_tracker()
    tracker.begin_step(1)
    tracker.mark_ready("a")
    tracker.mark_ready("c")
    tracker.flush()
    sent.clear()
    tracker.begin_step(1)
    tracker.mark_ready("c")
    tracker.mark_ready("a")
    assert sent == []
    tracker.flush()
    assert sent == [7, 3]


def test_a_gradient_after_the_reduction_is_an_error() -> None:
    tracker, _ = make_tracker()
    tracker.begin_step(1)
    for name in "abc":
        tracker.mark_ready(name)
    tracker.flush()
    tracker.begin_step(1)
    for name in "ab":
        tracker.mark_ready(name)
    with pytest.raises(RuntimeError, match="a gradient of b came after its bucket was reduced"):
        tracker.mark_ready("b")


class _RandomTokens:
    """Random tokens."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        dice = torch.Generator().manual_seed(8 * step + micro_batch)
        tokens_BS = torch.randint(
            0,
            runtime.model.vocab_size,
            (runtime.mesh.layout.mbs, runtime.workload.seq_len + 1),
            generator=dice,
        )
        return build_micro_batch(runtime, tokens_BS[:, :-1], tokens_BS[:, 1:], None)


@pytest.mark.parametrize("recompute", ["", ",recompute=full"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_bucket_is_reduced_under_the_last_backward(
    recompute: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[bool] = []
    reduce = FlatBucket.start_reduce

    def seen(bucket: FlatBucket) -> AsyncCollective:
        inside.append(torch._C._current_graph_task_id() != -1)
        return reduce(bucket)

    monkeypatch.setattr(FlatBucket, "start_reduce", seen)
    work = tiny_jobs.build_workload(DataSpec())
    work = replace(work, optimizer=replace(work.optimizer, bucket_elements=4000))
    layout = parse_layout(f"mbs2,overlap=grad{recompute}", world_size=1)
    arguments: Any = {"rank": 0, "device": torch.device("cpu"), "initial_value": draw_initial_value}
    state = build_train_state(
        Job(model=replace(tiny_jobs.MODEL, tie_embeddings=tied), workload=work, layout=layout),
        _RandomTokens(),
        **arguments,
    )
    buckets = len(state.optimizer.buckets)
    assert buckets > 3
    for step, expected in ((1, False), (2, True), (3, True)):
        inside.clear()
        forward_backward(state, build_phase_clock(state.runtime.device), step=step)
        assert inside == [expected] * buckets
