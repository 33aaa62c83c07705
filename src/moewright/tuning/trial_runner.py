"""Runs of points, one after the other and in turns with the incumbent, within a budget of time."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from statistics import fmean

from moewright.spec.workload import CheckpointSpec, ProfileSpec, Workload
from moewright.tuning.decisions import AcceptanceRules
from moewright.tuning.paired_test import Noise, estimate_noise
from moewright.tuning.predictions import PointMeasurement, StepPredictor
from moewright.tuning.space import TuningPoint, TuningSpace
from moewright.tuning.trials import (
    WARM_UP_STEPS,
    RunTrial,
    TrialFailure,
    TrialLength,
    TrialOutcome,
    TrialRequest,
)


class BudgetSpentError(Exception):
    """No time is left for another trial."""


def trial_workload(workload: Workload, length: TrialLength) -> Workload:
    """The job for a trial: the same steps, only fewer; the schedule of the learning rate stays that
    of the job."""
    optimizer = replace(
        workload.optimizer, decay_steps=workload.optimizer.decay_steps or workload.steps
    )
    return replace(
        workload,
        steps=length.steps,
        optimizer=optimizer,
        eval_every_steps=0,
        eval_batches=1,
        router_log_every_steps=1,
        ledger_step=WARM_UP_STEPS - 1,
        profile=ProfileSpec(),
        checkpoint=CheckpointSpec(),
    )


class TrialRunner:
    """All runs of a tuning. `memory_bytes` is the predicted peak of the smallest layout that ran
    out of memory."""

    def __init__(
        self,
        space: TuningSpace,
        prices: StepPredictor,
        run_one: RunTrial,
        *,
        rules: AcceptanceRules,
        budget_s: float,
    ) -> None:
        self._space, self._prices, self._run_one = space, prices, run_one
        self._rules, self._budget_s = rules, budget_s
        self._outcomes: dict[TuningPoint, list[TrialOutcome]] = {}
        self._last: TuningPoint | None = None
        self.oom_bytes = float("inf")
        self.failed_points: set[TuningPoint] = set()
        self.run_count, self.spent_s = 0, 0.0

    @property
    def points(self) -> tuple[TuningPoint, ...]:
        """Those that were run, in the order of their first."""
        return tuple(self._outcomes)

    def count_runs(self, point: TuningPoint) -> int:
        return len(self._outcomes.get(point, ()))

    def last_outcome(self, point: TuningPoint) -> TrialOutcome:
        """The last run of a point."""
        return self._outcomes[point][-1]

    def last_success(self, point: TuningPoint) -> TrialOutcome:
        """The last run of a point that did not fail."""
        return next(
            one for one in reversed(self._outcomes[point]) if one.failure is TrialFailure.NONE
        )

    def mean_step_s(self, point: TuningPoint) -> float:
        """Geometric mean of a point's runs; 0 where none has a figure."""
        seen = [one.step_s for one in self._outcomes.get(point, []) if one.step_s]
        return exp(fmean(map(log, seen))) if seen else 0.0

    def run_pair(self, point: TuningPoint, incumbent: TuningPoint, number: int) -> float | None:
        """log(candidate / incumbent) of two runs in a row; the turns change from pair to pair, and
        an incumbent's run that has just been made is taken. None when the candidate fails.
        """
        if number == 0 and self._last == incumbent:
            beside = self.last_outcome(incumbent)
            mine = self.run_screen(point)
        elif number % 2:
            beside = self.run_screen(incumbent)
            mine = self.run_screen(point)
        else:
            mine = self.run_screen(point)
            if mine.failure is not TrialFailure.NONE:
                return None
            beside = self.run_screen(incumbent)
        if TrialFailure.NONE is not mine.failure:
            return None
        if beside.failure is not TrialFailure.NONE:  # it has run before: a fault of the moment
            beside = self.last_success(incumbent)
        return log(mine.step_s / beside.step_s)

    def run_screen(self, point: TuningPoint) -> TrialOutcome:
        """A short run. Raises BudgetSpentError where it and a validation would take longer than
        there is time."""
        if self._budget_s and self.run_count and self.spent_s + self._reserve_s() > self._budget_s:
            raise BudgetSpentError
        return self.run(point, TrialLength.SCREEN)

    def _reserve_s(self) -> float:
        """What the next trial and a validation take, by the runs so far."""
        screen = self.spent_s / self.run_count
        return screen * (1 + TrialLength.VALIDATE.steps / TrialLength.SCREEN.steps)

    def run(self, point: TuningPoint, length: TrialLength) -> TrialOutcome:
        """A run, whatever the budget."""
        known = self._outcomes.setdefault(point, []) if length is TrialLength.SCREEN else []
        plan = self._prices.build_plan(point, trial_workload(self._space.workload, length))
        outcome = self._run_one(
            TrialRequest(point=point, length=length, repeat=len(known) + 1, plan=plan)
        )
        self.run_count += 1
        self.spent_s += outcome.spent_s
        if length is TrialLength.VALIDATE:
            return outcome
        known.append(outcome)
        self._last = point
        if outcome.failure is not TrialFailure.NONE:
            self.failed_points.add(point)
            if outcome.failure is TrialFailure.MEMORY:
                self.oom_bytes = min(self.oom_bytes, plan.estimate.peak_bytes)
        return outcome

    def estimate_noise(self) -> Noise:
        """Of the log ratio of two runs of one point in a row."""
        sequences = [
            [log(one.step_s) for one in found if one.step_s] for found in self._outcomes.values()
        ]
        return estimate_noise(
            sequences,
            prior_sd=self._rules.prior_sd,
            prior_degrees_of_freedom=self._rules.prior_degrees_of_freedom,
        )

    def measurements(self) -> tuple[PointMeasurement, ...]:
        """What each point that ran took."""
        return tuple(
            PointMeasurement(
                point=point,
                step_s=self.mean_step_s(point),
                load_factor=self.last_success(point).load_factor,
            )
            for point in self._outcomes
            if self.mean_step_s(point)
        )
