"""Samples packed into sequences: each stays whole, and the rest of a sequence is padding.

Which samples share a sequence depends on their lengths alone, so it is the same in every layout and
after every restart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

IGNORED_TARGET = -1  # no token's id: the loss leaves the place out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedSequences:
    """Sequences of `seq_len` tokens, each of whole samples in order, then padding.

    Sequence i holds the samples `samples[starts[i] : starts[i + 1]]`.
    """

    seq_len: int
    samples: Int64s
    starts: Int64s  # [sequences + 1]

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def sequence(self, index: int) -> Int64s:
        """Return the samples of a sequence."""
        return self.samples[self.starts[index] : self.starts[index + 1]]


def pack_lengths(lengths: Int64s, seq_len: int) -> PackedSequences:
    """Pack samples of these lengths, the longest first, each where it leaves the least room.

    It is best-fit decreasing (Johnson 1973), as sample packing of trainers has it.
    """
    # Stable: samples of one length keep their order, in whatever version of NumPy.
    order = np.argsort(-lengths, kind="stable")
    members: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # the sequences with so much room
    rooms: list[int] = []  # that some sequence has, rising
    for sample in order.tolist():
        length = int(lengths[sample])
        # The smallest room that fits, by bisection: millions of samples rule a scan of all out.
        place = bisect_left(rooms, length)
        room = seq_len
        if place == len(rooms):
            sequence = len(members)
            members.append([])
        else:
            room = rooms[place]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room]
                rooms.pop(place)
        members[sequence].append(sample)
        left = room - length
        if left:
            if left not in by_room:
                insort(rooms, left)
                by_room[left] = []
            by_room[left].append(sequence)
    starts = np.cumsum([0, *map(len, members)], dtype=np.int64)
    samples = np.array([sample for sequence in members for sample in sequence], dtype=np.int64)
    return PackedSequences(seq_len=seq_len, samples=samples, starts=starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The sequences of a step: all of them, and the first of them that hold samples."""

    sequences: int
    filled: int

    def filled_in(self, rows: range) -> int:
        """Return how many of these rows of the step hold samples."""
        return max(0, min(self.filled, rows.stop) - rows.start)


def round_up_step(filled: int, multiple: int) -> StepSize:
    """Return the size of a step of whole micro-batches on every rank.

    Empty sequences fill up the last ones; `multiple` is mbs * dp.
    """
    return StepSize(sequences=-(-filled // multiple) * multiple, filled=filled)


def filled_share(lengths: Int64s, packs: PackedSequences) -> float:
    """Return the share of the positions of sequences that hold a sample's token."""
    return float(lengths.sum() / (packs.count * packs.seq_len))


def packed_share(lengths: Int64s, documents: Int64s, packs: PackedSequences) -> float:
    """Return the share of the token pairs of sequences that lie within a document or padding.

    `lengths` are those of samples, which the `documents` of these lengths make up.
    """
    # float64: sums of squared lengths over a large data set may pass the largest int64.
    filled = np.add.reduceat(lengths[packs.samples].astype(np.float64), packs.starts[:-1])
    pairs = np.square(documents.astype(np.float64)).sum()
    pairs += np.square(packs.seq_len - filled).sum()
    return float(pairs / (packs.count * packs.seq_len**2))
