"""In how many rows the engine takes a tensor that no kernel of its own takes whole: on a CPU as
many as stay in cache from one operation to the next, and of logits never so many that an fp32 copy
of all of them exists.
"""

from __future__ import annotations

CACHED_NUMEL = 1 << 17  # fp32 numbers that a core's cache has beside what is made of them
MAX_LOSS_ROWS = 512  # of logits, where the cache sets no bound
_FEWEST = 16  # rows that are worth a round of operations


def rows_per_block(width: int, numel: int) -> int:
    """Rows of `width` that hold about so many numbers."""
    return max(_FEWEST, numel // max(1, width))
