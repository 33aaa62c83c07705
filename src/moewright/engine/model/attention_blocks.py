"""The plan of which queries of a rank attend which keys, its own and those of other ranks.

Sequences are split over ranks as rules.context_parallel says: each rank holds an early chunk and a
late one, and every early chunk comes before every late one. So the queries of both chunks attend
the early keys of lower ranks and none of their late ones; the keys of higher ranks, early and late,
are attended by the late chunk alone. Where documents bound attention, only the document on the
border of those keys and queries counts: its part of the keys, the last ones, is attended by its
part of the queries, the first ones. So in every block, except that of a rank's own tokens, all
queries of a segment attend all of its keys, without a causal mask.

Under a sliding window there is a block for each pair of a chunk of queries and an earlier chunk of
keys, cut down to the tokens that the window reaches.

A position is the index of a token in its sequence. A place is its index on a rank, which holds its
part of each sequence, row after row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from moewright.engine.kernels.attention import (
    AttentionMask,
    AttentionState,
    LinearBias,
    Segments,
    attention,
    attention_backward,
    build_segments,
)
from moewright.rules.context_parallel import rank_positions

Ranges = tuple[range, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Queries and the keys that they attend, both as ranges of places.

    Only a block of a rank's own tokens is causal. Where documents bound attention, all rows lie in
    one (`pack_rows`), and the mask has the segments of these queries and, unless they are the same,
    of these keys. Without documents the ranges are of one row, and all rows are attended at once.
    """

    queries: Ranges
    keys: Ranges
    mask: AttentionMask
    key_positions: torch.Tensor | None = None  # int64 [keys], where a bias needs them

    def with_slopes(self, slopes: torch.Tensor) -> AttentionBlock:
        """Return the block with a bias of scores that falls by `slopes` [H] with distance."""
        assert self.key_positions is not None  # planned for a model with such biases
        bias = LinearBias(slopes=slopes, positions=self.key_positions)
        return replace(self, mask=replace(self.mask, bias=bias))

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, AttentionState]:
        """Attend the block; `q` has all queries, `kv` all keys with their values side by side."""
        k, v = _split_kv(take_ranges(kv, self.keys), q)
        return attention(take_ranges(q, self.queries), k, v, self.mask)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        state: AttentionState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the block's queries, and of its keys and values side by side."""
        lse, *random_state = state
        grad, q, out = (take_ranges(x, self.queries) for x in (grad, q, out))
        k, v = _split_kv(take_ranges(kv, self.keys), q)
        block_state = (take_ranges(lse, self.queries, 2).contiguous(), *random_state)
        grad_q, *grad_kv = attention_backward(grad, q, k, v, out, block_state, self.mask)
        return grad_q, torch.cat(grad_kv, -1)


# The blocks with the keys of each source, the rank's own tokens first; () where none is attended.
BlocksBySource = tuple[tuple[AttentionBlock, ...], ...]


def pack_rows(x: torch.Tensor, blocks: BlocksBySource) -> torch.Tensor:
    """Lay all rows in one where documents bound attention: [B,S,...] -> [1,B*S,...]."""
    # The block of the rank's own tokens is always there, and all have segments or none has.
    if blocks[0][0].mask.segments is None:
        return x
    return x.flatten(0, 1)[None]


def _split_kv(kv: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split keys, as wide as queries, from values."""
    return kv.split((q.shape[-1], kv.shape[-1] - q.shape[-1]), -1)


def take_ranges(x: torch.Tensor, ranges: Ranges, dim: int = 1) -> torch.Tensor:
    """Return the tensor at some ranges of a dim."""
    parts = [x.narrow(dim, places.start, len(places)) for places in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


def add_at(sums: torch.Tensor, ranges: Ranges, values: torch.Tensor) -> None:
    """Add `values` to `sums` at some ranges of dim 1."""
    parts = values.split([len(places) for places in ranges], 1)
    for places, part in zip(ranges, parts, strict=True):
        sums.narrow(1, places.start, len(places)).add_(part)


def write_at(x: torch.Tensor, ranges: Ranges, values: torch.Tensor, dim: int = 1) -> None:
    """Write `values` into `x` at some ranges of a dim."""
    parts = values.split([len(places) for places in ranges], dim)
    for places, part in zip(ranges, parts, strict=True):
        x.narrow(dim, places.start, len(places)).copy_(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """A chunk of a rank's tokens of one row: its positions, and the place where it begins."""

    place: int
    positions: range

    def find_places(self, positions: range) -> range:
        """Return the places of some of its positions."""
        offset = self.place - self.positions.start
        return range(positions.start + offset, positions.stop + offset)


class BlockPlanner:
    """A planner of the attention blocks of one rank over one micro-batch.

    `segments` are its documents, None where they do not bound attention. `gathered_ranks` is the
    number of ranks whose keys are here at one time, one rank after the other in each row. `window`
    is 0 where every earlier key is attended. Blocks have the positions of their keys where `device`
    says where these are needed.
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
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._seq_len = seq_len
        self._rank = rank
        self._gathered_ranks = gathered_ranks
        self._segments = segments
        self._window = window
        self._positions = [rank_positions(seq_len, cp, other) for other in range(cp)]
        self._rank_length = seq_len // cp
        self._bounds: tuple[int, ...] = (0, seq_len)
        if segments is not None:
            self._bounds = tuple(accumulate(segments.lengths, initial=0))
        self._rows = range(self._bounds[-1] // seq_len)

    def own_blocks(self) -> tuple[AttentionBlock, ...]:
        """Plan the blocks of the rank's own tokens."""
        own = range(self._rank, self._rank + 1)
        return tuple(self._add_positions(block, own) for block in self._plan_own_blocks())

    def _plan_own_blocks(self) -> tuple[AttentionBlock, ...]:
        if not self._window:
            return (self._plan_own_block(),)
        near = tuple(self._plan_window_blocks(range(self._rank, self._rank + 1)))
        if self._segments is not None:
            return self._plan_own_block(), *near
        mask = AttentionMask(causal=True, window=self._window)
        chunks = zip(
            self._query_chunks(0),
            self._key_chunks(0, range(self._rank, self._rank + 1)),
            strict=True,
        )
        diagonal = [
            AttentionBlock(
                queries=(queries.find_places(queries.positions),),
                keys=(keys.find_places(keys.positions),),
                mask=mask,
            )
            for queries, keys in chunks
        ]
        return *diagonal, *near

    def blocks_from(self, sources: range) -> tuple[AttentionBlock, ...]:
        """Plan the blocks with the keys of `sources`, all lower ranks or all higher ones."""
        blocks: Iterable[AttentionBlock | None] = [self._plan_block_from(sources)]
        if self._window:
            blocks = self._plan_window_blocks(sources)
        return tuple(self._add_positions(block, sources) for block in blocks if block is not None)

    def _add_positions(self, block: AttentionBlock, sources: range) -> AttentionBlock:
        """Return the block with the positions of its keys, where they are needed."""
        if self._device is None:
            return block
        positions: dict[int, int] = {}  # by place
        for row in self._rows:
            for chunk in self._key_chunks(row, sources):
                places = chunk.find_places(chunk.positions)
                positions.update(zip(places, chunk.positions, strict=True))
        of_keys = [positions[place] for places in block.keys for place in places]
        return replace(block, key_positions=torch.tensor(of_keys, device=self._device))

    def _plan_window_blocks(self, sources: range) -> Iterator[AttentionBlock]:
        """Plan a block of each chunk of queries with each earlier chunk of keys.

        A pair of chunks has none where the window, inside a document, does not reach the keys.
        """
        for row in self._rows:
            key_chunks = list(self._key_chunks(row, sources))
            for queries in self._query_chunks(row):
                document = self._document_at(row, queries.positions.start)
                for keys in key_chunks:
                    block = self._plan_window_block(queries, keys, document)
                    if block is not None:
                        yield block

    def _plan_window_block(
        self, queries: _Chunk, keys: _Chunk, document: range
    ) -> AttentionBlock | None:
        """Plan the block of two chunks; None where no query attends a key.

        `document` has the positions of the first query's document.
        """
        first_query = queries.positions.start
        keys_end = keys.positions.stop
        # `queries_end` follows the last query whose window reaches the last key; `first_key` is the
        # first key that the first query's window reaches.
        queries_end = min(queries.positions.stop, document.stop, keys_end - 1 + self._window)
        first_key = max(keys.positions.start, document.start, first_query - self._window + 1)
        # All keys come before all queries, a query reaches the last key, and a key is reached.
        if not (keys_end <= first_query < queries_end and first_key < keys_end):
            return None
        return AttentionBlock(
            queries=(queries.find_places(range(first_query, queries_end)),),
            keys=(keys.find_places(range(first_key, keys_end)),),
            mask=AttentionMask(causal=False, window=self._window - (queries_end - keys_end)),
        )

    def _document_at(self, row: int, position: int) -> range:
        """Return the positions of the document that contains a position of a row."""
        offset = row * self._seq_len
        index = bisect_right(self._bounds, offset + position)
        return range(self._bounds[index - 1] - offset, self._bounds[index] - offset)

    def _query_chunks(self, row: int) -> Iterator[_Chunk]:
        return self._rank_chunks(self._rank, row * self._rank_length)

    def _key_chunks(self, row: int, sources: range) -> Iterator[_Chunk]:
        for source in sources:
            yield from self._rank_chunks(source, self._key_place(row, source, sources))

    def _key_place(self, row: int, source: int, sources: range) -> int:
        """Return the place where the keys of a source begin in a row."""
        block = source if self._gathered_ranks > 1 else source - sources.start
        return (row * self._gathered_ranks + block) * self._rank_length

    def _rank_chunks(self, rank: int, place: int) -> Iterator[_Chunk]:
        """Yield a rank's chunks of a row, which lie from `place` on."""
        for positions in self._positions[rank]:
            yield _Chunk(place=place, positions=positions)
            place += len(positions)

    def _plan_own_block(self) -> AttentionBlock:
        own = range(self._rank, self._rank + 1)
        key_places = (self._key_place(row, self._rank, own) for row in self._rows)
        return AttentionBlock(
            queries=(range(len(self._rows) * self._rank_length),),
            keys=_join_ranges(range(place, place + self._rank_length) for place in key_places),
            mask=AttentionMask(
                causal=True, window=self._window, segments=self._cut(self._own_lengths())
            ),
        )

    def _own_lengths(self) -> list[int]:
        """Return the lengths of the segments of the rank's own tokens."""
        lengths: list[int] = []
        last_document = 0  # documents count from 1
        for row in self._rows:
            for positions in self._positions[self._rank]:
                for document, length in self._split_at_documents(row, positions):
                    # The late chunk continues the early one's document.
                    if document == last_document and not self._window:
                        lengths[-1] += length
                    else:
                        lengths.append(length)
                    last_document = document
        return lengths

    def _split_at_documents(self, row: int, positions: range) -> Iterator[tuple[int, int]]:
        """Yield the number of each document among some positions of a row, and its length there."""
        start = row * self._seq_len + positions.start
        stop = row * self._seq_len + positions.stop
        document = bisect_right(self._bounds, start)
        while start < stop:
            end = min(self._bounds[document], stop)
            yield document, end - start
            start = end
            document += 1

    def _plan_block_from(self, sources: range) -> AttentionBlock | None:
        """Plan the one block with the keys of `sources`; None where no query attends any."""
        if not sources:
            return None
        queries: list[range] = []
        keys: list[range] = []
        query_lengths: list[int] = []
        key_lengths: list[int] = []
        is_late = sources[0] > self._rank  # only the late chunk attends higher ranks
        first_query = self._positions[self._rank][is_late].start
        for row in self._rows:
            document = self._document_at(row, first_query)
            row_keys = _places_between(self._key_chunks(row, sources), document.start, first_query)
            if not row_keys:
                continue
            row_queries = _places_between(self._query_chunks(row), first_query, document.stop)
            queries += row_queries
            keys += row_keys
            query_lengths.append(sum(map(len, row_queries)))
            key_lengths.append(sum(map(len, row_keys)))
        if not keys:
            return None
        mask = AttentionMask(
            causal=False, segments=self._cut(query_lengths), key_segments=self._cut(key_lengths)
        )
        return AttentionBlock(queries=_join_ranges(queries), keys=_join_ranges(keys), mask=mask)

    def _cut(self, lengths: Sequence[int]) -> Segments | None:
        """Return segments of these lengths, None where documents do not bound attention."""
        if self._segments is None:
            return None
        return build_segments(lengths, self._segments.cu_seqlens.device)


def _places_between(chunks: Iterable[_Chunk], low: int, high: int) -> list[range]:
    """Return the places of those positions of the chunks that are in [low, high)."""
    places: list[range] = []
    for chunk in chunks:
        start = max(chunk.positions.start, low)
        stop = min(chunk.positions.stop, high)
        if start < stop:
            places.append(chunk.find_places(range(start, stop)))
    return places


def _join_ranges(ranges: Iterable[range]) -> Ranges:
    """Return the same places in fewer ranges where one follows another at once."""
    joined: list[range] = []
    for places in ranges:
        if joined and joined[-1].stop == places.start:
            joined[-1] = range(joined[-1].start, places.stop)
        else:
            joined.append(places)
    return tuple(joined)
