"""Micro-batches read ahead: the same ones, read while a step trains, faults where they belong."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import tiny_jobs
from layout_proof import WORKLOAD, draw_test_weight
from moewright.engine.kernels.attention import Segments
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.corpus_loader import PrefetchedBatches
from moewright.engine.run.step import train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.job import plan_job
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import BatchRampSpec, Workload

STEPS = 4


class NotedBatches:
    """A source that notes which micro-batches are read, and whether by the main thread."""

    def __init__(self, *, bad_step: int = -1) -> None:
        self.reads: list[tuple[int, int, bool]] = []
        self.bad_step = bad_step

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        is_main = threading.current_thread() is threading.main_thread()
        self.reads.append((step, micro_batch, is_main))
        if step == self.bad_step:
            raise BadInput(Reason(field="corpus.bin", rule="has shrunk"))
        shape = (runtime.mesh.layout.mbs, runtime.workload.seq_len + 1)
        generator = torch.Generator().manual_seed(100 * step + micro_batch)
        tokens = torch.randint(0, 64, shape, generator=generator)
        return build_micro_batch(runtime, tokens[:, :-1], tokens[:, 1:], None)


def build_state(source: PrefetchedBatches, workload: Workload) -> TrainState:
    return build_train_state(
        plan_job(tiny_jobs.build_plan(workload, "", world_size=1, model=tiny_jobs.DENSE)),
        source,
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
    )


def run_steps(source: NotedBatches, stop: int, workload: Workload = WORKLOAD) -> list[float]:
    batches = PrefetchedBatches(source, stop=stop)
    state = build_state(batches, workload)
    losses = [
        train_step(
            state, step=step, lr=1e-2, stop_requested=False, count_ledger=False
        ).backward.loss
        for step in range(1, STEPS + 1)
    ]
    batches.close()
    return losses


@pytest.mark.parametrize(
    "ramp",
    [BatchRampSpec(), BatchRampSpec(ramp_start=4, ramp_increment=2, ramp_samples=12)],
)
def test_a_step_is_read_while_the_one_before_trains(ramp: BatchRampSpec) -> None:
    workload = replace(WORKLOAD, ramp=ramp)
    ahead, alone = NotedBatches(), NotedBatches()
    assert run_steps(ahead, STEPS, workload) == run_steps(alone, 0, workload)
    assert sorted(read[:2] for read in ahead.reads) == [read[:2] for read in alone.reads]
    assert all(is_main == (step == 0) for step, _, is_main in ahead.reads)
    assert all(is_main for _, _, is_main in alone.reads)


def test_a_fault_of_the_data_comes_up_in_its_step() -> None:
    batches = PrefetchedBatches(NotedBatches(bad_step=1), stop=STEPS)
    state = build_state(batches, WORKLOAD)
    result = train_step(state, step=1, lr=1e-2, stop_requested=False, count_ledger=False)
    assert result.backward.loss > 0
    with pytest.raises(BadInput, match="has shrunk"):
        train_step(state, step=2, lr=1e-2, stop_requested=False, count_ledger=False)
    batches.close()


def test_a_step_that_was_not_foreseen_is_read_when_asked_for() -> None:
    source = NotedBatches()
    batches = PrefetchedBatches(source, stop=10)
    runtime = build_state(batches, WORKLOAD).runtime
    for step in (0, 5, 6):
        asked = batches.micro_batch(runtime, step, 1).inputs
        assert torch.equal(asked, source.micro_batch(runtime, step, 1).inputs)
    batches.close()


def test_nothing_of_a_step_is_kept_once_it_is_handed_out() -> None:
    batches = PrefetchedBatches(NotedBatches(), stop=2)
    runtime = build_state(batches, WORKLOAD).runtime
    for step in (0, 1):
        for number in range(WORKLOAD.global_batch):
            batches.micro_batch(runtime, step, number)
    assert not batches._ready
    assert batches._ahead is None
    batches.close()


def test_a_micro_batch_moves_whole() -> None:
    """Every tensor of it: packed documents, tokens that count, and the inputs of MTP depths."""
    model = replace(tiny_jobs.DENSE, mtp_layers=1)
    plan = tiny_jobs.build_plan(WORKLOAD, "mbs2", world_size=1, model=model)
    state = build_train_state(
        plan_job(plan),
        PrefetchedBatches(NotedBatches(), stop=0),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
    )
    tokens = torch.arange(2 * WORKLOAD.seq_len).view(2, -1)
    segments = Segments(
        lengths=(WORKLOAD.seq_len,) * 2,
        cu_seqlens=torch.arange(3, dtype=torch.int32) * WORKLOAD.seq_len,
    )
    batch = build_micro_batch(state.runtime, tokens, tokens, segments, tokens % 2 == 0)
    moved = batch.to(torch.device("meta"))
    assert moved.segments is not None
    assert moved.counted is not None
    assert batch.counted is not None
    tensors = [moved.inputs, moved.targets, *(x for pair in moved.mtp for x in pair)]
    tensors += [moved.segments.cu_seqlens, moved.counted.mask, moved.counted.sequence_weights]
    assert len(tensors) == 7
    assert {x.device.type for x in tensors} == {"meta"}
    assert moved.counted.total == batch.counted.total
    assert moved.inputs.shape == batch.inputs.shape
