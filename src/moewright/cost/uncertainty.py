"""How far a prediction may be off: intervals of time and memory, and the probability of fitting.

Residuals of runs that a fit has not seen have heavy tails: the interval of a step is that of the
exponential of a Student's t of four degrees of freedom around its prediction, that of a peak is of
such a t. The bound that ranks layouts and the probability of fitting take a normal variable. They
work on numbers and on arrays alike, so that the search ranks by what an estimate states.
"""

from __future__ import annotations

from math import acos, cos, erf, exp, sqrt
from statistics import NormalDist

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.stage_parts import Array

_STANDARD = NormalDist()


def step_deviation(constants: Constants, choices: Array | int, pairs: Array | int) -> Array:
    """Return the standard deviation of the logarithm of a step's seconds.

    The choices that no run made, and the pairs that no run made together, add theirs in squares.
    """
    variance = (
        constants["step_time_sd"] ** 2
        + constants["choice_time_sd"] ** 2 * choices
        + constants["pair_time_sd"] ** 2 * pairs
    )
    return np.sqrt(variance)


def step_bound(step_s: float, step_sd: Array | float, risk: float) -> Array:
    """Return the seconds that a step exceeds with a probability of `risk`."""
    return np.asarray(step_s * np.exp(_STANDARD.inv_cdf(1 - risk) * step_sd))


def step_interval(step_s: float, step_sd: float, share: float) -> tuple[float, float]:
    """Return the seconds between which a step lies with a probability of `share`."""
    factor = exp(tail_width(share) * step_sd)
    return step_s / factor, step_s * factor


def peak_interval(peak_bytes: float, sd_bytes: float, share: float) -> tuple[float, float]:
    """Return the bytes between which a peak lies with a probability of `share`; never below 0."""
    half_bytes = tail_width(share) * sd_bytes
    return max(0.0, peak_bytes - half_bytes), peak_bytes + half_bytes


def fit_probability(margin_bytes: float, sd_bytes: float) -> float:
    """Return the probability that a peak stays within capacity, `margin_bytes` above the mean."""
    if sd_bytes <= 0:
        return float(margin_bytes >= 0)
    return 0.5 * (1 + erf(margin_bytes / sd_bytes / sqrt(2)))


def needed_margin(sd_bytes: Array, probability: float) -> Array:
    """Return the bytes between mean peak and capacity at which a layout fits so probably."""
    return _STANDARD.inv_cdf(probability) * sd_bytes


def tail_width(share: float) -> float:
    """Return the deviations on either side that hold a share of a Student's t.

    It has four degrees of freedom, of which the quantile is known in closed form.
    """
    probability = (1 + share) / 2
    alpha = 4 * probability * (1 - probability)
    ratio = cos(acos(sqrt(alpha)) / 3) / sqrt(alpha)
    return 2 * sqrt(ratio - 1)
