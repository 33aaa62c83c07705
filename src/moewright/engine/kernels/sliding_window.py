"""Sliding windows in attention on a CPU, whose kernel takes a mask.

The band of attended pairs is computed in blocks of queries. The last query and the last key given
are of one position, so query i attends the keys from i + K - Q - window + 1 on, and causally none
after i + K - Q, where Q and K count the queries and the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MIN_QUERIES = 128  # of a block: fewer would leave the kernel little to do


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBlock:
    """A slice of queries and the slice of keys they may attend.

    Query i attends key j where low <= j - i <= high.
    """

    queries: slice
    keys: slice
    low: int
    high: int

    def build_mask(self, like: torch.Tensor) -> torch.Tensor:
        """Build what is added to the scores: 0, or -inf where a query does not attend a key.

        Its attribute `twice_pairs` tells the FLOP counter the number of attended pairs, which it
        may not be able to read from the values.
        """
        rows = self.queries.stop - self.queries.start
        columns = self.keys.stop - self.keys.start
        ones = like.new_ones(rows, columns, dtype=torch.bool)
        hidden = ones.triu(self.high + 1) | ones.tril(self.low - 1)
        mask = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        mask.twice_pairs = self._count_twice_pairs(rows, columns)  # type: ignore[attr-defined]
        return mask

    def _count_twice_pairs(self, rows: int, columns: int) -> int:
        """Return twice the attended pairs; a query's own key is a half (rules.context_parallel).

        A query's own key is among its keys where the mask hides the keys after it.
        """
        attended = sum(
            min(columns, row + self.high + 1) - max(0, row + self.low) for row in range(rows)
        )
        own = rows if self.high < columns else 0
        return 2 * attended - own


def window_blocks(queries: int, keys: int, window: int, *, causal: bool) -> Iterator[WindowBlock]:
    """Yield the blocks of `queries` queries over `keys` keys; every query attends at least one."""
    step = max(window, _MIN_QUERIES)
    shift = keys - queries
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = max(0, start + shift - window + 1)
        last = stop + shift if causal else keys
        own_key = start + shift - first  # the place of the first query's own key in the block
        yield WindowBlock(
            queries=slice(start, stop),
            keys=slice(first, last),
            low=own_key - window + 1,
            high=own_key if causal else last - first,
        )
