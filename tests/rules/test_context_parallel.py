"""Positions of a sequence over CP ranks: each once, and the same causal work everywhere."""

from __future__ import annotations

import pytest

from moewright.rules.context_parallel import cp_factors, rank_positions
from moewright.spec.layout import CpComm, Layout


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_position_lies_on_one_rank(cp: int) -> None:
    length = 48
    places = [
        place for rank in range(cp) for part in rank_positions(length, cp, rank) for place in part
    ]
    assert sorted(places) == list(range(length))


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_every_rank_attends_as_many_pairs(cp: int) -> None:
    """Counting a query's own key as half a pair, as the causal half of a square does."""
    length = 48
    pairs = {
        sum(place + 0.5 for part in rank_positions(length, cp, rank) for place in part)
        for rank in range(cp)
    }
    assert pairs == {length * length / 2 / cp}


@pytest.mark.parametrize(
    ("cp", "exchange", "expected"),
    [
        (8, CpComm.P2P, (1, 8)),
        (8, CpComm.ALL_GATHER, (1, 8)),
        (8, CpComm.A2A, (8, 1)),
        (8, CpComm.A2A_P2P, (2, 4)),
        (6, CpComm.A2A_P2P, (2, 3)),
        (36, CpComm.A2A_P2P, (6, 6)),
        (1024, CpComm.A2A_P2P, (8, 128)),
        (7, CpComm.A2A_P2P, (1, 7)),
    ],
)
def test_which_ranks_exchange_heads_and_which_keys(
    cp: int, exchange: CpComm, expected: tuple[int, int]
) -> None:
    assert cp_factors(Layout(world_size=cp, cp=cp, cp_comm=exchange)) == expected


@pytest.mark.parametrize(("cp", "heads"), [(4, 2), (8, 2), (16, 4)])
def test_the_tokens_of_ranks_that_exchange_heads_are_an_early_and_a_late_run(
    cp: int, heads: int
) -> None:
    """Their ranks together are laid out like one rank of the ring between which keys travel."""
    length = 64
    rings = cp // heads
    for ring in range(rings):
        parts = [rank_positions(length, cp, ring * heads + place) for place in range(heads)]
        chunks = [early for early, _ in parts] + [late for _, late in reversed(parts)]
        places = [place for chunk in chunks for place in chunk]
        assert places == [place for part in rank_positions(length, rings, ring) for place in part]
