"""Sliding windows in attention on a CPU, whose kernel takes a mask: a band of pairs is worked on in
blocks of queries.

The last query and the last key given are of one place, so query i attends the keys from i + K - Q -
window + 1 on, and causally none after i + K - Q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_LEAST_QUERIES = 128  # of a block: fewer would leave the kernel little to do


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBlock:
    """Some queries, the keys that they may attend, and which: causally key j of query i where low
    <= j - i <= high."""

    queries: slice
    keys: slice
    low: int
    high: int

    def build_mask(self, like: torch.Tensor) -> torch.Tensor:
        """What is added to scores: 0, or -inf. `twice_pairs` tells whoever counts the FLOPs, who
        may see no values."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        ones = like.new_ones(rows, columns, dtype=torch.bool)
        hidden = ones.triu(self.high + 1) | ones.tril(self.low - 1)
        mask = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        mask.twice_pairs = self._twice_pairs(rows, columns)  # type: ignore[attr-defined]
        return mask

    def _twice_pairs(self, rows: int, columns: int) -> int:
        """A query's own key is a half, as in rules.context; it is among the keys where there are
        none after it."""
        seen = sum(
            min(columns, row + self.high + 1) - max(0, row + self.low) for row in range(rows)
        )
        own = rows if self.high < columns else 0
        return 2 * seen - own


def window_blocks(queries: int, keys: int, window: int, *, causal: bool) -> Iterator[WindowBlock]:
    """Of some queries with some keys, of which every query attends one at least."""
    step, shift = max(window, _LEAST_QUERIES), keys - queries
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = max(0, start + shift - window + 1)
        last = stop + shift if causal else keys
        moved = start + shift - first  # between a query's place in the block and its own key's
        yield WindowBlock(
            queries=slice(start, stop),
            keys=slice(first, last),
            low=moved - window + 1,
            high=moved if causal else last - first,
        )
