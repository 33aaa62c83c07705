"""Distinct ranks and nodes that the experts of a token lie on."""

from __future__ import annotations

import random

import pytest

from moewright.rules.routing import expected_distinct, expected_places, message_tokens
from moewright.spec.model import RouterSpec

DEEPSEEK = RouterSpec(top_k=8, groups=8, top_groups=4)


def _draw(router: RouterSpec, experts: int, places: int, tokens: int) -> float:
    """Return the mean of distinct places over random tokens."""
    draw = random.Random(1)
    group = experts // router.groups
    total = 0
    for _ in range(tokens):
        chosen = draw.sample(range(router.groups), router.top_groups)
        allowed = [expert for g in chosen for expert in range(g * group, (g + 1) * group)]
        picked = draw.sample(allowed, router.top_k)
        total += len({expert * places // experts for expert in picked})
    return total / tokens


@pytest.mark.parametrize("places", [1, 2, 4, 8, 16, 64])
def test_groups_limit_the_places_that_a_token_reaches(places: int) -> None:
    drawn = _draw(DEEPSEEK, 256, places, 4000)
    assert expected_places(DEEPSEEK, places) == pytest.approx(drawn, rel=0.03)
    assert expected_places(DEEPSEEK, places) <= min(places, 8)


def test_without_a_limit_places_are_those_of_plain_draws() -> None:
    free = RouterSpec(top_k=8)
    assert expected_places(free, 8) == expected_distinct(8, 8)
    assert expected_places(DEEPSEEK, 8) < 0.7 * expected_places(free, 8)


def test_messages_of_large_groups_hold_fewer_tokens() -> None:
    assert [message_tokens(ranks) for ranks in (16, 32, 64, 128)] == [15.0, 8.0, 8.0, 9.6]
