"""What the planner expects of points, under constants refitted to the trials so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from statistics import fmean

from moewright.calibration.fit import FREE, Centre, Run, fit
from moewright.calibration.fit_inputs import fitted_hardware
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.repricing import Prepared
from moewright.search.search import plan_of
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.plan import Estimate, Plan
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload
from moewright.tuning.space import Point, Space

# The planner's error before any trial told it, and the least that it is taken for: of two layouts,
# in the logarithm.
_ERROR = 0.2
_LEAST_ERROR = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """What a point took, for a fit: the geometric mean of its runs, and the load that its experts
    had."""

    point: Point
    step_s: float
    load_factor: float


class Prices:
    """`error` is the root mean square of log(predicted / measured) over the trials, their mean
    taken out: what is off for all layouts alike turns no order.
    """

    def __init__(self, space: Space) -> None:
        self.hardware: Hardware = space.hardware  # with all constants as fitted
        self.learnt: Hardware = space.hardware  # with those that the trials told something about
        self.error = _ERROR
        self._space = space
        self._constants: tuple[Constant, ...] = ()
        self._prepared: dict[tuple[Point, Workload], Prepared] = {}
        self._estimates: dict[Point, Estimate] = {}
        self._depends: dict[Point, frozenset[str]] = {}

    def learn(self, taught: Iterable[Taught]) -> None:
        """Fit the constants anew, to all trials so far."""
        space = self._space
        every = tuple(taught)
        if not every:
            return
        runs = []
        for one in every:
            work = one.point.on(space.workload)
            if one.point.layout.ep > 1 and one.load_factor:
                work = replace(work, routing=Routing.LEARNED, load_factor=one.load_factor)
            prepared = self._prepare(one.point, work)
            runs.append(
                Run(
                    id=str(one.point),
                    prepared=prepared,
                    hardware=space.hardware,
                    measured_s=one.step_s,
                )
            )
        felt = {name for one in every for name in self._felt(one.point)}
        found = fit(
            runs, free=tuple(one for one in FREE if one.name in felt), centre=Centre.HARDWARE
        )
        self._constants = found.constants(space.hardware)
        named = {constant.name for constant in self._constants}
        kept = [constant for constant in space.hardware.constants if constant.name not in named]
        self.hardware = replace(space.hardware, constants=(*kept, *self._constants))
        self.learnt, _ = fitted_hardware(space.hardware, found, source="trials of one tuning")
        self._estimates = {}
        errors = [log(run.prepared.step_s(self._constants) / run.measured_s) for run in runs]
        spread = fmean((error - fmean(errors)) ** 2 for error in errors) ** 0.5
        # Few trials say little of the error: the one expected beforehand counts as one of them.
        self.error = max(
            _LEAST_ERROR, ((len(errors) * spread**2 + _ERROR**2) / (len(errors) + 1)) ** 0.5
        )

    def step_s(self, point: Point) -> float:
        """Predicted seconds of a step. Raises BadInput for an illegal point."""
        return self._prepare(point, point.on(self._space.workload)).step_s(self._constants)

    def estimate(self, point: Point) -> Estimate:
        """The whole estimate, under the fitted constants."""
        if point not in self._estimates:
            work = point.on(self._space.workload)
            self._estimates[point] = estimate(self._space.model, work, self.hardware, point.layout)
        return self._estimates[point]

    def plan(self, point: Point, workload: Workload) -> Plan:
        """What the engine runs: the point under `workload`, which has its steps and records."""
        return plan_of(self._space.model, point.on(workload), self.hardware, point.layout)

    def ranked(self, beside: Point) -> tuple[Point, ...]:
        """Layouts with the other choices of `beside`, the fastest expected first."""
        return tuple(
            sorted(
                self._space.layouts(beside, self.hardware),
                key=lambda one: (self.step_s(one), str(one)),
            )
        )

    def _felt(self, point: Point) -> frozenset[str]:
        """Constants that a point's step depends on: the others no trial of it can tell."""
        if point not in self._depends:
            prepared = self._prepare(point, point.on(self._space.workload))
            known, base = Constants(self._space.hardware), prepared.step_s(())
            self._depends[point] = frozenset(
                one.name
                for one in FREE
                if prepared.step_s(
                    tuple(_nudged(name, known[name]) for name in (one.name, *one.also))
                )
                != base
            )
        return self._depends[point]

    def _prepare(self, point: Point, workload: Workload) -> Prepared:
        key = (point, workload)
        if key not in self._prepared:
            self._prepared[key] = Prepared(
                self._space.model, workload, self._space.hardware, point.layout
            )
        return self._prepared[key]


def _nudged(name: str, value: float) -> Constant:
    """The constant, 5 % less: up, some stand at their bound."""
    return Constant(
        name=name, value=Sourced(value=0.95 * value, kind=SourceKind.ASSUMED, source="derivative")
    )
