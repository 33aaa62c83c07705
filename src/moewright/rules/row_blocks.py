"""The number of token rows that the engine processes at a time where it has no fused kernel.

On a CPU a block has as many rows as stay in cache from one operation to the next. A block of logits
is bounded everywhere, so that no fp32 copy of all logits ever exists.
"""

from __future__ import annotations

CACHED_NUMEL = 1 << 17  # fp32 numbers that a core's cache holds together with their results
MAX_LOSS_ROWS = 512  # rows of logits in a block where the cache sets no bound
_MIN_ROWS = 16  # for fewer rows the launches of a block outweigh its work


def rows_per_block(width: int, numel: int) -> int:
    """Return how many rows of `width` numbers hold about `numel` numbers."""
    return max(_MIN_ROWS, numel // max(1, width))
