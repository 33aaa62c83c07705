"""Chats of one step, packed into as many sequences as they fill.

A sequence is a budget of tokens: a step of long chats has more of them than one of short chats, and
so more micro-batches. Which sequence a chat is in depends on the step's chats alone, so it is the
same in every layout and after every restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.engine.data.blend import Blend
from moewright.engine.data.packing import ChatDataset, read_packed
from moewright.rules.packing import PackedSequences, pack_lengths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRows:
    """Sequences that were read, as SampleRows has them."""

    inputs: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    targets: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    lengths: tuple[tuple[int, ...], ...]
    reference: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSequences:
    """The packed sequences of a step, corpus after corpus."""

    corpora: tuple[ChatDataset, ...]
    packs: tuple[PackedSequences, ...]
    seq_len: int

    @property
    def count(self) -> int:
        return sum(packs.count for packs in self.packs)

    def read(self, rows: range, vocab_size: int) -> StepRows:
        """Read these sequences; those after the last are empty.

        Raises:
            BadInput: naming the file and the sample, when a token is outside [0, vocab_size).
        """
        inputs = np.zeros((len(rows), self.seq_len), dtype=np.int64)
        targets = np.full_like(inputs, -1)
        lengths: list[tuple[int, ...]] = [(self.seq_len,)] * len(rows)
        reference: list[tuple[float, ...]] = [()] * len(rows)
        first = 0
        for corpus, packs in zip(self.corpora, self.packs, strict=True):
            wanted = range(max(rows.start, first), min(rows.stop, first + packs.count))
            if wanted:
                ids = np.arange(wanted.start - first, wanted.stop - first)
                read = read_packed(corpus, packs, ids, vocab_size=vocab_size)
                places = slice(wanted.start - rows.start, wanted.stop - rows.start)
                inputs[places] = read.inputs
                targets[places] = read.targets
                lengths[places] = read.lengths
                reference[places] = read.reference
            first += packs.count
        return StepRows(
            inputs=inputs, targets=targets, lengths=tuple(lengths), reference=tuple(reference)
        )


def pack_step(
    corpora: Sequence[ChatDataset], order: Blend, *, step: int, samples: int, seq_len: int
) -> StepSequences:
    """Pack the chats of a step, counted from 0; each corpus of a blend by itself."""
    parts = list(order.locate(step * samples, samples))
    packs = []
    for part in parts:
        packed = pack_lengths(corpora[part.corpus].lengths[part.ids], seq_len)
        packs.append(replace(packed, samples=part.ids[packed.samples]))
    return StepSequences(
        corpora=tuple(corpora[part.corpus] for part in parts), packs=tuple(packs), seq_len=seq_len
    )
