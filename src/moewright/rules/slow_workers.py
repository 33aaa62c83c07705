"""How much longer a step takes because it waits for the slowest worker, and for slow spells.

Workers differ from each other for as long as a job runs, and each from itself from step to step,
both about normally. A step takes as long as its slowest worker, whose expected time has a closed
form (G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958). Beside that, jobs are
delayed by what goes wrong for a while: by a share whose distribution over jobs is exponential.
"""

from __future__ import annotations

from math import exp, hypot, log, log1p
from statistics import NormalDist

import numpy as np

_STANDARD = NormalDist()
_SHARES = 400  # of the distribution of delays, each with one delay
_PRECISION = 1e-9  # of a logarithm


def expected_slowest(workers: int) -> float:
    """Return the expected largest of so many standard normal variables, by Blom's formula."""
    return _STANDARD.inv_cdf((workers - 0.375) / (workers + 0.25))


def slowest_share(workers: int, between: float, within: float) -> float:
    """Return the share by which the slowest worker lengthens a step, on average over steps.

    `between` is the deviation of workers from their mean, `within` that of a worker from itself
    from step to step, both over the mean: a worker's time in a step has both.
    """
    return hypot(between, within) * expected_slowest(workers)


def delayed_interval(log_deviation: float, mean_delay: float, share: float) -> tuple[float, float]:
    """Return the factors between which a prediction lies with a probability of `share`.

    It is off by a factor with that deviation of its logarithm, and longer by a delay that is
    exponential with that mean.
    """
    if mean_delay == 0:
        factor = exp(_STANDARD.inv_cdf((1 + share) / 2) * log_deviation)
        return 1 / factor, factor
    middles = (np.arange(_SHARES) + 0.5) / _SHARES
    delays = [log1p(-mean_delay * log(1 - middle)) for middle in middles]
    tails = ((1 - share) / 2, (1 + share) / 2)
    low, high = (_find_quantile(delays, log_deviation, tail) for tail in tails)
    return low, high


def _find_quantile(delays: list[float], log_deviation: float, probability: float) -> float:
    """Return the factor that the product of both stays below with a probability."""
    low, high = -12 * log_deviation, delays[-1] + 12 * log_deviation
    while high - low > _PRECISION:
        middle = (low + high) / 2
        below = [_STANDARD.cdf((middle - delay) / max(log_deviation, 1e-6)) for delay in delays]
        if sum(below) / len(below) < probability:
            low = middle
        else:
            high = middle
    return exp(high)
