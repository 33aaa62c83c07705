"""The sources of micro-batches; a training run reads a memory-mapped corpus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from moewright.engine.data.indexed import IndexedDataset
from moewright.engine.data.packing import ChatDataset, PackedSequences, read_packed
from moewright.engine.data.sampler import (
    Int64s,
    Sampler,
    document_ends,
    micro_batch_rows,
    read_samples,
)
from moewright.engine.kernels.attention import Segments, build_segments
from moewright.engine.model.micro_batch import IGNORED_TARGET, MicroBatch, build_micro_batch
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import step_samples
from moewright.spec.workload import BatchRampSpec, DocumentMasking


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
    """A held-out corpus with the loss, in nats, of a model that knows token frequencies alone."""

    loader: CorpusLoader | ChatLoader
    unigram_entropy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusLoader:
    """A mapped corpus and the order in which it is read.

    With `follows_rampup` the global batch grows as the workload says; without, all have one size.
    """

    dataset: IndexedDataset
    sampler: Sampler
    follows_rampup: bool

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return this rank's part of a micro-batch; `step` and `micro_batch` count from 0."""
        workload = runtime.workload
        ids = _find_sample_ids(
            runtime, self.sampler, step, micro_batch, follows_rampup=self.follows_rampup
        )
        tokens = read_samples(
            self.dataset, ids, seq_len=workload.seq_len, vocab_size=runtime.model.vocab_size
        )
        inputs_BS = torch.from_numpy(tokens[:, :-1])
        targets_BS = torch.from_numpy(tokens[:, 1:].copy())
        segments = None
        if workload.data.documents is not DocumentMasking.JOINED:
            segments = self._split_documents(ids, targets_BS, workload.seq_len)
        return build_micro_batch(runtime, inputs_BS, targets_BS, segments)

    def _split_documents(self, ids: Int64s, targets_BS: torch.Tensor, seq_len: int) -> Segments:
        """Return a segment for each document of the samples `ids`, and mask targets in place.

        The last token of a document has no target: `targets_BS` would hold another document's.
        """
        lengths: list[int] = []
        for row, sample in enumerate(ids.tolist()):
            ends = document_ends(self.dataset, sample, seq_len=seq_len)
            targets_BS[row, [end - 1 for end in ends]] = IGNORED_TARGET
            edges = sorted({0, *ends, seq_len})
            lengths += [stop - start for start, stop in pairwise(edges)]
        return build_segments(lengths, torch.device("cpu"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatLoader:
    """A corpus of chats, packed into sequences, and the order in which these are read.

    Each sample is a segment of its own, and so is padding. Router losses and statistics count the
    tokens that have a target. `follows_rampup` as in CorpusLoader.
    """

    dataset: ChatDataset
    packs: PackedSequences
    sampler: Sampler
    follows_rampup: bool

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return this rank's part of a micro-batch; `step` and `micro_batch` count from 0."""
        ids = _find_sample_ids(
            runtime, self.sampler, step, micro_batch, follows_rampup=self.follows_rampup
        )
        rows = read_packed(self.dataset, self.packs, ids, vocab_size=runtime.model.vocab_size)
        inputs_BS = torch.from_numpy(rows.inputs)
        targets_BS = torch.from_numpy(rows.targets)
        lengths = [length for row in rows.lengths for length in row]
        segments = build_segments(lengths, torch.device("cpu"))
        return build_micro_batch(runtime, inputs_BS, targets_BS, segments, targets_BS >= 0)


def _find_sample_ids(
    runtime: Runtime, sampler: Sampler, step: int, micro_batch: int, *, follows_rampup: bool
) -> Int64s:
    """Return the samples of a micro-batch of this rank; `step` and `micro_batch` count from 0."""
    workload = runtime.workload
    ramped = workload if follows_rampup else replace(workload, ramp=BatchRampSpec())
    samples = step_samples(ramped, step)
    rows = local_rows(runtime, micro_batch, global_batch=samples.size)
    return sampler.sample_ids(samples.first + rows.start, len(rows))


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
