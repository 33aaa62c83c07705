"""The sources of micro-batches; a training run reads a memory-mapped corpus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moewright.engine.data.corpus_rows import CorpusBlend, join_lengths
from moewright.engine.data.sampler import micro_batch_rows
from moewright.engine.kernels.attention import build_segments
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import step_samples
from moewright.spec.workload import BatchRampSpec


class BatchSource(Protocol):
    """A source of micro-batches."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int, /) -> MicroBatch:
        """Return this rank's part of a micro-batch, in the host's memory.

        `step` and `micro_batch` count from 0.
        """
        ...


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
        ramped = workload if self.follows_rampup else replace(workload, ramp=BatchRampSpec())
        samples = step_samples(ramped, step)
        local = local_rows(runtime, micro_batch, global_batch=samples.size)
        first = samples.first + local.start
        rows = self.data.read(first, len(local), workload, runtime.model.vocab_size)
        inputs_BS = torch.from_numpy(rows.inputs)
        targets_BS = torch.from_numpy(rows.targets)
        segments = None
        if rows.lengths:
            segments = build_segments(join_lengths(rows.lengths), torch.device("cpu"))
        is_counted_BS = targets_BS >= 0 if self.data.is_chats else None
        return build_micro_batch(runtime, inputs_BS, targets_BS, segments, is_counted_BS)


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
