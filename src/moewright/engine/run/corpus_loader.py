"""The sources of micro-batches; a training run reads a memory-mapped corpus."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moewright.engine.data.blend import StepRows
from moewright.engine.data.corpus_rows import CorpusBlend, join_lengths
from moewright.engine.data.packing import SampleRows
from moewright.engine.data.sampler import micro_batch_rows
from moewright.engine.kernels.attention import build_segments
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.preferences import build_answers
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import step_samples
from moewright.rules.packing import StepSize, round_up_step
from moewright.spec.workload import BatchRampSpec, Objective


class BatchSource(Protocol):
    """A source of micro-batches."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int, /) -> MicroBatch:
        """Return this rank's part of a micro-batch, in the host's memory.

        `step` and `micro_batch` count from 0.
        """
        ...


# The size of a step, counted from 0.
StepSizes = Callable[[Runtime, int], StepSize]


def planned_step_size(runtime: Runtime, step: int) -> StepSize:
    """Return the size of a step, counted from 0, that the workload alone decides."""
    size = step_samples(runtime.workload, step).size
    return StepSize(sequences=size, filled=size)


class NoBatches:
    """A source of micro-batches for a state that never trains."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        raise AssertionError("a state that does not train reads no data")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutData:
    """Held-out corpora with the loss, in nats, of a model that knows token frequencies alone."""

    loader: CorpusLoader
    unigram_entropy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusLoader:
    """The mapped corpora of a job, in the order in which their samples are read.

    With `follows_rampup` the global batch grows as the workload says; without, all have one size.
    Of chats, router losses and statistics count the tokens that have a target.
    """

    data: CorpusBlend
    follows_rampup: bool

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return this rank's part of a micro-batch; `step` and `micro_batch` count from 0."""
        workload = runtime.workload
        if self.follows_rampup and workload.batch_samples:
            return self._packed_micro_batch(runtime, step, micro_batch)
        ramped = workload if self.follows_rampup else replace(workload, ramp=BatchRampSpec())
        samples = step_samples(ramped, step)
        local = local_rows(runtime, micro_batch, global_batch=samples.size)
        first = samples.first + local.start
        rows = self.data.read(first, len(local), workload, runtime.model.vocab_size)
        return self._build(runtime, rows)

    def step_size(self, runtime: Runtime, step: int) -> StepSize:
        """Return the size of a training step, counted from 0."""
        workload = runtime.workload
        if not workload.batch_samples:
            return planned_step_size(runtime, step)
        layout = runtime.mesh.layout
        filled = self.data.pack_step(step, workload).count
        return round_up_step(filled, layout.dp * layout.mbs)

    def _packed_micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return this rank's part of a micro-batch of a step that is packed by itself."""
        layout = runtime.mesh.layout
        sequences = self.data.pack_step(step, runtime.workload)
        size = round_up_step(sequences.count, layout.dp * layout.mbs)
        local = local_rows(runtime, micro_batch, global_batch=size.sequences)
        rows = sequences.read(local, runtime.model.vocab_size)
        return self._build(runtime, rows)

    def _build(self, runtime: Runtime, rows: SampleRows | StepRows) -> MicroBatch:
        return build_from_rows(runtime, rows, is_chats=self.data.is_chats)


def build_from_rows(runtime: Runtime, rows: SampleRows | StepRows, *, is_chats: bool) -> MicroBatch:
    """Build this rank's part of a micro-batch from the rows that it holds."""
    inputs_BS = torch.from_numpy(rows.inputs)
    targets_BS = torch.from_numpy(rows.targets)
    segments = None
    if rows.lengths:
        segments = build_segments(join_lengths(rows.lengths), torch.device("cpu"))
    is_counted_BS = targets_BS >= 0 if is_chats else None
    batch = build_micro_batch(runtime, inputs_BS, targets_BS, segments, is_counted_BS)
    if runtime.workload.loss.objective is not Objective.DPO:
        return batch
    return replace(batch, answers=build_answers(rows.lengths, rows.reference))


def local_rows(runtime: Runtime, micro_batch: int, *, global_batch: int) -> range:
    """Return the rows of a global batch in a micro-batch of this rank."""
    layout = runtime.mesh.layout
    return micro_batch_rows(
        global_batch=global_batch,
        dp=layout.dp,
        dp_rank=runtime.mesh.coordinate("dp"),
        mbs=layout.mbs,
        micro_batch=micro_batch,
    )


class PrefetchedBatches:
    """A source that reads a step ahead of the one asked for, on a thread of its own.

    What it returns is what `source` returns: a fault of the data comes up in the step that needs
    the data. A step that was not foreseen, as the first, is read when it is asked for; steps from
    `stop` on are never read ahead.
    """

    def __init__(
        self, source: BatchSource, *, stop: int, step_size: StepSizes = planned_step_size
    ) -> None:
        self._source = source
        self._stop = stop
        self._step_size = step_size
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._step = -1  # whose micro-batches are being asked for
        self._ready: dict[int, MicroBatch] = {}  # those of the step that were read ahead
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return this rank's part of a micro-batch; `step` and `micro_batch` count from 0."""
        if step != self._step:
            self._open_step(runtime, step)
        ready = self._ready.pop(micro_batch, None)
        return ready or self._source.micro_batch(runtime, step, micro_batch)

    def close(self) -> None:
        """End the thread."""
        self._reader.shutdown(cancel_futures=True)

    def _open_step(self, runtime: Runtime, step: int) -> None:
        """Take what was read ahead for a step, and begin to read the next one."""
        self._step = step
        self._ready = {}
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            # Waits for the thread, whose fault is raised here.
            self._ready = dict(enumerate(ahead[1].result()))
        if step + 1 < self._stop:
            self._ahead = step + 1, self._reader.submit(self._read, runtime, step + 1)

    def _read(self, runtime: Runtime, step: int) -> list[MicroBatch]:
        layout = runtime.mesh.layout
        numbers = range(self._step_size(runtime, step).sequences // (layout.dp * layout.mbs))
        batches = [self._source.micro_batch(runtime, step, number) for number in numbers]
        if runtime.device.type != "cuda":
            return batches
        torch.cuda.set_device(runtime.device)  # of this thread: pinning would open the first one
        return [batch.pin() for batch in batches]
