"""Buckets are reduced under backward, in one order, and never before their last gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.codec import parse_layout
from moewright.engine.comm.collectives import Flight
from moewright.engine.data.batch import Batch, batch_here
from moewright.engine.model.transformer import initial_value
from moewright.engine.optim.flat_buffers import FlatBucket
from moewright.engine.optim.grad_ready import Arrivals
from moewright.engine.run.build import trainee
from moewright.engine.run.step import Clock, accumulate
from moewright.engine.runtime import Runtime
from moewright.spec.workload import DataSpec


def arrivals() -> tuple[Arrivals, list[int]]:
    sent: list[int] = []
    return Arrivals([(7, ["a", "b"]), (3, ["c"])], sent.append), sent


def test_the_first_step_waits_and_the_next_knows_when_a_bucket_is_full() -> None:
    made, sent = arrivals()
    made.begin(2)
    for name in "abcabc":
        made.came(name)
    assert sent == []
    made.finish()
    assert sent == [7, 3]
    made.begin(3)  # another number of micro-batches
    for name in "abcabcab":
        made.came(name)
    assert sent == [7, 3, 7]
    made.came("c")
    assert sent == [7, 3, 7, 3]


def test_a_full_bucket_waits_for_those_before_it_and_an_unused_parameter_for_the_end() -> None:
    made, sent = arrivals()
    made.begin(1)
    made.came("a")
    made.came("c")
    made.finish()
    sent.clear()
    made.begin(1)
    made.came("c")
    made.came("a")
    assert sent == []
    made.finish()
    assert sent == [7, 3]


def test_a_gradient_after_the_reduction_is_an_error() -> None:
    made, _ = arrivals()
    made.begin(1)
    for name in "abc":
        made.came(name)
    made.finish()
    made.begin(1)
    for name in "ab":
        made.came(name)
    with pytest.raises(RuntimeError, match="a gradient of b came after its bucket was reduced"):
        made.came("b")


class _Words:
    """Random tokens."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> Batch:
        dice = torch.Generator().manual_seed(8 * step + micro_batch)
        words = torch.randint(
            0, run.model.vocab_size, (run.mesh.layout.mbs, run.workload.seq_len + 1), generator=dice
        )
        return batch_here(run, words[:, :-1], words[:, 1:], None)


@pytest.mark.parametrize("recompute", ["", ",recompute=full"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_bucket_is_reduced_under_the_last_backward(
    recompute: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[bool] = []
    reduce = FlatBucket.reduce

    def seen(bucket: FlatBucket) -> Flight:
        inside.append(torch._C._current_graph_task_id() != -1)
        return reduce(bucket)

    monkeypatch.setattr(FlatBucket, "reduce", seen)
    work = tiny_jobs.workload(DataSpec())
    work = replace(work, optimizer=replace(work.optimizer, bucket_elements=4000))
    layout = parse_layout(f"mbs2,overlap=grad{recompute}", world_size=1)
    arguments: Any = {"rank": 0, "device": torch.device("cpu"), "initial": initial_value}
    job = trainee(
        replace(tiny_jobs.MODEL, tie_embeddings=tied), work, layout, _Words(), **arguments
    )
    buckets = len(job.optimizer.buckets)
    assert buckets > 3
    for step, wanted in ((1, False), (2, True), (3, True)):
        inside.clear()
        accumulate(job, Clock(), step=step)
        assert inside == [wanted] * buckets
