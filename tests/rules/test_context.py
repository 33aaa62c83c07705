"""Positions of a sequence over CP ranks: each once, and the same causal work everywhere."""

from __future__ import annotations

import pytest

from moewright.rules.context import held


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_position_lies_on_one_rank(cp: int) -> None:
    length = 48
    places = [place for rank in range(cp) for part in held(length, cp, rank) for place in part]
    assert sorted(places) == list(range(length))


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_every_rank_attends_as_many_pairs(cp: int) -> None:
    """Counting a query's own key as half a pair, as the causal half of a square does."""
    length = 48
    pairs = {sum(place + 0.5 for part in held(length, cp, rank) for place in part) for rank in range(cp)}
    assert pairs == {length * length / 2 / cp}
