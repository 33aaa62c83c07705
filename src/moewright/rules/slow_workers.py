"""How much longer a step takes because it waits for the slowest worker, and for slow spells.

Workers differ from each other for as long as a job runs, and each from itself from step to step,
both about normally, and so do the links that they share. A step takes as long as the slowest, whose
distribution follows by quadrature. Beside that, jobs are delayed by what goes wrong for a while: by
a share whose distribution over jobs is exponential.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, erfc, exp, log, log1p, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_STANDARD = NormalDist()
_POINTS = 2001  # of a distribution; one of them is 0
_REACH = 9.0  # of them, in deviations
_SHARES = 400  # of the distribution of delays, each with one delay
_PRECISION = 1e-9  # of a logarithm


def delayed_interval(log_deviation: float, mean_delay: float, share: float) -> tuple[float, float]:
    """Return the factors between which a prediction lies with a probability of `share`.

    It is off by a factor with that deviation of its logarithm, and longer by a delay that is
    exponential with that mean.
    """
    if mean_delay == 0:
        factor = exp(_STANDARD.inv_cdf((1 + share) / 2) * log_deviation)
        return 1 / factor, factor
    middles = (np.arange(_SHARES) + 0.5) / _SHARES
    # Inverse of the exponential distribution at the middles of equally likely parts.
    delays = [log1p(-mean_delay * log(1 - middle)) for middle in middles]
    tails = ((1 - share) / 2, (1 + share) / 2)
    low, high = (_find_quantile(delays, log_deviation, tail) for tail in tails)
    return low, high


def _find_quantile(delays: list[float], log_deviation: float, probability: float) -> float:
    """Return the factor that the product of both stays below with a probability."""
    # Bisection: a mixture of normal distributions has no closed quantile, and it rises everywhere.
    low, high = -12 * log_deviation, delays[-1] + 12 * log_deviation
    while high - low > _PRECISION:
        middle = (low + high) / 2
        below = [_STANDARD.cdf((middle - delay) / max(log_deviation, 1e-6)) for delay in delays]
        if sum(below) / len(below) < probability:
            low = middle
        else:
            high = middle
    return exp(high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Siblings:
    """What a barrier waits for below one unit: so many, each with a deviation of its own.

    A count that is not whole is a mean over units.
    """

    count: float
    deviation: float  # of its own time; what lies below it differs beside that


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The share by which the slowest of all takes longer than the mean of all."""

    mean: float
    median: float
    p90: float


def find_slowest(levels: Sequence[Siblings]) -> Slowest:
    """Return how much longer the slowest of a tree takes, whose leaves are the first of `levels`.

    A leaf takes its own normal variable and those of all units above it. If F is the distribution
    of the slowest below a unit's n children, that of the slowest of the unit with its own variable
    is the mean of F(x - z)^n over z; the last level stands below no unit.
    """
    deviation = sqrt(sum(siblings.deviation**2 for siblings in levels))
    if deviation == 0:
        return Slowest(mean=0.0, median=0.0, p90=0.0)
    x = np.linspace(-_REACH, _REACH, _POINTS) * deviation
    # A variable without spread: a step at 0, which is one of the points and counts half there.
    below = (1 + np.sign(x)) / 2
    for siblings in levels:
        if siblings.deviation > 0:
            below = _add_variable(x, below, siblings.deviation)
        # All of `count` independent children are below x.
        below **= siblings.count
    median, p90 = (float(np.interp(share, below, x)) for share in (0.5, 0.9))
    # The mean of a variable that ends at x[-1] is x[-1] less the integral of its distribution.
    return Slowest(mean=float(x[-1] - np.trapezoid(below, x)), median=median, p90=p90)


def _add_variable(x: Array, below: Array, deviation: float) -> Array:
    """Return the distribution [points] of a variable plus a normal one, at the same points."""
    width = float(x[1] - x[0])
    reach = min(len(x) // 2, ceil(_REACH * deviation / width))
    edges = (np.arange(-reach, reach + 2) - 0.5) * width
    weights = np.diff([erfc(-edge / (sqrt(2) * deviation)) / 2 for edge in edges])
    # Beyond the points the distribution is 0 and 1: without these ends it would bend at the edges.
    further = np.concatenate([np.zeros(reach), below, np.ones(reach)])
    added: Array = np.convolve(further, weights, mode="valid")
    return added
