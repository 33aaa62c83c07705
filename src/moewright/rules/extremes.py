"""Expected largest of several draws: the hottest rank, the slowest device."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


def largest_of(draws: int) -> float:
    """Return the expected largest of some normal draws, in units of their deviation (Blom)."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25)) if draws > 1 else 0.0


def largest_of_centred(draws: int) -> float:
    """Return the expected largest of at least 2 normal draws whose sum is 0, in their deviation."""
    return largest_of(draws) * sqrt(draws / (draws - 1))
