"""A test that tells a gain from noise: pairs of runs in turns, and an interval of their log ratio.

Two consecutive runs share the state of the machine, so their ratio is steadier than either. How far
such a ratio varies by itself is a property of the machine, not of a layout, so it is pooled over
all points that ran at least twice. It comes from the differences of consecutive runs of one point
(von Neumann 1941), which a slow drift does not widen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import atan, cos, exp, pi, sin, sqrt
from statistics import fmean

CONFIDENCE = 0.95  # of the interval after the last pair, together with all looks before it
# Consecutive differences share a run, so each counts as this part of a degree of freedom.
_FREEDOM_SHARE = 2 / 3
_LARGEST_T = 1e4
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The standard deviation of the log ratio of two neighbouring runs of one point.

    Its degrees of freedom say how well it is known.
    """

    sd: float
    degrees_of_freedom: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An interval of log(candidate's seconds / incumbent's): below 0 is faster.

    The gain is 1 - candidate / incumbent; `least_gain` and `most_gain` are its ends.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def gain(self) -> float:
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
    """Estimate the noise from the log seconds of each point's runs, in the order they ran.

    The prior counts as `prior_degrees_of_freedom` pairs.
    """
    squares = [
        (after - before) ** 2 for sequence in sequences for before, after in pairwise(sequence)
    ]
    observed = _FREEDOM_SHARE * len(squares)
    total = prior_degrees_of_freedom * prior_sd**2 + _FREEDOM_SHARE * sum(squares)
    return Noise(
        sd=sqrt(total / (prior_degrees_of_freedom + observed)),
        degrees_of_freedom=prior_degrees_of_freedom + int(observed),
    )


def log_ratio_interval(ratios: Sequence[float], noise: Noise, *, looks: int) -> Interval:
    """Return the interval of the mean of log ratios.

    `looks` is the largest number of times that the interval is looked at. The level of each look is
    such that all of them together have CONFIDENCE (Bonferroni).
    """
    mean = fmean(ratios)
    probability = 1 - (1 - CONFIDENCE) / looks / 2
    t = t_quantile(probability, noise.degrees_of_freedom)
    half_width = t * noise.sd / sqrt(len(ratios))
    return Interval(mean=mean, low=mean - half_width, high=mean + half_width, pairs=len(ratios))


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return Student's t that `probability` (above a half) of the distribution does not exceed."""
    low = 0.0
    high = _LARGEST_T
    while high - low > _TOLERANCE * (1 + high):
        middle = (low + high) / 2
        if 0.5 + _central_probability(middle, degrees_of_freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _central_probability(t: float, degrees_of_freedom: int) -> float:
    """Return the probability of -t .. t (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = atan(t / sqrt(degrees_of_freedom))
    if degrees_of_freedom == 1:
        return 2 * angle / pi
    is_odd = degrees_of_freedom % 2
    term = cos(angle) if is_odd else 1.0
    total = term
    for k in range(3 if is_odd else 2, degrees_of_freedom - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    if is_odd:
        return 2 / pi * (angle + sin(angle) * total)
    return sin(angle) * total
