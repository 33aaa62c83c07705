"""Meetings of packed documents cover each pair of tokens that may attend, once, and no other."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.kernels.attention import Segments
from moewright.engine.model.attention_blocks import AttentionBlock, BlockPlanner
from moewright.rules.context_parallel import rank_positions, twice_attended_pairs

LENGTH = 16
Cuts = list[set[int]]  # of each row the places where another document starts


def build_segments(cuts: Cuts) -> Segments:
    lengths = [stop - start for row in cuts for start, stop in pairwise(sorted({0, LENGTH} | row))]
    return Segments(
        lengths=tuple(lengths),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    )


def list_pairs(
    met: tuple[AttentionBlock, ...], mine: list[int], theirs: list[int]
) -> list[tuple[int, int]]:
    """Positions of every query and key that meet; those of both sides by place."""
    return [pair for meeting in met for pair in list_block_pairs(meeting, mine, theirs)]


def list_block_pairs(
    meeting: AttentionBlock, mine: list[int], theirs: list[int]
) -> list[tuple[int, int]]:
    queries = [mine[place] for part in meeting.queries for place in part]
    keys = [theirs[place] for part in meeting.keys for place in part]
    of_queries = (
        meeting.query_segments.slices if meeting.query_segments else [slice(0, len(queries))]
    )
    of_keys = (
        meeting.key_segments.slices
        if meeting.key_segments
        else meeting.query_segments.slices
        if meeting.query_segments
        else [slice(0, len(keys))]
    )
    found = []
    for asking, asked in zip(of_queries, of_keys, strict=True):
        some, shift = keys[asked], len(keys[asked]) - len(queries[asking])
        for place, query in enumerate(queries[asking]):
            start = max(0, place + shift + 1 - meeting.window) if meeting.window else 0
            seen = some[start : place + 1 if meeting.causal else None]
            assert seen  # a kernel gives a query without keys a log-sum of its own
            found += [(query, key) for key in seen]
    return found


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.sets(st.integers(1, LENGTH - 1)), min_size=1, max_size=3),
    ranks=st.sampled_from([2, 4, 8]),
    gathers=st.booleans(),
    window=st.integers(0, LENGTH),
)
def test_documents_meet_themselves_and_nothing_else(
    cuts: Cuts, ranks: int, gathers: bool, window: int
) -> None:
    """Of one row without a cut, and with a window, rows are alike."""
    runs, found = build_segments(cuts), []
    bounds = None if window and cuts == [set()] else runs
    count = 0
    local = [
        [
            row * LENGTH + at
            for row in range(len(cuts))
            for part in rank_positions(LENGTH, ranks, rank)
            for at in part
        ]
        for rank in range(ranks)
    ]
    size = LENGTH // ranks
    together = [
        at for row in range(len(cuts)) for one in local for at in one[row * size : (row + 1) * size]
    ]
    for here in range(ranks):
        host = BlockPlanner(
            seq_len=LENGTH,
            cp=ranks,
            rank=here,
            gathered_ranks=ranks if gathers else 1,
            segments=bounds,
            window=window,
        )
        before = len(found)
        if gathers:
            met = (
                *host.own_blocks(),
                *host.blocks_from(range(here)),
                *host.blocks_from(range(here + 1, ranks)),
            )
            found += list_pairs(met, local[here], together)
        else:
            found += list_pairs(host.own_blocks(), local[here], local[here])
            for source in range(ranks):
                if source != here:
                    found += list_pairs(
                        host.blocks_from(range(source, source + 1)), local[here], local[source]
                    )
        # Twice the pairs, of a token with itself a half: what a causal kernel is said to do.
        own = sum(query == key for query, key in found[before:])
        assert (
            twice_attended_pairs(runs.lengths, LENGTH, rank_positions(LENGTH, ranks, here), window)
            == 2 * (len(found) - before) - own
        )
        count += own
    wanted = [
        (query, key)
        for start, stop in pairwise(accumulate(runs.lengths, initial=0))
        for query in range(start, stop)
        for key in range(max(start, query + 1 - window) if window else start, query + 1)
    ]
    assert sorted(found) == sorted(wanted)
    assert count == LENGTH * len(cuts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_sequences_meet_in_slices(ranks: int) -> None:
    """Without documents every block is met as one piece of itself: keys that come by are not
    copied."""
    for here in range(ranks):
        host = BlockPlanner(seq_len=LENGTH, cp=ranks, rank=here, gathered_ranks=1, segments=None)
        for source in range(ranks):
            (meeting,) = (
                host.own_blocks() if source == here else host.blocks_from(range(source, source + 1))
            )
            assert (len(meeting.queries), len(meeting.keys), meeting.query_segments) == (1, 1, None)
