"""Where micro-batches come from: a mapped corpus, cut for this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from moewright.engine.data.indexed import IndexedDataset
from moewright.engine.data.micro_batch import IGNORED_TARGET, MicroBatch, build_micro_batch
from moewright.engine.data.sampler import (
    Int64s,
    Sampler,
    document_ends,
    micro_batch_rows,
    read_samples,
)
from moewright.engine.kernels.attention import Segments
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import step_samples
from moewright.spec.workload import BatchRampSpec, DocumentMasking


class BatchSource(Protocol):
    """Where micro-batches come from."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """That of this rank for the step counted from 0."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusLoader:
    """A mapped corpus and the order in which it is read, by global batches that grow or all
    alike."""

    dataset: IndexedDataset
    sampler: Sampler
    follows_rampup: bool

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """That of this rank for the step counted from 0."""
        layout, work = run.mesh.layout, run.workload
        batch = step_samples(
            work if self.follows_rampup else replace(work, ramp=BatchRampSpec()), step
        )
        rows = micro_batch_rows(
            global_batch=batch.size,
            dp=layout.dp,
            dp_rank=run.mesh.coordinate("dp"),
            mbs=layout.mbs,
            micro_batch=micro_batch,
        )
        ids = self.sampler.sample_ids(batch.first + rows.start, len(rows))
        tokens = read_samples(
            self.dataset, ids, seq_len=work.seq_len, vocab_size=run.model.vocab_size
        )
        inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:].copy())
        runs = (
            None
            if work.data.documents is DocumentMasking.JOINED
            else self._split_documents(run, ids, targets)
        )
        return build_micro_batch(run, inputs, targets, runs)

    def _split_documents(self, run: Runtime, ids: Int64s, targets: torch.Tensor) -> Segments:
        """The documents of samples `ids`, of whose last tokens the `targets` [mbs, seq_len] are
        struck out."""
        length, lengths = run.workload.seq_len, list[int]()
        for row, sample in enumerate(ids.tolist()):
            ends = document_ends(self.dataset, sample, seq_len=length)
            targets[row, [end - 1 for end in ends]] = IGNORED_TARGET
            lengths += [stop - start for start, stop in pairwise(sorted({0, *ends, length}))]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=run.device)
        return Segments(lengths=tuple(lengths), cu_seqlens=starts)
