"""Copies of tokens that de-duplicating dispatchers send: the distinct places that tokens reach."""

from __future__ import annotations

from math import comb

from moewright.spec.model import RouterSpec

# Tokens that a message of DeepEP between nodes holds, by the size of its group: the harmonic mean
# of dispatch and combine in the tuned configurations of deep_ep/buffer.py (20 and 12, 8 and 8,
# 12 and 8).
_SMALL_GROUP = (16, 15.0)
_MIDDLE_GROUP = (64, 8.0)
_LARGE_GROUP_TOKENS = 9.6


def expected_distinct(places: float, draws: int) -> float:
    """Return the expected distinct places (ranks, nodes) that k uniform draws hit.

    It is N (1 - (1 - 1/N)^k); docs/formulas.md 3.
    """
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def expected_places(router: RouterSpec, places: int) -> float:
    """Return the expected distinct places (ranks, nodes) that the experts of a token lie on.

    A token that draws its k experts from g of G groups reaches a place of j chosen groups with
    probability 1 - (1 - j/g)^k, and a place that is 1/r of a group with 1 - (1 - 1/(g r))^k if the
    group is chosen: a router of 4 of 8 groups sends a token to 3.6 of 8 nodes, not to 5.3.
    """
    groups = router.groups
    chosen = router.top_groups
    draws = router.top_k
    if chosen >= groups or places == 1:
        return expected_distinct(places, draws)
    if places >= groups:
        parts = chosen * places / groups
        return expected_distinct(parts, draws)
    place_groups = round(groups / places)
    missed = sum(
        comb(place_groups, j)
        * comb(groups - place_groups, chosen - j)
        * (1.0 - j / chosen) ** draws
        for j in range(min(place_groups, chosen) + 1)
    )
    return places * (1.0 - missed / comb(groups, chosen))


def message_tokens(ranks: int) -> float:
    """Return the tokens that one message of DeepEP between nodes holds, in a group of so many."""
    for largest, tokens in (_SMALL_GROUP, _MIDDLE_GROUP):
        if ranks <= largest:
            return tokens
    return _LARGE_GROUP_TOKENS
