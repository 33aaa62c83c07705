"""The attention blocks of packed documents cover each attended pair once.

They cover no other pair.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.kernels.attention import Segments
from moewright.engine.model.attention_blocks import AttentionBlock, BlockPlanner
from moewright.rules.context_parallel import rank_positions, twice_attended_pairs

SEQ_LEN = 16
Pairs = list[tuple[int, int]]
DocumentStarts = list[set[int]]  # the positions of each row where another document starts


def build_segments(starts: DocumentStarts) -> Segments:
    lengths = [
        stop - start for row in starts for start, stop in pairwise(sorted({0, SEQ_LEN} | row))
    ]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Segments(lengths=tuple(lengths), cu_seqlens=cu_seqlens)


def list_pairs(
    blocks: tuple[AttentionBlock, ...], query_positions: list[int], key_positions: list[int]
) -> Pairs:
    """List the positions of every query and key that attend; those of both sides by place."""
    return [
        pair for block in blocks for pair in list_block_pairs(block, query_positions, key_positions)
    ]


def list_block_pairs(
    block: AttentionBlock, query_positions: list[int], key_positions: list[int]
) -> Pairs:
    mask = block.mask
    queries = [query_positions[place] for places in block.queries for place in places]
    keys = [key_positions[place] for places in block.keys for place in places]
    query_slices, key_slices = [slice(0, len(queries))], [slice(0, len(keys))]
    if mask.segments is not None:
        query_slices = list(mask.segments.slices)
        key_slices = list((mask.key_segments or mask.segments).slices)
    pairs = []
    for query_slice, key_slice in zip(query_slices, key_slices, strict=True):
        segment_queries, segment_keys = queries[query_slice], keys[key_slice]
        shift = len(segment_keys) - len(segment_queries)
        for index, query in enumerate(segment_queries):
            start = max(0, index + shift + 1 - mask.window) if mask.window else 0
            attended = segment_keys[start : index + 1 if mask.causal else None]
            assert attended  # a kernel gives a query without keys a log-sum-exp of its own
            pairs += [(query, key) for key in attended]
    return pairs


def plan_rank_pairs(
    planner: BlockPlanner, rank: int, local_positions: list[list[int]], gathered: list[int] | None
) -> Pairs:
    """List the pairs of one rank, whose keys travel, or are `gathered`."""
    cp = len(local_positions)
    own = local_positions[rank]
    if gathered is not None:
        lower, higher = (
            planner.blocks_from(sources) for sources in (range(rank), range(rank + 1, cp))
        )
        return list_pairs((*planner.own_blocks(), *lower, *higher), own, gathered)
    pairs = list_pairs(planner.own_blocks(), own, own)
    for source in range(cp):
        if source != rank:
            blocks = planner.blocks_from(range(source, source + 1))
            pairs += list_pairs(blocks, own, local_positions[source])
    return pairs


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.sets(st.integers(1, SEQ_LEN - 1)), min_size=1, max_size=3),
    cp=st.sampled_from([2, 4, 8]),
    gathers=st.booleans(),
    window=st.integers(0, SEQ_LEN),
)
def test_documents_meet_themselves_and_nothing_else(
    starts: DocumentStarts, cp: int, gathers: bool, window: int
) -> None:
    """One row without another document, under a window, is planned without segments."""
    segments = build_segments(starts)
    planned_segments = None if window and starts == [set()] else segments
    rows = range(len(starts))
    local_positions = [
        [
            row * SEQ_LEN + position
            for row in rows
            for positions in rank_positions(SEQ_LEN, cp, rank)
            for position in positions
        ]
        for rank in range(cp)
    ]
    length = SEQ_LEN // cp
    gathered = [
        position
        for row in rows
        for local in local_positions
        for position in local[row * length : (row + 1) * length]
    ]
    pairs: Pairs = []
    own_pairs = 0
    for rank in range(cp):
        planner = BlockPlanner(
            seq_len=SEQ_LEN,
            cp=cp,
            rank=rank,
            gathered_ranks=cp if gathers else 1,
            segments=planned_segments,
            window=window,
        )
        rank_pairs = plan_rank_pairs(planner, rank, local_positions, gathered if gathers else None)
        # Twice the pairs, of a token with itself a half: what a causal kernel is said to do.
        own = sum(query == key for query, key in rank_pairs)
        positions = rank_positions(SEQ_LEN, cp, rank)
        twice = twice_attended_pairs(segments.lengths, SEQ_LEN, positions, window)
        assert twice == 2 * len(rank_pairs) - own
        pairs += rank_pairs
        own_pairs += own
    expected = [
        (query, key)
        for start, stop in pairwise(accumulate(segments.lengths, initial=0))
        for query in range(start, stop)
        for key in range(max(start, query + 1 - window) if window else start, query + 1)
    ]
    assert sorted(pairs) == sorted(expected)
    assert own_pairs == SEQ_LEN * len(starts)


@pytest.mark.parametrize("cp", [2, 4])
def test_whole_sequences_meet_in_slices(cp: int) -> None:
    """Without documents every block is one slice: keys that come by are not copied."""
    for rank in range(cp):
        planner = BlockPlanner(seq_len=SEQ_LEN, cp=cp, rank=rank, gathered_ranks=1, segments=None)
        for source in range(cp):
            (block,) = (
                planner.own_blocks()
                if source == rank
                else planner.blocks_from(range(source, source + 1))
            )
            assert (len(block.queries), len(block.keys), block.mask.segments) == (1, 1, None)
