"""Which queries of a rank attend which keys of others, where sequences are cut over ranks
(rules.context).

The early chunk of a rank comes before every late one: queries of both chunks see the early keys of
lower ranks and none of their late ones; the late chunk alone sees the keys of higher ranks, all of
them. Where documents bound attention, of those queries the first ones meet of those keys the last
ones, as far as the document that both are of reaches. So every meeting but that of a rank's own
tokens is of all its queries with all its keys.

Under a sliding window each chunk of queries meets each chunk of keys apart, of both what is near
enough.

Places count tokens as they lie on a rank: its part of each sequence, row after row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from moewright.engine.kernels.attention import (
    Segments,
    attention,
    attention_backward,
    varlen_attention,
    varlen_attention_backward,
)
from moewright.rules.context_parallel import rank_positions

Ranges = tuple[range, ...]
AttentionState = tuple[
    torch.Tensor, ...
]  # what backward needs beside the output: its log-sum, the random state of the device


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Queries and keys by their places; causal among a rank's own tokens alone.

    Where documents bound attention, all rows lie in one, and each of `runs` of these queries
    attends the one of the runs of these keys, `others`, that is in its place, or else itself.
    Without them rows are alike and meet at once. `window` as in engine.attention.
    """

    queries: Ranges
    keys: Ranges
    query_segments: Segments | None
    key_segments: Segments | None
    causal: bool
    window: int = 0

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, AttentionState]:
        """engine.attention, of those of all queries and of all keys beside their values that
        meet."""
        k, v = _apart(take_ranges(kv, self.keys), q)
        if self.query_segments is None:
            return attention(
                take_ranges(q, self.queries), k, v, causal=self.causal, window=self.window
            )
        return varlen_attention(
            take_ranges(q, self.queries),
            k,
            v,
            self.query_segments,
            self.key_segments,
            window=self.window,
        )

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        random: AttentionState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the queries, and of the keys beside their values, that meet."""
        grad, q, out = (take_ranges(x, self.queries) for x in (grad, q, out))
        k, v = _apart(take_ranges(kv, self.keys), q)
        rest = (take_ranges(lse, self.queries, 2).contiguous(), *random)
        if self.query_segments is None:
            grad_q, *grad_kv = attention_backward(
                grad, q, k, v, out, rest, causal=self.causal, window=self.window
            )
        else:
            runs, others = self.query_segments, self.key_segments
            grad_q, *grad_kv = varlen_attention_backward(
                grad, q, k, v, out, rest, runs, others, window=self.window
            )
        return grad_q, torch.cat(grad_kv, -1)


BlocksBySource = tuple[
    tuple[AttentionBlock, ...], ...
]  # with each block of keys, the own one first; () where none of it is met


def pack_rows(x: torch.Tensor, met: BlocksBySource) -> torch.Tensor:
    """All rows in one where documents bound attention: [B,S,...] -> [1,B*S,...]."""
    return x if met[0][0].query_segments is None else x.flatten(0, 1)[None]


def _apart(kv: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys, as wide as queries, and values."""
    return kv.split((q.shape[-1], kv.shape[-1] - q.shape[-1]), -1)


def take_ranges(x: torch.Tensor, places: Ranges, dim: int = 1) -> torch.Tensor:
    """The tensor at some places of a dim."""
    parts = [x.narrow(dim, one.start, len(one)) for one in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def add_at(sums: torch.Tensor, places: Ranges, part: torch.Tensor) -> None:
    """Add `part` to `sums` at places of dim 1."""
    for one, more in zip(places, part.split([len(one) for one in places], 1), strict=True):
        sums.narrow(1, one.start, len(one)).add_(more)


def write_at(x: torch.Tensor, places: Ranges, part: torch.Tensor, dim: int = 1) -> None:
    """Write `part` into `x` at places of a dim."""
    for one, more in zip(places, part.split([len(one) for one in places], dim), strict=True):
        x.narrow(dim, one.start, len(one)).copy_(more)


class BlockPlanner:
    """Makes the meetings of rank `here` of `ranks` over one micro-batch of sequences of `length`.

    `runs` are those of its documents, None where they do not bound attention. `together`: how many
    ranks' keys are here at one time, one block beside the other in each row. `window`: 0 where
    every earlier key is attended.
    """

    def __init__(
        self,
        *,
        seq_len: int,
        cp: int,
        rank: int,
        gathered_ranks: int,
        segments: Segments | None,
        window: int = 0,
    ) -> None:
        self._held = [rank_positions(seq_len, cp, rank) for rank in range(cp)]
        self._here, self._together, self._length, self._runs = (
            rank,
            gathered_ranks,
            seq_len,
            segments,
        )
        self._size, self._window = seq_len // cp, window
        self._bounds = (
            (0, seq_len) if segments is None else tuple(accumulate(segments.lengths, initial=0))
        )
        self._rows = range(self._bounds[-1] // seq_len)

    def own_blocks(self) -> tuple[AttentionBlock, ...]:
        """Of the rank's own tokens."""
        if not self._window:
            return (self._own(),)
        if self._runs is not None:
            return self._own(), *self._near(range(self._here, self._here + 1))
        starts = accumulate(map(len, self._held[self._here]), initial=0)
        block = self._here * self._size if self._together > 1 else 0
        chunks = [
            AttentionBlock(
                queries=(range(start, start + len(part)),),
                keys=(range(block + start, block + start + len(part)),),
                query_segments=None,
                key_segments=None,
                causal=True,
                window=self._window,
            )
            for start, part in zip(starts, self._held[self._here], strict=False)
        ]
        return *chunks, *self._near(range(self._here, self._here + 1))

    def blocks_from(self, sources: range) -> tuple[AttentionBlock, ...]:
        """With the tokens of `sources`, all lower ranks or all higher ones."""
        if self._window:
            return tuple(self._near(sources))
        whole = self._others(sources)
        return () if whole is None else (whole,)

    def _near(self, sources: range) -> Iterator[AttentionBlock]:
        """A chunk of queries with an earlier chunk of keys each, where the window reaches over,
        inside a document."""
        for row in self._rows if self._runs is not None else range(1):
            for asking, first, mine in self._chunks(self._here, row * self._size):
                place = bisect_right(self._bounds, row * self._length + first)
                low, high = (
                    bound - row * self._length for bound in self._bounds[place - 1 : place + 1]
                )
                for block, source in enumerate(sources, sources.start if self._together > 1 else 0):
                    for asked, start, theirs in self._chunks(
                        source, (row * self._together + block) * self._size
                    ):
                        end = start + len(theirs)
                        stop = min(first + len(mine), high, end - 1 + self._window)
                        begin = max(start, low, first - self._window + 1)
                        if end <= first < stop and begin < end:
                            yield AttentionBlock(
                                queries=(range(asking, asking + stop - first),),
                                keys=(range(asked + begin - start, asked + end - start),),
                                query_segments=None,
                                key_segments=None,
                                causal=False,
                                window=self._window - (stop - end),
                            )

    def _chunks(self, rank: int, place: int) -> Iterator[tuple[int, int, range]]:
        """Of a rank's chunks, which lie from `place` on, the place, the first position and all
        positions."""
        for part in self._held[rank]:
            yield place, part.start, part
            place += len(part)

    def _own(self) -> AttentionBlock:
        lengths, last = list[int](), 0
        for row in self._rows:
            for part in self._held[self._here]:
                start, stop = (row * self._length + at for at in (part.start, part.stop))
                place = bisect_right(self._bounds, start)
                while start < stop:
                    end = min(self._bounds[place], stop)
                    if (
                        place == last and not self._window
                    ):  # the late chunk goes on with the early one's document
                        lengths[-1] += end - start
                    else:
                        lengths.append(end - start)
                    start, place, last = end, place + 1, place
        block = self._here if self._together > 1 else 0
        starts = ((row * self._together + block) * self._size for row in self._rows)
        return AttentionBlock(
            queries=(range(len(self._rows) * self._size),),
            keys=_joined(range(start, start + self._size) for start in starts),
            query_segments=self._cut(lengths),
            key_segments=None,
            causal=True,
            window=self._window,
        )

    def _others(self, sources: range) -> AttentionBlock | None:
        """None where no query meets any of them."""
        queries, keys, asking, asked = list[range](), list[range](), list[int](), list[int]()
        for row in self._rows if sources else ():
            mine = self._held[self._here]
            first = mine[sources[0] > self._here].start
            place = bisect_right(self._bounds, row * self._length + first)
            start, stop = (
                bound - row * self._length for bound in self._bounds[place - 1 : place + 1]
            )
            seen = [
                range(at.start + offset, at.stop + offset)
                for block, source in enumerate(sources, sources[0] if self._together > 1 else 0)
                for offset in ((row * self._together + block) * self._size,)
                for at in _within(self._held[source], start, first)
            ]
            if not seen:
                continue
            ours = [
                range(at.start + row * self._size, at.stop + row * self._size)
                for at in _within(mine, first, stop)
            ]
            queries, keys = queries + ours, keys + seen
            asking.append(sum(map(len, ours)))
            asked.append(sum(map(len, seen)))
        if not keys:
            return None
        runs, others = self._cut(asking), self._cut(asked)
        return AttentionBlock(
            queries=_joined(queries),
            keys=_joined(keys),
            query_segments=runs,
            key_segments=others,
            causal=False,
        )

    def _cut(self, lengths: Sequence[int]) -> Segments | None:
        if self._runs is None:
            return None
        starts = torch.tensor(
            [0, *accumulate(lengths)], dtype=torch.int32, device=self._runs.cu_seqlens.device
        )
        return Segments(lengths=tuple(lengths), cu_seqlens=starts)


def _within(parts: Iterable[range], low: int, high: int) -> list[range]:
    """Places on a rank of the positions in [low, high), of those in `parts`."""
    found, offset = list[range](), 0
    for part in parts:
        start, stop = max(part.start, low), min(part.stop, high)
        if start < stop:
            found.append(range(offset + start - part.start, offset + stop - part.start))
        offset += len(part)
    return found


def _joined(places: Iterable[range]) -> Ranges:
    """The same places in fewer ranges where one follows another at once."""
    found: list[range] = []
    for one in places:
        if found and found[-1].stop == one.start:
            found[-1] = range(found[-1].start, one.stop)
        else:
            found.append(one)
    return tuple(found)
