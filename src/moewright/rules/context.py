"""Context parallelism: which positions of every sequence a rank holds, and over which ranks attention exchanges what.

A sequence is cut in 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r (zigzag): early chunks attend little, late
ones much, and the two together the same everywhere. All-to-all gives each rank of its group all tokens of that group
for a part of the heads; over a ring, or by one gather, keys and values visit the queries of other ranks.
"""

from __future__ import annotations


def held(seq_len: int, cp: int, rank: int) -> tuple[range, ...]:
    """Positions of a sequence on one CP rank, in the order in which it holds them; 2 cp must divide seq_len."""
    if cp == 1:
        return (range(seq_len),)
    size = seq_len // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp - 1 - rank))
