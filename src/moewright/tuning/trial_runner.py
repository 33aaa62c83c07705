"""Runs of points, one after the other and in turns with the incumbent, within a budget of time."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from statistics import fmean

from moewright.spec.workload import CheckpointSpec, ProfileSpec, Workload
from moewright.tuning.decisions import Rules
from moewright.tuning.paired_test import Noise, noise_of
from moewright.tuning.predictions import Prices, Taught
from moewright.tuning.space import Point, Space
from moewright.tuning.trials import UNSETTLED, Ask, Failure, Length, Outcome, RunOne


class BudgetSpentError(Exception):
    """No time is left for another trial."""


def trial_workload(workload: Workload, length: Length) -> Workload:
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
        ledger_step=UNSETTLED - 1,
        profile=ProfileSpec(),
        checkpoint=CheckpointSpec(),
    )


class Turns:
    """All runs of a tuning. `memory_bytes` is the predicted peak of the smallest layout that ran
    out of memory."""

    def __init__(
        self, space: Space, prices: Prices, run_one: RunOne, *, rules: Rules, budget_s: float
    ) -> None:
        self._space, self._prices, self._run_one = space, prices, run_one
        self._rules, self._budget_s = rules, budget_s
        self._outcomes: dict[Point, list[Outcome]] = {}
        self._last: Point | None = None
        self.memory_bytes = float("inf")
        self.failed: set[Point] = set()
        self.runs, self.spent_s = 0, 0.0

    @property
    def points(self) -> tuple[Point, ...]:
        """Those that were run, in the order of their first."""
        return tuple(self._outcomes)

    def count(self, point: Point) -> int:
        return len(self._outcomes.get(point, ()))

    def last(self, point: Point) -> Outcome:
        """The last run of a point."""
        return self._outcomes[point][-1]

    def last_good(self, point: Point) -> Outcome:
        """The last run of a point that did not fail."""
        return next(one for one in reversed(self._outcomes[point]) if one.failure is Failure.NONE)

    def mean_s(self, point: Point) -> float:
        """Geometric mean of a point's runs; 0 where none has a figure."""
        seen = [one.step_s for one in self._outcomes.get(point, []) if one.step_s]
        return exp(fmean(map(log, seen))) if seen else 0.0

    def pair(self, point: Point, incumbent: Point, number: int) -> float | None:
        """log(candidate / incumbent) of two runs in a row; the turns change from pair to pair, and
        an incumbent's run that has just been made is taken. None when the candidate fails.
        """
        if number == 0 and self._last == incumbent:
            beside = self.last(incumbent)
            mine = self.once(point)
        elif number % 2:
            beside = self.once(incumbent)
            mine = self.once(point)
        else:
            mine = self.once(point)
            if mine.failure is not Failure.NONE:
                return None
            beside = self.once(incumbent)
        if Failure.NONE is not mine.failure:
            return None
        if beside.failure is not Failure.NONE:  # it has run before: a fault of the moment
            beside = self.last_good(incumbent)
        return log(mine.step_s / beside.step_s)

    def once(self, point: Point) -> Outcome:
        """A short run. Raises BudgetSpentError where it and a validation would take longer than
        there is time."""
        if self._budget_s and self.runs and self.spent_s + self._reserve_s() > self._budget_s:
            raise BudgetSpentError
        return self.ask(point, Length.SCREEN)

    def _reserve_s(self) -> float:
        """What the next trial and a validation take, by the runs so far."""
        screen = self.spent_s / self.runs
        return screen * (1 + Length.VALIDATE.steps / Length.SCREEN.steps)

    def ask(self, point: Point, length: Length) -> Outcome:
        """A run, whatever the budget."""
        known = self._outcomes.setdefault(point, []) if length is Length.SCREEN else []
        plan = self._prices.plan(point, trial_workload(self._space.workload, length))
        outcome = self._run_one(Ask(point=point, length=length, repeat=len(known) + 1, plan=plan))
        self.runs += 1
        self.spent_s += outcome.spent_s
        if length is Length.VALIDATE:
            return outcome
        known.append(outcome)
        self._last = point
        if outcome.failure is not Failure.NONE:
            self.failed.add(point)
            if outcome.failure is Failure.MEMORY:
                self.memory_bytes = min(self.memory_bytes, plan.estimate.peak_bytes)
        return outcome

    def noise(self) -> Noise:
        """Of the log ratio of two runs of one point in a row."""
        sequences = [
            [log(one.step_s) for one in found if one.step_s] for found in self._outcomes.values()
        ]
        return noise_of(
            sequences, prior_sd=self._rules.prior_sd, prior_freedom=self._rules.prior_freedom
        )

    def taught(self) -> tuple[Taught, ...]:
        """What each point that ran took."""
        return tuple(
            Taught(
                point=point,
                step_s=self.mean_s(point),
                load_factor=self.last_good(point).load_factor,
            )
            for point in self._outcomes
            if self.mean_s(point)
        )
