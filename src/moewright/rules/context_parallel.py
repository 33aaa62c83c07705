"""Context parallelism: the positions that a rank holds, and its partners in attention exchanges.

A sequence is cut in 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r (zigzag): early chunks
attend few keys, late ones many, and the two together attend the same number on every rank. An
all-to-all gives each rank of its group all tokens of that group for a part of the heads; a ring or
an all-gather brings keys and values to the queries of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import isqrt

from moewright.spec.layout import CpComm, Layout

_MAX_A2A_RANKS = 8  # of the all-to-all of the hierarchical variant


def rank_positions(seq_len: int, cp: int, rank: int) -> tuple[range, ...]:
    """Return the positions of a sequence on one CP rank, in the order in which it holds them.

    2 cp must divide `seq_len`.
    """
    if cp == 1:
        return (range(seq_len),)
    size = seq_len // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp - 1 - rank))


def cp_factors(layout: Layout) -> tuple[int, int]:
    """Return the two factors of cp: ranks that exchange heads, and ranks that exchange keys.

    The first are neighbours that exchange heads all-to-all; between the second, keys and values
    travel. In the hierarchical variant the first is the largest divisor that is neither above the
    square root of cp nor above 8, because heads must divide by it and an all-to-all belongs inside
    a node. It is 1 where cp has no such divisor, which rules.limits.compatibility refuses.
    """
    cp = layout.cp
    if layout.cp_comm is CpComm.A2A:
        return cp, 1
    if layout.cp_comm is CpComm.A2A_P2P:
        largest = min(isqrt(cp), _MAX_A2A_RANKS)
        a2a_ranks = next(n for n in range(largest, 0, -1) if cp % n == 0)
        return a2a_ranks, cp // a2a_ranks
    return 1, cp


def twice_attended_pairs(
    lengths: Iterable[int], seq_len: int, positions: Sequence[range], window: int = 0
) -> int:
    """Return twice the causal pairs of queries and keys of the same document.

    The queries are at `positions` of every sequence. Documents of the given `lengths` follow each
    other, and none crosses the end of a sequence. With a `window`, a query attends at most so many
    latest keys.

    The query i places into its document attends i + 1 keys, of which its own counts half: the first
    n queries attend n^2 / 2.
    """
    pairs = 0
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        # No document crosses the end of its sequence: its start there tells all its positions.
        first = start % seq_len
        for part in positions:
            low = max(part.start, first)
            high = min(part.stop, first + stop - start)
            if low < high:
                pairs += _twice_first_pairs(high - first, window)
                pairs -= _twice_first_pairs(low - first, window)
    return pairs


def split_at_chunks(
    lengths: Iterable[int], seq_len: int, chunk: int, *, restarts: bool
) -> tuple[int, ...]:
    """Split documents where a chunk of attention ends, and return the lengths of the parts.

    Chunks count from the beginning of a document where its positions `restarts` there, else from
    that of the sequence. Documents follow each other, and none crosses the end of a sequence.
    """
    parts = []
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        origin = start if restarts else start - start % seq_len
        first_cut = start + chunk - (start - origin) % chunk
        edges = (start, *range(first_cut, stop, chunk), stop)
        parts += [end - begin for begin, end in pairwise(edges)]
    return tuple(parts)


def _twice_first_pairs(queries: int, window: int) -> int:
    """Return twice the pairs of the first queries of a document."""
    if not window or queries <= window:
        return queries**2
    # Twice `window` keys for each query behind the window, whose own key counts half.
    return window**2 + (queries - window) * (2 * window - 1)
