"""What the planner expects of points, under constants refitted to the trials so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from moewright.calibration.fit import FREE_CONSTANTS, MeasuredRun, PriorCentre, fit_constants
from moewright.calibration.fit_inputs import apply_fit
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.repricing import RepriceableStep
from moewright.search.search import build_plan
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.plan import Estimate, Plan
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload
from moewright.tuning.space import TuningPoint, TuningSpace

# The planner's error before any trial told it, and the least that it is taken for: of two layouts,
# in the logarithm.
_PRIOR_ERROR = 0.2
_LEAST_ERROR = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class PointMeasurement:
    """What a point took, for a fit: the geometric mean of its runs, and the load that its experts
    had."""

    point: TuningPoint
    step_s: float
    load_factor: float


class StepPredictor:
    """`error` is the root mean square of log(predicted / measured) over the trials, their mean
    taken out: what is off for all layouts alike turns no order.
    """

    def __init__(self, space: TuningSpace) -> None:
        self.fitted_hardware: Hardware = space.hardware  # with all constants as fitted
        self.learnt_hardware: Hardware = (
            space.hardware
        )  # with those that the trials told something about
        self.log_error = _PRIOR_ERROR
        self._space = space
        self._constants: tuple[Constant, ...] = ()
        self._prepared: dict[tuple[TuningPoint, Workload], RepriceableStep] = {}
        self._estimates: dict[TuningPoint, Estimate] = {}
        self._depends: dict[TuningPoint, frozenset[str]] = {}

    def refit(self, measurements: Iterable[PointMeasurement]) -> None:
        """Fit the constants anew, to all trials so far."""
        space = self._space
        every = tuple(measurements)
        if not every:
            return
        runs = []
        for one in every:
            work = one.point.apply_to(space.workload)
            if one.point.layout.ep > 1 and one.load_factor:
                work = replace(work, routing=Routing.LEARNED, load_factor=one.load_factor)
            prepared = self._prepare(one.point, work)
            runs.append(
                MeasuredRun(
                    id=str(one.point),
                    prepared=prepared,
                    hardware=space.hardware,
                    measured_s=one.step_s,
                )
            )
        felt = {name for one in every for name in self._felt(one.point)}
        found = fit_constants(
            runs,
            free_constants=tuple(one for one in FREE_CONSTANTS if one.name in felt),
            centre=PriorCentre.HARDWARE,
        )
        self._constants = found.constants_for(space.hardware)
        named = {constant.name for constant in self._constants}
        kept = [constant for constant in space.hardware.constants if constant.name not in named]
        self.fitted_hardware = replace(space.hardware, constants=(*kept, *self._constants))
        self.learnt_hardware, _ = apply_fit(space.hardware, found, source="trials of one tuning")
        self._estimates = {}
        errors = [log(run.prepared.step_s(self._constants) / run.measured_s) for run in runs]
        spread = fmean((error - fmean(errors)) ** 2 for error in errors) ** 0.5
        # Few trials say little of the error: the one expected beforehand counts as one of them.
        self.log_error = max(
            _LEAST_ERROR, ((len(errors) * spread**2 + _PRIOR_ERROR**2) / (len(errors) + 1)) ** 0.5
        )

    def predict_step_s(self, point: TuningPoint) -> float:
        """Predicted seconds of a step. Raises BadInput for an illegal point."""
        return self._prepare(point, point.apply_to(self._space.workload)).step_s(self._constants)

    def estimate(self, point: TuningPoint) -> Estimate:
        """The whole estimate, under the fitted constants."""
        if point not in self._estimates:
            work = point.apply_to(self._space.workload)
            self._estimates[point] = estimate(
                self._space.model, work, self.fitted_hardware, point.layout
            )
        return self._estimates[point]

    def build_plan(self, point: TuningPoint, workload: Workload) -> Plan:
        """What the engine runs: the point under `workload`, which has its steps and records."""
        return build_plan(
            self._space.model, point.apply_to(workload), self.fitted_hardware, point.layout
        )

    def rank_points(self, beside: TuningPoint) -> tuple[TuningPoint, ...]:
        """Layouts with the other choices of `beside`, the fastest expected first."""
        return tuple(
            sorted(
                self._space.candidate_points(beside, self.fitted_hardware),
                key=lambda one: (self.predict_step_s(one), str(one)),
            )
        )

    def _felt(self, point: TuningPoint) -> frozenset[str]:
        """Constants that a point's step depends on: the others no trial of it can tell."""
        if point not in self._depends:
            prepared = self._prepare(point, point.apply_to(self._space.workload))
            known, base = Constants(self._space.hardware), prepared.step_s(())
            self._depends[point] = frozenset(
                one.name
                for one in FREE_CONSTANTS
                if prepared.step_s(
                    tuple(_nudged(name, known[name]) for name in (one.name, *one.tied_names))
                )
                != base
            )
        return self._depends[point]

    def _prepare(self, point: TuningPoint, workload: Workload) -> RepriceableStep:
        key = (point, workload)
        if key not in self._prepared:
            self._prepared[key] = RepriceableStep(
                self._space.model, workload, self._space.hardware, point.layout
            )
        return self._prepared[key]


def _nudged(name: str, value: float) -> Constant:
    """The constant, 5 % less: up, some stand at their bound."""
    return Constant(
        name=name, value=Sourced(value=0.95 * value, kind=SourceKind.ASSUMED, source="derivative")
    )
