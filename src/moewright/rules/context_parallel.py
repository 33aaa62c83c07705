"""Context parallelism: which positions of every sequence a rank holds, and over which ranks
attention exchanges what.

A sequence is cut in 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r (zigzag): early chunks
attend little, late ones much, and the two together the same everywhere. All-to-all gives each rank
of its group all tokens of that group for a part of the heads; over a ring, or by one gather, keys
and values visit the queries of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import isqrt

from moewright.spec.layout import CpComm, Layout

_MOST_INSIDE = 8  # ranks of an all-to-all of the hierarchical variant


def rank_positions(seq_len: int, cp: int, rank: int) -> tuple[range, ...]:
    """Positions of a sequence on one CP rank, in the order in which it holds them; 2 cp must divide
    seq_len."""
    if cp == 1:
        return (range(seq_len),)
    size = seq_len // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp - 1 - rank))


def cp_factors(layout: Layout) -> tuple[int, int]:
    """Ranks that exchange heads all-to-all (neighbours), times ranks between which keys and values
    go, = cp.

    Of the hierarchical variant the first is the largest divisor not above the square root of cp,
    nor above 8: heads must divide by it, and all-to-all belongs inside a node. 1 when cp has none:
    rules.exclusions refuses that.
    """
    cp = layout.cp
    if layout.cp_comm is CpComm.A2A:
        return cp, 1
    if layout.cp_comm is CpComm.A2A_P2P:
        heads = next(n for n in range(min(isqrt(cp), _MOST_INSIDE), 0, -1) if cp % n == 0)
        return heads, cp // heads
    return 1, cp


def twice_attended_pairs(
    lengths: Iterable[int], seq_len: int, positions: Sequence[range], window: int = 0
) -> int:
    """Twice the causal pairs of the queries at the positions `parts` of every sequence with the
    keys of their own documents, whose `lengths` follow each other and none of which goes over the
    end of a sequence; with the last `window` of them where one is given.

    A query i places into its document attends i + 1 keys, its own half: the first n of them n^2 /
    2.
    """
    pairs = 0
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        first = start % seq_len
        for part in positions:
            low, high = max(part.start, first), min(part.stop, first + stop - start)
            if low < high:
                pairs += _first(high - first, window) - _first(low - first, window)
    return pairs


def _first(queries: int, window: int) -> int:
    """Twice the pairs of the first queries of a document."""
    if not window or queries <= window:
        return queries**2
    return window**2 + (queries - window) * (2 * window - 1)
