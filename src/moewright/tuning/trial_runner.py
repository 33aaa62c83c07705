"""A runner of trials, one after the other and in turns with the incumbent, within a time budget."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from statistics import fmean

from moewright.spec.workload import CheckpointSpec, ProfileSpec, Workload
from moewright.tuning.decisions import AcceptanceRules, Noise, estimate_noise
from moewright.tuning.predictions import PointMeasurement, StepPredictor
from moewright.tuning.space import TuningPoint, TuningSpace
from moewright.tuning.trials import (
    WARM_UP_STEPS,
    Announce,
    RunTrial,
    TrialFailure,
    TrialLength,
    TrialOutcome,
    TrialRequest,
    announce_nothing,
)

_HOPELESS = 1.5  # times the incumbent's step: no noise of a run makes up for it


class BudgetSpentError(Exception):
    """No time is left for another trial."""


def trial_workload(workload: Workload, length: TrialLength) -> Workload:
    """Return the job for a trial, which has fewer steps under the job's learning-rate schedule."""
    decay_steps = workload.optimizer.decay_steps or workload.steps
    return replace(
        workload,
        steps=length.steps,
        optimizer=replace(workload.optimizer, decay_steps=decay_steps),
        eval_every_steps=0,
        eval_batches=1,
        router_log_every_steps=1,
        ledger_step=WARM_UP_STEPS - 1,
        profile=ProfileSpec(),
        checkpoint=CheckpointSpec(),
    )


class TrialRunner:
    """A runner of all trials of a tuning, with their outcomes.

    `oom_bytes` is the smallest predicted peak of a layout that ran out of memory; a `budget_s` of 0
    means no limit.
    """

    def __init__(
        self,
        space: TuningSpace,
        predictor: StepPredictor,
        run_one: RunTrial,
        *,
        rules: AcceptanceRules,
        budget_s: float,
        announce: Announce = announce_nothing,
    ) -> None:
        self._announce = announce
        self._space = space
        self._predictor = predictor
        self._run_one = run_one
        self._rules = rules
        self._budget_s = budget_s
        self._outcomes: dict[TuningPoint, list[TrialOutcome]] = {}
        self._last_point: TuningPoint | None = None
        self.oom_bytes = float("inf")
        self.failed_points: set[TuningPoint] = set()
        self.run_count = 0
        self.spent_s = 0.0

    @property
    def points(self) -> tuple[TuningPoint, ...]:
        """Return the points that were run, in the order of their first runs."""
        return tuple(self._outcomes)

    def count_runs(self, point: TuningPoint) -> int:
        return len(self._outcomes.get(point, ()))

    def last_outcome(self, point: TuningPoint) -> TrialOutcome:
        """Return the last run of a point."""
        return self._outcomes[point][-1]

    def last_success(self, point: TuningPoint) -> TrialOutcome:
        """Return the last run of a point that did not fail."""
        latest_first = reversed(self._outcomes[point])
        return next(outcome for outcome in latest_first if outcome.failure is TrialFailure.NONE)

    def mean_step_s(self, point: TuningPoint) -> float:
        """Return the geometric mean of a point's runs; 0 where none has a figure."""
        outcomes = self._outcomes.get(point, [])
        seconds = [outcome.step_s for outcome in outcomes if outcome.step_s]
        if seconds:
            return exp(fmean(map(log, seconds)))
        return 0.0

    def announce_repeats(self, point: TuningPoint, count: int) -> None:
        """Say that so many further short runs of a point will be asked for."""
        first = self.count_runs(point) + 1
        self._announce([self._request(point, first + index) for index in range(count)])

    def run_pair(self, point: TuningPoint, incumbent: TuningPoint, number: int) -> float | None:
        """Return log(candidate / incumbent) of two runs in a row; None when the candidate fails.

        `number` counts the pairs of one comparison from 0. Which of the two runs first alternates,
        and a run of the incumbent that has just been made is used for the first pair.
        """
        hopeless_s = _HOPELESS * self.mean_step_s(incumbent)
        if number == 0 and self._last_point == incumbent:
            reference = self.last_outcome(incumbent)
            candidate = self.run_screen(point, hopeless_s)
        elif number % 2:
            self._announce_pair(incumbent, point, hopeless_s)
            reference = self.run_screen(incumbent)
            candidate = self.run_screen(point, hopeless_s)
        else:
            self._announce_pair(point, incumbent, hopeless_s)
            candidate = self.run_screen(point, hopeless_s)
            if candidate.failure is not TrialFailure.NONE:
                return None
            reference = self.run_screen(incumbent)
        if candidate.failure is not TrialFailure.NONE:
            return None
        if reference.failure is not TrialFailure.NONE:
            # The incumbent has run before, so this failure is a passing one.
            reference = self.last_success(incumbent)
        return log(candidate.step_s / reference.step_s)

    def _announce_pair(self, first: TuningPoint, second: TuningPoint, hopeless_s: float) -> None:
        self._announce(
            [
                self._request(point, self.count_runs(point) + 1, hopeless_s)
                for point in (first, second)
            ]
        )

    def run_screen(self, point: TuningPoint, hopeless_s: float = 0.0) -> TrialOutcome:
        """Make a short run, which need not be finished once its steps take `hopeless_s`.

        Raises:
            BudgetSpentError: it and a validation would take longer than there is time.
        """
        if self._budget_s and self.run_count and self.spent_s + self._reserve_s() > self._budget_s:
            raise BudgetSpentError
        return self.run(point, TrialLength.SCREEN, hopeless_s)

    def _reserve_s(self) -> float:
        """Return the seconds to expect of the next trial and a validation, by the runs so far."""
        mean_run_s = self.spent_s / self.run_count
        return mean_run_s * (1 + TrialLength.VALIDATE.steps / TrialLength.SCREEN.steps)

    def _request(
        self,
        point: TuningPoint,
        repeat: int,
        hopeless_s: float = 0.0,
        length: TrialLength = TrialLength.SCREEN,
    ) -> TrialRequest:
        plan = self._predictor.build_plan(point, trial_workload(self._space.workload, length))
        return TrialRequest(
            point=point, length=length, repeat=repeat, plan=plan, hopeless_s=hopeless_s
        )

    def run(self, point: TuningPoint, length: TrialLength, hopeless_s: float = 0.0) -> TrialOutcome:
        """Make a run, whatever the budget."""
        outcomes: list[TrialOutcome] = []
        if length is TrialLength.SCREEN:
            outcomes = self._outcomes.setdefault(point, [])
        request = self._request(point, len(outcomes) + 1, hopeless_s, length)
        outcome = self._run_one(request)
        self.run_count += 1
        self.spent_s += outcome.spent_s
        if length is TrialLength.VALIDATE:
            return outcome
        outcomes.append(outcome)
        self._last_point = point
        if outcome.failure is not TrialFailure.NONE:
            self.failed_points.add(point)
        if outcome.failure is TrialFailure.MEMORY:
            self.oom_bytes = min(self.oom_bytes, request.plan.estimate.peak_bytes)
        return outcome

    def estimate_noise(self) -> Noise:
        """Return the noise of the log ratio of two runs of one point in a row."""
        sequences = [
            [log(outcome.step_s) for outcome in outcomes if outcome.step_s]
            for outcomes in self._outcomes.values()
        ]
        return estimate_noise(
            sequences,
            prior_sd=self._rules.prior_sd,
            prior_degrees_of_freedom=self._rules.prior_degrees_of_freedom,
        )

    def measurements(self) -> tuple[PointMeasurement, ...]:
        """Return the measured step of each point that ran successfully."""
        return tuple(
            PointMeasurement(
                point=point,
                step_s=self.mean_step_s(point),
                load_factor=self.last_success(point).load_factor,
            )
            for point in self._outcomes
            if self.mean_step_s(point)
        )
