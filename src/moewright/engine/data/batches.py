"""Where micro-batches come from: a mapped corpus, cut for this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from moewright.engine.data.batch import NO_TARGET, Batch, batch_here
from moewright.engine.data.indexed import IndexedDataset
from moewright.engine.data.sampler import Int64s, Sampler, documents_end, fetch, rows_of
from moewright.engine.kernels.attention import Runs
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import batch_of
from moewright.spec.workload import Documents, RampSpec


class Batches(Protocol):
    """Where micro-batches come from."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> Batch:
        """That of this rank for the step counted from 0."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """A mapped corpus and the order in which it is read, by global batches that grow or all
    alike."""

    dataset: IndexedDataset
    sampler: Sampler
    grows: bool

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> Batch:
        """That of this rank for the step counted from 0."""
        layout, work = run.mesh.layout, run.workload
        batch = batch_of(work if self.grows else replace(work, ramp=RampSpec()), step)
        rows = rows_of(
            global_batch=batch.size,
            dp=layout.dp,
            dp_rank=run.mesh.coordinate("dp"),
            mbs=layout.mbs,
            micro_batch=micro_batch,
        )
        ids = self.sampler.ids(batch.first + rows.start, len(rows))
        tokens = fetch(self.dataset, ids, seq_len=work.seq_len, vocab_size=run.model.vocab_size)
        inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:].copy())
        runs = None if work.data.documents is Documents.JOINED else self._cut(run, ids, targets)
        return batch_here(run, inputs, targets, runs)

    def _cut(self, run: Runtime, ids: Int64s, targets: torch.Tensor) -> Runs:
        """The documents of samples `ids`, of whose last tokens the `targets` [mbs, seq_len] are
        struck out."""
        length, lengths = run.workload.seq_len, list[int]()
        for row, sample in enumerate(ids.tolist()):
            ends = documents_end(self.dataset, sample, seq_len=length)
            targets[row, [end - 1 for end in ends]] = NO_TARGET
            lengths += [stop - start for start, stop in pairwise(sorted({0, *ends, length}))]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=run.device)
        return Runs(lengths=tuple(lengths), starts=starts)
