"""The tuning procedure: fit, scale, profile, retune one variable, validate.

Every run is made by `run_one`, and every decision follows from the outcomes alone. The same
outcomes give the same decisions, so a journal that returns the old outcomes is enough to resume a
tuning that was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp, log

from moewright.diagnosis.remedies import REMEDIES
from moewright.diagnosis.remedy import RemedyContext
from moewright.spec.errors import BadInput
from moewright.spec.finding import Basis
from moewright.spec.plan import Verdict
from moewright.spec.units import mention
from moewright.tuning.decisions import (
    AcceptanceRules,
    Decision,
    IncumbentProfile,
    Interval,
    ResultCallback,
    Ruling,
    TuningPhase,
    TuningResult,
    log_ratio_interval,
)
from moewright.tuning.predictions import StepPredictor
from moewright.tuning.space import TuningPoint, TuningSpace
from moewright.tuning.trial_runner import BudgetSpentError, TrialRunner
from moewright.tuning.trials import (
    Announce,
    RunTrial,
    TrialFailure,
    TrialLength,
    TrialOutcome,
    announce_nothing,
)

_MAX_FINDINGS = 4  # whose fixes are tried
_TOTAL_PAIRS = 2
_MAX_STARTS = 5  # points of the planner's ranking that are tried where the start does not run


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prediction:
    """The planner's prediction of a point at the time of its trial; zeros for an illegal one."""

    step_s: float = 0.0
    ratio: float = 0.0  # to the incumbent
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """A change of one variable of the incumbent, and why it is tried."""

    point: TuningPoint
    why: str


class Tuner:
    """A tuning in progress.

    A `budget_s` of 0 means no limit; `watch` is called with the result after every decision, and
    `announce` with runs that are sure to be asked for, so that they can start beside each other.
    """

    def __init__(
        self,
        space: TuningSpace,
        run_one: RunTrial,
        *,
        rules: AcceptanceRules,
        budget_s: float,
        watch: ResultCallback,
        announce: Announce = announce_nothing,
    ) -> None:
        self._space = space
        self._rules = rules
        self._budget_s = budget_s
        self._watch = watch
        self.predictor = StepPredictor(space)
        self._runner = TrialRunner(
            space, self.predictor, run_one, rules=rules, budget_s=budget_s, announce=announce
        )
        self._decisions: list[Decision] = []
        self._profiles: list[IncumbentProfile] = []
        self._stops: list[tuple[TuningPhase, str]] = []
        self._incumbents: list[TuningPoint] = []  # the last in front
        self._validated: TrialOutcome | None = None
        self._winner: TuningPoint | None = None
        self._total_interval: Interval | None = None

    def run(self) -> TuningResult:
        """Run all phases; a point that runs is validated even when the budget is spent."""
        try:
            self._fit()
            if self._incumbents:
                self._scale()
                self._retune()
        except BudgetSpentError:
            ended = {phase for phase, _ in self._stops}
            current = next(phase for phase in TuningPhase if phase not in ended)
            minutes = f"{self._budget_s / 60:g} min"
            self._stop(current, f"the budget of {minutes} is spent, up to what validation takes")
        if self._incumbents and self._rules.basis is Basis.MEASURED:
            self._validate()
            self._compare_with_start()
        elif self._incumbents:
            self._winner = self._incumbents[0]
            self._stop(TuningPhase.VALIDATE, "not run: every figure is predicted")
        return self.result()

    def result(self) -> TuningResult:
        """Return the result so far."""
        winner = self._winner
        if winner is None and self._incumbents:
            winner = self._incumbents[0]
        return TuningResult(
            decisions=tuple(self._decisions),
            profiles=tuple(self._profiles),
            stops=tuple(self._stops),
            start=self._space.start,
            winner=winner,
            validated=self._validated,
            total_interval=self._total_interval,
            noise=self._runner.estimate_noise(),
            run_count=self._runner.run_count,
            spent_s=self._runner.spent_s,
            point_count=len(self._runner.points),
        )

    @property
    def _incumbent(self) -> TuningPoint:
        return self._incumbents[0]

    def _fit(self) -> None:
        """Run the job's own layout; where that does not run, the first ones of the planner's."""
        start = self._space.start
        if self._try_start(start, "the job's own layout"):
            self._stop(TuningPhase.FIT, f"{start} runs")
            return
        others = [point for point in self.predictor.rank_points(start) if point != start]
        for point in others[:_MAX_STARTS]:
            if self._try_start(point, "the planner's, for the start did not run"):
                self._stop(TuningPhase.FIT, f"{point} runs")
                return
        self._stop(TuningPhase.FIT, "no layout of the planner's first ones runs")

    def _try_start(self, point: TuningPoint, why: str) -> bool:
        """Return whether a point runs, and make it the incumbent if it does."""
        if reason := self._prune(point):
            self._decide(TuningPhase.FIT, point, why, Ruling.PRUNED, reason=reason)
            return False
        outcome = self._runner.run_screen(point)
        if outcome.failure is TrialFailure.NONE:
            self._runner.announce_repeats(point, self._rules.repeats - 1)
        with suppress(BudgetSpentError):  # one run is enough for a start
            for _ in range(self._rules.repeats - 1):
                if outcome.failure is TrialFailure.NONE:
                    outcome = self._runner.run_screen(point)
        if outcome.failure is not TrialFailure.NONE:
            self._decide(TuningPhase.FIT, point, why, Ruling.FAILED, reason=outcome.said)
            return False
        self._decide(TuningPhase.FIT, point, why, Ruling.START)
        self._keep(point)
        return True

    def _scale(self) -> None:
        """Try the planner's ranking from its top; every trial corrects it."""
        without_gain = 0
        while without_gain < self._rules.patience:
            allowed = self._rules.margin * self.predictor.log_error
            tried = self._tried
            ranked = self.predictor.rank_points(self._incumbent)
            untried = [point for point in ranked if point not in tried]
            promising = [point for point in untried if self._predict_log_ratio(point) < allowed]
            if not promising:
                self._stop(TuningPhase.SCALE, _describe_none_left(len(untried), allowed))
                return
            why = "first of the planner's ranking"
            decision = self._contest(TuningPhase.SCALE, promising[0], why)
            without_gain = _count_without_gain(without_gain, decision)
        self._stop(TuningPhase.SCALE, f"{without_gain} candidates in a row brought no gain")

    def _retune(self) -> None:
        """Change one variable at a time.

        First come the changes that the incumbent's walls ask for, then what is left, the best
        predicted first.
        """
        without_gain = 0
        while without_gain < 2 * self._rules.patience:
            move = next(self._moves(), None)
            if move is None:
                self._stop(TuningPhase.RETUNE, "no change of one variable is left")
                return
            if reason := self._reason_to_pass_over(move.point):
                self._decide(
                    TuningPhase.RETUNE, move.point, move.why, Ruling.PASSED_OVER, reason=reason
                )
                continue
            decision = self._contest(TuningPhase.RETUNE, move.point, move.why)
            without_gain = _count_without_gain(without_gain, decision)
        self._stop(TuningPhase.RETUNE, f"{without_gain} changes in a row brought no gain")

    def _reason_to_pass_over(self, point: TuningPoint) -> str:
        """Return why a change need not be run; "" when it may be a gain."""
        if self._prune(point):
            return ""  # the contest rules on it, without a run
        allowed = self._rules.margin * self.predictor.log_error
        log_ratio = self._predict_log_ratio(point)
        if log_ratio >= allowed:
            error = ""
            if allowed:
                error = f", the planner is off by {exp(allowed) - 1:.0%} here"
            return f"predicted {exp(log_ratio) - 1:+.1%}{error}"
        noise_sd = self._runner.estimate_noise().sd
        least = max(self._rules.min_gain, noise_sd)
        for ratio in self._measured_ratios(point):
            if log(ratio) > least:
                return (
                    f"the same change measured {ratio - 1:+.1%} "
                    "beside other choices than the layout's"
                )
        return ""

    def _measured_ratios(self, point: TuningPoint) -> Iterator[float]:
        """Yield the measured ratios of the same change of layout under other training choices."""
        for measured in self._runner.points:
            if measured.layout != point.layout:
                continue
            step_s = self._runner.mean_step_s(measured)
            reference = replace(measured, layout=self._incumbent.layout)
            reference_s = self._runner.mean_step_s(reference)
            if step_s and reference_s:
                yield step_s / reference_s

    def _moves(self) -> Iterator[_Move]:
        """Yield changes of one variable that were not decided yet, in the order of trying."""
        tried = self._tried
        yield from self._remedies(tried)
        neighbours = [
            (why, point)
            for why, point in self._space.neighbours(self._incumbent)
            if point not in tried
        ]
        neighbours.sort(key=lambda pair: (self.predictor.predict_step_s(pair[1]), pair[0]))
        for why, point in neighbours:
            yield _Move(point=point, why=f"one variable: {why}")

    def _remedies(self, tried: set[TuningPoint]) -> Iterator[_Move]:
        """Yield the remedies of the incumbent's first findings that can be run."""
        space = self._space
        incumbent = self._incumbent
        context = RemedyContext(model=space.model, hardware=space.hardware, layout=incumbent.layout)
        findings = self._runner.last_success(incumbent).findings
        for finding in findings[:_MAX_FINDINGS]:
            for remedy in REMEDIES[finding.cause]:
                if remedy.change is None:
                    continue
                layout = remedy.change(context)
                point = replace(incumbent, layout=layout)
                if layout == incumbent.layout or point in tried:
                    continue
                if space.contains(point) and not space.reasons_against(point):
                    why = f"{finding.wall} ({finding.cause}): {remedy.text}"
                    yield _Move(point=point, why=why)

    def _validate(self) -> None:
        """Validate the winner in a long run; where it fails, the incumbent before it."""
        for point in self._incumbents:
            outcome = self._runner.run(point, TrialLength.VALIDATE)
            failed_checks = [check for check in outcome.checks if not check.passed]
            shown_checks = failed_checks or outcome.checks
            checked = "; ".join(f"{check.name}: {check.said}" for check in shown_checks)
            is_valid = outcome.failure is TrialFailure.NONE and not failed_checks
            self._winner = point
            self._validated = outcome
            self._decide(
                TuningPhase.VALIDATE,
                point,
                mention("{} steps", outcome.steps) or "a long run",
                Ruling.VALID if is_valid else Ruling.INVALID,
                reason=outcome.said or checked,
            )
            if is_valid:
                self._stop(TuningPhase.VALIDATE, f"{point} is valid")
                return
        self._winner = None
        self._incumbents.clear()
        self._stop(TuningPhase.VALIDATE, "nothing that was kept is valid")

    def _compare_with_start(self) -> None:
        """Run winner and start in turns: single gains do not sum to that of several changes."""
        if self._winner is None or self._winner == self._incumbents[-1]:
            return
        start = self._incumbents[-1]
        log_ratios = []
        with suppress(BudgetSpentError):
            for number in range(_TOTAL_PAIRS):
                log_ratio = self._runner.run_pair(self._winner, start, number)
                if log_ratio is not None:
                    log_ratios.append(log_ratio)
        if log_ratios:
            noise = self._runner.estimate_noise()
            self._total_interval = log_ratio_interval(log_ratios, noise, looks=1)

    def _contest(self, phase: TuningPhase, point: TuningPoint, why: str) -> Decision:
        """Run candidate against incumbent, pair by pair, until the interval decides."""
        if reason := self._prune(point):
            return self._decide(phase, point, why, Ruling.PRUNED, reason=reason)
        prediction = self._predict(point)
        log_ratios: list[float] = []
        ruling = None
        interval = None
        while ruling is None and len(log_ratios) < self._rules.max_pairs:
            log_ratio = self._runner.run_pair(point, self._incumbent, len(log_ratios))
            if log_ratio is None:
                reason = self._runner.last_outcome(point).said
                return self._decide(phase, point, why, Ruling.FAILED, reason=reason)
            log_ratios.append(log_ratio)
            noise = self._runner.estimate_noise()
            interval = log_ratio_interval(log_ratios, noise, looks=self._rules.max_pairs)
            ruling = self._judge(interval)
        decision = self._decide(
            phase,
            point,
            why,
            ruling or Ruling.NO_GAIN,
            interval=interval,
            prediction=prediction,
        )
        if decision.ruling is Ruling.KEPT:
            self._keep(point)
        return decision

    def _judge(self, interval: Interval) -> Ruling | None:
        """Return the ruling that an interval allows; None where another pair is needed."""
        if interval.high < 0 and interval.gain >= self._rules.min_gain / 2:
            return Ruling.KEPT
        if interval.low > log(1 - self._rules.min_gain):
            if interval.low > 0:
                return Ruling.SLOWER
            return Ruling.NO_GAIN
        if interval.mean >= 0 and interval.pairs >= self._rules.futile_pairs:
            return Ruling.NO_GAIN
        return None

    def _keep(self, point: TuningPoint) -> None:
        self._incumbents.insert(0, point)
        outcome = self._runner.last_success(point)
        self._profiles.append(IncumbentProfile(point=point, outcome=outcome))
        self._watch(self.result())

    def _prune(self, point: TuningPoint) -> str:
        """Return why a point is not run at all; "" when it may be."""
        try:
            prediction = self.predictor.estimate(point)
        except BadInput as error:
            return str(error)
        if prediction.verdict is Verdict.OOM:
            return "predicted not to fit"
        if prediction.peak_bytes >= self._runner.oom_bytes:
            return "needs at least the memory of a layout that ran out of it"
        return ""

    @property
    def _tried(self) -> set[TuningPoint]:
        return {decision.point for decision in self._decisions} | self._runner.failed_points

    def _predict_log_ratio(self, point: TuningPoint) -> float:
        """Return the predicted log ratio to the incumbent."""
        incumbent_s = self.predictor.predict_step_s(self._incumbent)
        return log(self.predictor.predict_step_s(point) / incumbent_s)

    def _predict(self, point: TuningPoint) -> _Prediction:
        """Return the planner's prediction of a point under the current constants."""
        try:
            return _Prediction(
                step_s=self.predictor.predict_step_s(point),
                ratio=exp(self._predict_log_ratio(point)) if self._incumbents else 1.0,
                peak_bytes=self.predictor.estimate(point).peak_bytes,
            )
        except BadInput:
            return _Prediction()

    def _decide(
        self,
        phase: TuningPhase,
        point: TuningPoint,
        why: str,
        ruling: Ruling,
        *,
        reason: str = "",
        interval: Interval | None = None,
        prediction: _Prediction | None = None,
    ) -> Decision:
        """Record the decision on a point, and refit the predictor to the runs."""
        prediction = prediction or self._predict(point)
        mean_step_s = self._runner.mean_step_s(point)
        decision = Decision(
            phase=phase,
            point=point,
            why=why,
            predicted_s=prediction.step_s,
            predicted_ratio=prediction.ratio,
            predicted_peak_bytes=prediction.peak_bytes,
            ruling=ruling,
            reason=reason,
            step_s=mean_step_s,
            interval=interval,
            run_count=self._runner.count_runs(point),
            predictor_error=self.predictor.log_error,
        )
        self._decisions.append(decision)
        is_measured = self._rules.basis is Basis.MEASURED
        if mean_step_s and is_measured and phase is not TuningPhase.VALIDATE:
            self.predictor.refit(self._runner.measurements())
        self._watch(self.result())
        return decision

    def _stop(self, phase: TuningPhase, why: str) -> None:
        self._stops.append((phase, why))
        self._watch(self.result())


def _describe_none_left(untried: int, allowed: float) -> str:
    if not untried:
        return "every layout was tried or pruned"
    limit = f"{exp(allowed) - 1:.0%}"
    return f"none of the {untried} layouts left is predicted within {limit} of the incumbent"


def _count_without_gain(without_gain: int, decision: Decision) -> int:
    """Return how many candidates in a row brought no gain; one that was not run does not count."""
    if decision.ruling is Ruling.PRUNED:
        return without_gain
    if decision.ruling is Ruling.KEPT:
        return 0
    return without_gain + 1
