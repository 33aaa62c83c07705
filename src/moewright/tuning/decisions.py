"""The decisions of a tuning, the rules they follow, and the result they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.finding import Basis
from moewright.tuning.paired_test import Interval, Noise
from moewright.tuning.space import TuningPoint
from moewright.tuning.trials import TrialOutcome


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
