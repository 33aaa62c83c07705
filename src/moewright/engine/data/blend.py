"""Which corpus each sample of a blend comes from, and how the chats of one step are packed.

Which corpus each sample of a blend comes from: a pure function of its place, in any layout. A
pattern of places repeats without end. In it each sample is taken from the corpus that lags most
behind its share, as Megatron-LM blends datasets; so every stretch of samples is mixed as the shares
say, to a sample of each corpus. Each corpus has its own order and its own epochs.

Chats of one step, packed into as many sequences as they fill. A sequence is a budget of tokens: a
step of long chats has more of them than one of short chats, and so more micro-batches. Which
sequence a chat is in depends on the step's chats alone, so it is the same in every layout and after
every restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.engine.data.packing import ChatDataset, read_packed
from moewright.engine.data.sampler import Int64s, Sampler
from moewright.rules.packing import PackedSequences, pack_lengths

# Places of a pattern: shares are kept to so many parts.
PATTERN_PLACES = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendPart:
    """The samples of a stretch that come from one corpus: their rows there, and their ids."""

    corpus: int
    rows: Int64s
    ids: Int64s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blend:
    """An endless sequence of samples of one corpus or several.

    Place p of the pattern belongs to corpus `pattern[p]`, and `ranks[p]` places before it do too;
    `counts` are the places of each corpus.
    """

    samplers: tuple[Sampler, ...]
    pattern: Int64s
    ranks: Int64s
    counts: Int64s

    @property
    def samples(self) -> int:
        """The samples that can be taken before one of any corpus is taken twice."""
        limits = []
        for corpus, sampler in enumerate(self.samplers):
            places = np.flatnonzero(self.pattern == corpus)
            periods, rest = divmod(sampler.samples, len(places))
            limits.append(periods * len(self.pattern) + int(places[rest]))
        return min(limits)

    def locate(self, first: int, count: int) -> Iterator[BlendPart]:
        """Yield the samples from place `first` of the sequence on, corpus by corpus."""
        periods, places = np.divmod(np.arange(first, first + count), len(self.pattern))
        corpora = self.pattern[places]
        numbers = periods * self.counts[corpora] + self.ranks[places]
        for corpus in np.unique(corpora).tolist():
            rows = np.flatnonzero(corpora == corpus)
            # Samples of a corpus follow each other in its own sequence.
            ids = self.samplers[corpus].sample_ids(int(numbers[rows[0]]), len(rows))
            yield BlendPart(corpus=corpus, rows=rows, ids=ids)


def build_blend(samplers: Sequence[Sampler], shares: Sequence[float]) -> Blend:
    """Build the blend of corpora by their shares, which sum to 1."""
    pattern = _deal_places(shares) if len(samplers) > 1 else np.zeros(1, dtype=np.int64)
    counts = np.bincount(pattern, minlength=len(samplers))
    ranks = np.empty_like(pattern)
    for corpus, places in enumerate(counts.tolist()):
        ranks[pattern == corpus] = np.arange(places)
    return Blend(samplers=tuple(samplers), pattern=pattern, ranks=ranks, counts=counts)


def _deal_places(shares: Sequence[float]) -> Int64s:
    """Deal the places of a pattern; a corpus of a tiny share has one at least."""
    wanted = [max(share, 1 / PATTERN_PLACES) for share in shares]
    taken = [0] * len(wanted)
    pattern = np.empty(PATTERN_PLACES, dtype=np.int64)
    for place in range(PATTERN_PLACES):
        # At place 0 all would lag by nothing: the largest share begins.
        lags = [share * max(place, 1) - count for share, count in zip(wanted, taken, strict=True)]
        corpus = lags.index(max(lags))
        taken[corpus] += 1
        pattern[place] = corpus
    if 0 in taken:  # a share that is due at the very end
        missing = taken.index(0)
        pattern[-1] = missing
    return pattern


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
