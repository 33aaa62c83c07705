"""Micro-batches that are read, packed and pinned while the step before them trains."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.run.corpus_loader import BatchSource, StepSizes, planned_step_size
from moewright.engine.runtime import Runtime


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
