"""The decisions of a tuning: the rules they follow, and the test that tells a gain from noise.

Two consecutive runs share the state of the machine, so their ratio is steadier than either. How far
such a ratio varies by itself is a property of the machine, not of a layout, so it is pooled over
all points that ran at least twice. It comes from the differences of consecutive runs of one point
(von Neumann 1941), which a slow drift does not widen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import atan, cos, exp, pi, sin, sqrt
from statistics import fmean

from moewright.spec.finding import Basis
from moewright.tuning.space import TuningPoint
from moewright.tuning.trials import TrialOutcome

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


class TuningPhase(StrEnum):
    """The phases of a tuning, in their order."""

    FIT = "fit"
    SCALE = "scale"
    RETUNE = "retune"
    VALIDATE = "validate"


class Ruling(StrEnum):
    """The ruling on a point."""

    START = "start"
    KEPT = "kept"
    SLOWER = "slower"
    NO_GAIN = "no gain shown"
    FAILED = "failed"
    PRUNED = "pruned"
    PASSED_OVER = "passed over"
    VALID = "valid"
    INVALID = "not valid"


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceRules:
    """Rules that tell a gain from noise, and when to stop.

    A candidate is kept when its interval lies below 0. It is given up when it cannot be `min_gain`
    faster, or is not even ahead after `futile_pairs`. A phase ends after `patience` candidates in a
    row without a gain.
    """

    repeats: int = 3  # of the start, to see how far runs of one layout differ
    max_pairs: int = 5
    futile_pairs: int = 3
    min_gain: float = 0.02
    patience: int = 3  # of scale; retune goes on for twice as many
    # of the log ratio of two runs: each differs by 5 %, as repeats do (calibration.fit.RUN_NOISE)
    prior_sd: float = 0.07
    prior_degrees_of_freedom: int = 2
    # of the planner's error: how much slower than the incumbent a candidate may be predicted
    margin: float = 1.0
    basis: Basis = Basis.MEASURED


# Predictions repeat exactly, and nothing else is known of a point.
PREDICTION_RULES = AcceptanceRules(
    repeats=1, max_pairs=1, min_gain=0.005, prior_sd=0.0, margin=0.0, basis=Basis.PREDICTED
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision on a point.

    `predicted_s` and `predicted_ratio` (to the incumbent) are by the constants of that moment; the
    interval is of the log ratio of measured seconds.
    """

    phase: TuningPhase
    point: TuningPoint
    why: str
    predicted_s: float
    predicted_ratio: float
    predicted_peak_bytes: int
    ruling: Ruling
    reason: str = ""
    step_s: float = 0.0  # geometric mean of its runs
    interval: Interval | None = None
    run_count: int = 0
    predictor_error: float = 0.0  # at that moment: root mean square of log ratios of layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class IncumbentProfile:
    """The walls of an incumbent, as its last run showed them."""

    point: TuningPoint
    outcome: TrialOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """The result of a tuning so far.

    `stops` says why each phase ended; `total_interval` is the winner against the start.
    """

    decisions: tuple[Decision, ...]
    profiles: tuple[IncumbentProfile, ...]
    stops: tuple[tuple[TuningPhase, str], ...]
    start: TuningPoint
    winner: TuningPoint | None
    validated: TrialOutcome | None
    total_interval: Interval | None
    noise: Noise
    run_count: int
    spent_s: float
    point_count: int  # that were run


ResultCallback = Callable[[TuningResult], None]
