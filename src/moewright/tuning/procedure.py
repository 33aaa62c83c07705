"""The tuning procedure: fit, scale, profile, retune one variable, validate.

Every run is asked of `run_one`, and every decision follows from the outcomes alone: the same
outcomes give the same decisions, so a journal that hands out the old ones is all it takes to go on
after a kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import exp, log

from moewright.diagnosis.remedies import REMEDIES, RemedyContext
from moewright.spec.errors import BadInput
from moewright.spec.finding import Basis
from moewright.spec.plan import Verdict
from moewright.tuning.decisions import (
    AcceptanceRules,
    Decision,
    IncumbentProfile,
    ResultCallback,
    Ruling,
    TuningPhase,
    TuningResult,
)
from moewright.tuning.paired_test import Interval, log_ratio_interval
from moewright.tuning.predictions import StepPredictor
from moewright.tuning.space import TuningPoint, TuningSpace
from moewright.tuning.trial_runner import BudgetSpentError, TrialRunner
from moewright.tuning.trials import RunTrial, TrialFailure, TrialFinding, TrialLength, TrialOutcome

_MAX_FINDINGS = 4  # whose fixes are tried
_TOTAL_PAIRS = 2
_MAX_STARTS = 5  # points of the planner's that are tried for a start that does not run


class Tuner:
    """One tuning under way. `budget_s` of 0 is none; `watch` sees the result after every
    decision."""

    def __init__(
        self,
        space: TuningSpace,
        run_one: RunTrial,
        *,
        rules: AcceptanceRules,
        budget_s: float,
        watch: ResultCallback,
    ) -> None:
        self._space, self._rules, self._budget_s, self._watch = space, rules, budget_s, watch
        self.predictor = StepPredictor(space)
        self._turns = TrialRunner(space, self.predictor, run_one, rules=rules, budget_s=budget_s)
        self._decisions: list[Decision] = []
        self._profiles: list[IncumbentProfile] = []
        self._stops: list[tuple[TuningPhase, str]] = []
        self._best: list[TuningPoint] = []  # incumbents, the last in front
        self._validated: TrialOutcome | None = None
        self._winner: TuningPoint | None = None
        self._total: Interval | None = None

    def run(self) -> TuningResult:
        """All phases. What runs is validated even when the budget is spent."""
        try:
            self._fit()
            if self._best:
                self._scale()
                self._retune()
        except BudgetSpentError:
            done = {phase for phase, _ in self._stops}
            here = next(phase for phase in TuningPhase if phase not in done)
            self._stop(
                here,
                f"the budget of {self._budget_s / 60:g} min is spent, up to what validation takes",
            )
        if self._best and self._rules.basis is Basis.MEASURED:
            self._validate()
            self._compare_with_start()
        elif self._best:
            self._winner = self._best[0]
            self._stop(TuningPhase.VALIDATE, "not run: every figure is predicted")
        return self.result()

    def result(self) -> TuningResult:
        return TuningResult(
            decisions=tuple(self._decisions),
            profiles=tuple(self._profiles),
            stops=tuple(self._stops),
            start=self._space.start,
            winner=self._winner or (self._best[0] if self._best else None),
            validated=self._validated,
            total_interval=self._total,
            noise=self._turns.estimate_noise(),
            run_count=self._turns.run_count,
            spent_s=self._turns.spent_s,
            point_count=len(self._turns.points),
        )

    def _fit(self) -> None:
        """The start as the job has it; where that does not run, the planner's own."""
        first = self._space.start
        others = (point for point in self.predictor.rank_points(first) if point != first)
        for number, point in enumerate((first, *others)):
            if number > _MAX_STARTS:
                break
            why = (
                "the job's own layout"
                if point == first
                else "the planner's, for the start did not run"
            )
            if self._base(point, why):
                self._stop(TuningPhase.FIT, f"{point} runs")
                return
        self._stop(TuningPhase.FIT, "no layout of the planner's first ones runs")

    def _base(self, point: TuningPoint, why: str) -> bool:
        if pruned := self._pruned(point):
            self._decide(TuningPhase.FIT, point, why, Ruling.PRUNED, said=pruned)
            return False
        outcome = self._turns.run_screen(point)
        with suppress(BudgetSpentError):  # one run is a start
            for _ in range(self._rules.repeats - 1):
                if outcome.failure is TrialFailure.NONE:
                    outcome = self._turns.run_screen(point)
        if outcome.failure is not TrialFailure.NONE:
            self._decide(TuningPhase.FIT, point, why, Ruling.FAILED, said=outcome.said)
            return False
        self._decide(TuningPhase.FIT, point, why, Ruling.START)
        self._keep(point)
        return True

    def _scale(self) -> None:
        """Down the planner's ranking, which every trial corrects."""
        idle = 0
        while idle < self._rules.patience:
            incumbent = self._best[0]
            allowed = self._rules.margin * self.predictor.log_error
            tried = self._tried
            fresh = [point for point in self.predictor.rank_points(incumbent) if point not in tried]
            hopeful = [point for point in fresh if self._ahead(point) < allowed]
            if not hopeful:
                self._stop(TuningPhase.SCALE, self._none_left(len(fresh), allowed))
                return
            decision = self._contest(
                TuningPhase.SCALE, hopeful[0], "first of the planner's ranking"
            )
            if decision.ruling is not Ruling.PRUNED:
                idle = 0 if decision.ruling is Ruling.KEPT else idle + 1
        self._stop(TuningPhase.SCALE, f"{idle} candidates in a row brought no gain")

    def _none_left(self, left: int, allowed: float) -> str:
        if not left:
            return "every layout was tried or pruned"
        return f"none of the {left} layouts left is predicted within {exp(allowed) - 1:.0%} of the incumbent"

    def _retune(self) -> None:
        """One variable at a time: what the incumbent's walls ask for, then what is left, the best
        predicted first."""
        idle, most = 0, 2 * self._rules.patience
        while idle < most:
            move = next(self._moves(), None)
            if move is None:
                self._stop(TuningPhase.RETUNE, "no change of one variable is left")
                return
            why, point = move
            if said := self._hopeless(point):
                self._decide(TuningPhase.RETUNE, point, why, Ruling.PASSED_OVER, said=said)
                continue
            decision = self._contest(TuningPhase.RETUNE, point, why)
            if decision.ruling is not Ruling.PRUNED:
                idle = 0 if decision.ruling is Ruling.KEPT else idle + 1
        self._stop(TuningPhase.RETUNE, f"{idle} changes in a row brought no gain")

    def _hopeless(self, point: TuningPoint) -> str:
        """Why a change need not be run; "" when it may be a gain."""
        if self._pruned(point):
            return ""  # that is said of it
        allowed, ahead = self._rules.margin * self.predictor.log_error, self._ahead(point)
        if ahead >= allowed:
            off = f", the planner is off by {exp(allowed) - 1:.0%} here" if allowed else ""
            return f"predicted {exp(ahead) - 1:+.1%}{off}"
        least = max(self._rules.min_gain, self._turns.estimate_noise().sd)
        for other in self._turns.points:
            beside = replace(other, layout=self._best[0].layout)
            if (
                other.layout == point.layout
                and self._turns.mean_step_s(other)
                and self._turns.mean_step_s(beside)
            ):
                ratio = self._turns.mean_step_s(other) / self._turns.mean_step_s(beside)
                if log(ratio) > least:
                    return f"the same change measured {ratio - 1:+.1%} beside other choices than the layout's"
        return ""

    def _moves(self) -> Iterator[tuple[str, TuningPoint]]:
        """Changes of one variable that nothing was decided of yet, in the order of trying."""
        incumbent, space = self._best[0], self._space
        tried = self._tried
        job = RemedyContext(model=space.model, hardware=space.hardware, layout=incumbent.layout)
        for finding in self._findings()[:_MAX_FINDINGS]:
            for remedy in REMEDIES[finding.cause]:
                layout = remedy.change(job) if remedy.change else incumbent.layout
                point = replace(incumbent, layout=layout)
                if (
                    layout == incumbent.layout
                    or point in tried
                    or not space.contains(point)
                    or space.reasons_against(point)
                ):
                    continue
                yield f"{finding.wall} ({finding.cause}): {remedy.text}", point
        rest = [(why, point) for why, point in space.neighbours(incumbent) if point not in tried]
        for why, point in sorted(
            rest, key=lambda one: (self.predictor.predict_step_s(one[1]), one[0])
        ):
            yield f"one variable: {why}", point

    def _findings(self) -> tuple[TrialFinding, ...]:
        return self._turns.last_success(self._best[0]).findings

    def _validate(self) -> None:
        """The winner in a long run; where it fails, the incumbent before it."""
        for point in self._best:
            outcome = self._turns.run(point, TrialLength.VALIDATE)
            bad = [check for check in outcome.checks if not check.passed]
            said = outcome.said or "; ".join(
                f"{check.name}: {check.said}" for check in bad or outcome.checks
            )
            good = outcome.failure is TrialFailure.NONE and not bad
            self._winner, self._validated = point, outcome
            why = f"{outcome.steps} steps" if outcome.steps else "a long run"
            self._decide(
                TuningPhase.VALIDATE,
                point,
                why,
                Ruling.VALID if good else Ruling.INVALID,
                said=said,
            )
            if good:
                break
        else:
            self._winner = None
            self._best.clear()
            self._stop(TuningPhase.VALIDATE, "nothing that was kept is valid")
            return
        self._stop(TuningPhase.VALIDATE, f"{self._winner} is valid")

    def _compare_with_start(self) -> None:
        """Winner and start in turns: several changes together, which single gains do not sum to."""
        if self._winner is None or self._winner == self._best[-1]:
            return
        start, ratios = self._best[-1], []
        with suppress(BudgetSpentError):
            for number in range(_TOTAL_PAIRS):
                ratio = self._turns.run_pair(self._winner, start, number)
                ratios += [] if ratio is None else [ratio]
        if ratios:
            self._total = log_ratio_interval(ratios, self._turns.estimate_noise(), looks=1)

    def _contest(self, phase: TuningPhase, point: TuningPoint, why: str) -> Decision:
        """Candidate against incumbent, pair by pair, until the interval decides."""
        if pruned := self._pruned(point):
            return self._decide(phase, point, why, Ruling.PRUNED, said=pruned)
        before = self._facts(point)
        ratios: list[float] = []
        ruling, found = Ruling.NO_GAIN, None
        while len(ratios) < self._rules.max_pairs:
            ratio = self._turns.run_pair(point, self._best[0], len(ratios))
            if ratio is None:
                return self._decide(
                    phase, point, why, Ruling.FAILED, said=self._turns.last_outcome(point).said
                )
            ratios.append(ratio)
            found = log_ratio_interval(
                ratios, self._turns.estimate_noise(), looks=self._rules.max_pairs
            )
            if found.high < 0 and found.gain >= self._rules.min_gain / 2:
                ruling = Ruling.KEPT
                break
            if found.low > log(1 - self._rules.min_gain):
                ruling = Ruling.SLOWER if found.low > 0 else Ruling.NO_GAIN
                break
            if found.mean >= 0 and len(ratios) >= self._rules.futile_pairs:
                break
        decision = self._decide(phase, point, why, ruling, found=found, facts=before)
        if ruling is Ruling.KEPT:
            self._keep(point)
        return decision

    def _keep(self, point: TuningPoint) -> None:
        self._best.insert(0, point)
        self._profiles.append(
            IncumbentProfile(point=point, outcome=self._turns.last_success(point))
        )
        self._watch(self.result())

    def _pruned(self, point: TuningPoint) -> str:
        """Why a point is not run at all; "" when it may be."""
        try:
            found = self.predictor.estimate(point)
        except BadInput as error:
            return str(error)
        if found.verdict is Verdict.OOM:
            return "predicted not to fit"
        if found.peak_bytes >= self._turns.oom_bytes:
            return "needs at least the memory of a layout that ran out of it"
        return ""

    @property
    def _tried(self) -> set[TuningPoint]:
        return {decision.point for decision in self._decisions} | self._turns.failed_points

    def _ahead(self, point: TuningPoint) -> float:
        """Predicted log ratio to the incumbent."""
        return log(
            self.predictor.predict_step_s(point) / self.predictor.predict_step_s(self._best[0])
        )

    def _facts(self, point: TuningPoint) -> tuple[float, float, int]:
        """Predicted seconds, ratio to the incumbent and peak, by the constants of now."""
        try:
            step_s = self.predictor.predict_step_s(point)
            ratio = exp(self._ahead(point)) if self._best else 1.0
            return step_s, ratio, self.predictor.estimate(point).peak_bytes
        except BadInput:
            return 0.0, 0.0, 0

    def _decide(
        self,
        phase: TuningPhase,
        point: TuningPoint,
        why: str,
        ruling: Ruling,
        *,
        said: str = "",
        found: Interval | None = None,
        facts: tuple[float, float, int] | None = None,
    ) -> Decision:
        """Write down what became of a point, and learn from its runs."""
        step_s, ratio, peak = facts or self._facts(point)
        mean_s = self._turns.mean_step_s(point)
        decision = Decision(
            phase=phase,
            point=point,
            why=why,
            predicted_s=step_s,
            predicted_ratio=ratio,
            predicted_peak_bytes=peak,
            ruling=ruling,
            reason=said,
            step_s=mean_s,
            interval=found,
            run_count=self._turns.count_runs(point),
            predictor_error=self.predictor.log_error,
        )
        self._decisions.append(decision)
        if mean_s and phase is not TuningPhase.VALIDATE and self._rules.basis is Basis.MEASURED:
            self.predictor.refit(self._turns.measurements())
        self._watch(self.result())
        return decision

    def _stop(self, phase: TuningPhase, why: str) -> None:
        self._stops.append((phase, why))
        self._watch(self.result())
