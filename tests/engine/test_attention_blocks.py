"""Meetings of packed documents cover each pair of tokens that may attend, once, and no other."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.kernels.attention import Runs
from moewright.engine.model.attention_blocks import Host, Meeting
from moewright.rules.context_parallel import attended, held

LENGTH = 16
Cuts = list[set[int]]  # of each row the places where another document starts


def runs_of(cuts: Cuts) -> Runs:
    lengths = [stop - start for row in cuts for start, stop in pairwise(sorted({0, LENGTH} | row))]
    return Runs(
        lengths=tuple(lengths), starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    )


def pairs(met: tuple[Meeting, ...], mine: list[int], theirs: list[int]) -> list[tuple[int, int]]:
    """Positions of every query and key that meet; those of both sides by place."""
    return [pair for meeting in met for pair in pairs_of(meeting, mine, theirs)]


def pairs_of(meeting: Meeting, mine: list[int], theirs: list[int]) -> list[tuple[int, int]]:
    queries = [mine[place] for part in meeting.queries for place in part]
    keys = [theirs[place] for part in meeting.keys for place in part]
    of_queries = meeting.runs.slices if meeting.runs else [slice(0, len(queries))]
    of_keys = (
        meeting.others.slices
        if meeting.others
        else meeting.runs.slices
        if meeting.runs
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
    runs, found = runs_of(cuts), []
    bounds = None if window and cuts == [set()] else runs
    count = 0
    local = [
        [
            row * LENGTH + at
            for row in range(len(cuts))
            for part in held(LENGTH, ranks, rank)
            for at in part
        ]
        for rank in range(ranks)
    ]
    size = LENGTH // ranks
    together = [
        at for row in range(len(cuts)) for one in local for at in one[row * size : (row + 1) * size]
    ]
    for here in range(ranks):
        host = Host(
            length=LENGTH,
            ranks=ranks,
            here=here,
            together=ranks if gathers else 1,
            runs=bounds,
            window=window,
        )
        before = len(found)
        if gathers:
            met = (*host.own(), *host.others(range(here)), *host.others(range(here + 1, ranks)))
            found += pairs(met, local[here], together)
        else:
            found += pairs(host.own(), local[here], local[here])
            for source in range(ranks):
                if source != here:
                    found += pairs(
                        host.others(range(source, source + 1)), local[here], local[source]
                    )
        # Twice the pairs, of a token with itself a half: what a causal kernel is said to do.
        own = sum(query == key for query, key in found[before:])
        assert (
            attended(runs.lengths, LENGTH, held(LENGTH, ranks, here), window)
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
        host = Host(length=LENGTH, ranks=ranks, here=here, together=1, runs=None)
        for source in range(ranks):
            (meeting,) = host.own() if source == here else host.others(range(source, source + 1))
            assert (len(meeting.queries), len(meeting.keys), meeting.runs) == (1, 1, None)
