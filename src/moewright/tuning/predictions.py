"""Predictions of points by the planner, under constants refitted to the trials so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from moewright.calibration.fit import (
    FREE_CONSTANTS,
    FreeConstant,
    MeasuredRun,
    PriorCentre,
    fit_constants,
)
from moewright.calibration.fit_inputs import apply_fit
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.time.repricing import RepriceableStep
from moewright.search.search import build_plan
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.plan import Estimate, Plan
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload
from moewright.tuning.space import TuningPoint, TuningSpace

# The error of the planner's log ratio of two layouts: before any trial, and the least assumed.
_PRIOR_ERROR = 0.2
_LEAST_ERROR = 0.03
# To see whether a step depends on a constant, it is multiplied by this; it is lowered because some
# constants stand at their upper bound.
_LOWERED = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class PointMeasurement:
    """A point's measured step for a fit, with the load that its experts had.

    `step_s` is the geometric mean of its runs.
    """

    point: TuningPoint
    step_s: float
    load_factor: float


class StepPredictor:
    """The planner's predictions of points, which every trial corrects.

    `log_error` is the root mean square of log(predicted / measured) over the trials, less their
    mean: an error that all layouts share does not change their order.
    """

    def __init__(self, space: TuningSpace) -> None:
        # The hardware with all fitted constants.
        self.fitted_hardware: Hardware = space.hardware
        # The hardware with the fitted constants that the trials narrowed (calibration.apply_fit).
        self.learnt_hardware: Hardware = space.hardware
        self.log_error = _PRIOR_ERROR
        self._space = space
        self._constants: tuple[Constant, ...] = ()
        self._steps: dict[tuple[TuningPoint, Workload], RepriceableStep] = {}
        self._estimates: dict[TuningPoint, Estimate] = {}
        self._relevant: dict[TuningPoint, frozenset[str]] = {}

    def refit(self, measurements: Iterable[PointMeasurement]) -> None:
        """Fit the constants anew, to all trials so far."""
        measurements = tuple(measurements)
        if not measurements:
            return
        hardware = self._space.hardware
        runs = [self._build_run(measurement) for measurement in measurements]
        relevant = {
            name
            for measurement in measurements
            for name in self._relevant_constants(measurement.point)
        }
        free_constants = tuple(free for free in FREE_CONSTANTS if free.name in relevant)
        fit = fit_constants(runs, free_constants=free_constants, centre=PriorCentre.HARDWARE)
        self._constants = fit.constants_for(hardware)
        fitted_names = {constant.name for constant in self._constants}
        kept = [constant for constant in hardware.constants if constant.name not in fitted_names]
        self.fitted_hardware = replace(hardware, constants=(*kept, *self._constants))
        self.learnt_hardware, _ = apply_fit(hardware, fit, source="trials of one tuning")
        self._estimates = {}
        self.log_error = self._estimate_log_error(runs)

    def _build_run(self, measurement: PointMeasurement) -> MeasuredRun:
        point = measurement.point
        workload = point.apply_to(self._space.workload)
        if point.layout.ep > 1 and measurement.load_factor:
            workload = replace(
                workload, routing=Routing.LEARNED, load_factor=measurement.load_factor
            )
        return MeasuredRun(
            id=str(point),
            prepared=self._build_step(point, workload),
            hardware=self._space.hardware,
            measured_s=measurement.step_s,
        )

    def _estimate_log_error(self, runs: Sequence[MeasuredRun]) -> float:
        errors = [log(run.prepared.step_s(self._constants) / run.measured_s) for run in runs]
        mean = fmean(errors)
        spread = fmean((error - mean) ** 2 for error in errors) ** 0.5
        # Few trials say little about the error, so the prior error counts as one more trial.
        count = len(errors)
        mean_square = (count * spread**2 + _PRIOR_ERROR**2) / (count + 1)
        log_error: float = mean_square**0.5
        return max(_LEAST_ERROR, log_error)

    def predict_step_s(self, point: TuningPoint) -> float:
        """Predict the seconds of a step.

        Raises:
            BadInput: the point is illegal.
        """
        step = self._build_step(point, point.apply_to(self._space.workload))
        return step.step_s(self._constants)

    def estimate(self, point: TuningPoint) -> Estimate:
        """Return the complete estimate of a point, under the fitted constants."""
        if point not in self._estimates:
            workload = point.apply_to(self._space.workload)
            self._estimates[point] = estimate(
                self._space.model, workload, self.fitted_hardware, point.layout
            )
        return self._estimates[point]

    def build_plan(self, point: TuningPoint, workload: Workload) -> Plan:
        """Build the plan that the engine runs: the point under `workload`, a trial's."""
        return build_plan(
            self._space.model, point.apply_to(workload), self.fitted_hardware, point.layout
        )

    def rank_points(self, incumbent: TuningPoint) -> tuple[TuningPoint, ...]:
        """Return layouts with the other choices of `incumbent`, the fastest expected first."""
        points = self._space.candidate_points(incumbent, self.fitted_hardware)
        return tuple(sorted(points, key=lambda point: (self.predict_step_s(point), str(point))))

    def _relevant_constants(self, point: TuningPoint) -> frozenset[str]:
        """Return the constants that a point's step depends on: its trials inform no others."""
        if point not in self._relevant:
            step = self._build_step(point, point.apply_to(self._space.workload))
            self._relevant[point] = frozenset(
                free.name for free in FREE_CONSTANTS if self._depends_on(step, free)
            )
        return self._relevant[point]

    def _depends_on(self, step: RepriceableStep, free: FreeConstant) -> bool:
        values = Constants(self._space.hardware)
        names = (free.name, *free.tied_names)
        lowered = tuple(_constant(name, _LOWERED * values[name]) for name in names)
        return step.step_s(lowered) != step.step_s(())

    def _build_step(self, point: TuningPoint, workload: Workload) -> RepriceableStep:
        key = (point, workload)
        if key not in self._steps:
            self._steps[key] = RepriceableStep(
                self._space.model, workload, self._space.hardware, point.layout
            )
        return self._steps[key]


def _constant(name: str, value: float) -> Constant:
    sourced = Sourced(value=value, kind=SourceKind.ASSUMED, source="derivative")
    return Constant(name=name, value=sourced)
