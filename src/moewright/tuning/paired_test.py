"""Telling a gain from noise: pairs of runs taken in turns, and the interval of their mean log
ratio.

Runs next to each other share what the machine does meanwhile, so their ratio is steadier than
either. How far such a ratio varies by itself is a property of the machine, not of a layout: it is
pooled over all points that ran twice or more, from the differences of consecutive runs of one point
(von Neumann 1941), which a slow drift does not widen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import atan, cos, exp, pi, sin, sqrt
from statistics import fmean

CONFIDENCE = 0.95  # of the interval after the last pair, together with all looks before it
_SHARED = 2 / 3  # consecutive differences share a run: so much of a degree of freedom each


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Standard deviation of the log ratio of two neighbouring runs of one point, and how well it is
    known."""

    sd: float
    degrees_of_freedom: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Of log(candidate's seconds / incumbent's): below 0 is faster."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def gain(self) -> float:
        """1 - candidate / incumbent; `least` and `most` are its ends."""
        return 1 - exp(self.mean)

    @property
    def least_gain(self) -> float:
        return 1 - exp(self.high)

    @property
    def most_gain(self) -> float:
        return 1 - exp(self.low)


def estimate_noise(
    sequences: Iterable[Sequence[float]], *, prior_sd: float, prior_degrees_of_freedom: int
) -> Noise:
    """From the log seconds of each point's runs in the order they ran; the prior counts as
    `prior_freedom` pairs."""
    squares = [(after - before) ** 2 for one in sequences for before, after in pairwise(one)]
    freedom = prior_degrees_of_freedom + int(_SHARED * len(squares))
    seen = _SHARED * len(squares)
    total = prior_degrees_of_freedom * prior_sd**2 + _SHARED * sum(squares)
    return Noise(sd=sqrt(total / (prior_degrees_of_freedom + seen)), degrees_of_freedom=freedom)


def log_ratio_interval(ratios: Sequence[float], noise: Noise, *, looks: int) -> Interval:
    """Of the mean of log ratios. `looks` is how often at most it is looked at: each look is taken
    at a level that holds LEVEL for all of them together (Bonferroni).
    """
    mean = fmean(ratios)
    half = (
        t_quantile(1 - (1 - CONFIDENCE) / looks / 2, noise.degrees_of_freedom)
        * noise.sd
        / sqrt(len(ratios))
    )
    return Interval(mean=mean, low=mean - half, high=mean + half, pairs=len(ratios))


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Student's t that `share` (above a half) of the distribution does not exceed."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * (1 + high):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if 0.5 + _inside(middle, degrees_of_freedom) / 2 < probability
            else (low, middle)
        )
    return (low + high) / 2


def _inside(t: float, freedom: int) -> float:
    """Share within -t .. t (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = atan(t / sqrt(freedom))
    if freedom == 1:
        return 2 * angle / pi
    odd = freedom % 2
    term = total = cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
