"""A check of a change: its budgets, what each of its jobs costs, and the budgets that break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from math import isinf

from moewright.diagnosis.plan_changes import Measure, MeasureChange, PlanChanges
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Verdict
from moewright.spec.record import Record, Row
from moewright.spec.units import format_bytes, format_count, format_seconds

_ORDER = (Verdict.FITS, Verdict.UNCERTAIN, Verdict.OOM)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureBudget:
    """The most that a measure may be, in SI units, and may grow, as a share of what it was."""

    most: float | None = None
    growth: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeBudgets:
    """The budgets of a change; what is not said is free.

    `verdict` is the worst that the job after the change may have. With `keep_training` the model
    and what trains it stay as they are: layouts, hardware and kernels may change.
    """

    step_s: MeasureBudget = MeasureBudget()
    peak_bytes: MeasureBudget = MeasureBudget()
    states_bytes: MeasureBudget = MeasureBudget()
    saved_bytes: MeasureBudget = MeasureBudget()
    host_bytes: MeasureBudget = MeasureBudget()
    comm_bytes: MeasureBudget = MeasureBudget()
    calls: MeasureBudget = MeasureBudget()
    flops: MeasureBudget = MeasureBudget()
    all_flops: MeasureBudget = MeasureBudget()
    graph_breaks: MeasureBudget = MeasureBudget()
    verdict: Verdict = Verdict.OOM
    keep_training: bool = False

    def find(self, measure: Measure) -> MeasureBudget:
        """Return the budget of a measure."""
        budget: MeasureBudget = getattr(self, measure.value)
        return budget

    def check(self, where: str) -> None:
        """Raise BadInput for a budget that is below nothing."""
        for field in fields(self):
            budget = getattr(self, field.name)
            if not isinstance(budget, MeasureBudget):
                continue
            if budget.most is not None and budget.most < 0:
                raise _refuse(where, f"{field.name}.most", budget.most, "0")
            if budget.growth is not None and budget.growth < -1:
                raise _refuse(where, f"{field.name}.growth", budget.growth, "-1")


def _refuse(where: str, key: str, value: float, least: str) -> BadInput:
    rule = f"must be at least {least}"
    return BadInput(
        Reason(field=f"{where}: budgets.{key}", value=f"{value:g}", rule=rule, nearest=least)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetBreach:
    """A budget that a change breaks: its key in the file, and a sentence on it."""

    budget: str
    text: str


def find_breaches(changes: PlanChanges, budgets: ChangeBudgets) -> Iterator[BudgetBreach]:
    """Yield the budgets that a change breaks.

    One on a step that has no predicted time is broken: nothing shows that it is kept.
    """
    for measure in Measure:
        budget = budgets.find(measure)
        change = changes.find(measure)
        if change is None:
            if budget.most is not None or budget.growth is not None:
                text = f"{measure.value} has a budget and no prediction on this device"
                yield BudgetBreach(budget=measure.value, text=text)
            continue
        value = format_measure(measure, change.after)
        if budget.most is not None and change.after > budget.most:
            most = format_measure(measure, budget.most)
            text = f"{measure.value} is {value}, over the most of {most}"
            yield BudgetBreach(budget=f"{measure.value}.most", text=text)
        if budget.growth is not None and not _keeps_growth(change, budget.growth):
            text = (
                f"{measure.value} grows by {format_growth(change)} to {value}, over the budget "
                f"of {budget.growth:+.2%}"
            )
            yield BudgetBreach(budget=f"{measure.value}.growth", text=text)
    if _ORDER.index(changes.verdict_after) > _ORDER.index(budgets.verdict):
        text = f"the verdict is {changes.verdict_after}, worse than {budgets.verdict}"
        yield BudgetBreach(budget="verdict", text=text)
    trained = [switch for switch in changes.switches if switch.changes_training]
    if budgets.keep_training and trained:
        text = f"training changes: {'; '.join(map(str, trained))}"
        yield BudgetBreach(budget="keep_training", text=text)


def _keeps_growth(change: MeasureChange, growth: float) -> bool:
    """Tell whether a measure is at most what it was and its share more, as the file writes that.

    A share of nothing is nothing: what is 0 before and after keeps every budget. In fractions, for
    115 is 15 % more than 100, and 100 times the float 1.15 is less.
    """
    if isinf(growth):
        return True
    return Fraction(change.after) <= Fraction(change.before) * (1 + Fraction(str(growth)))


def format_measure(measure: Measure, value: float) -> str:
    """Return a figure with its unit; counts of bytes and calls are whole beside it."""
    if measure is Measure.STEP:
        return format_seconds(value)
    if measure in (Measure.CALLS, Measure.GRAPH_BREAKS):
        return f"{value:,.0f}"
    if measure in (Measure.FLOPS, Measure.ALL_FLOPS):
        return format_count(value)
    return format_bytes(value)


def format_growth(change: MeasureChange) -> str:
    """Return the growth of a measure in percent; "new" where there was none of it."""
    if isinf(change.growth):
        return "new"
    return f"{change.growth:+.2%}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionChange:
    """An option or a variable of a script with other words; "" stands for none."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCheck:
    """A job before and after a change.

    `changes` is None where one side has no such file, which `note` says. `options` are those that
    differ as written. `line` is the first line of the file after that has one of them, from 1.
    """

    path: str
    changes: PlanChanges | None
    breaches: tuple[BudgetBreach, ...] = ()
    options: tuple[OptionChange, ...] = ()
    notes: tuple[str, ...] = ()
    note: str = ""
    line: int = 1


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Check(Record):
    """The jobs of a change, each with what it costs and the budgets that it breaks."""

    before: str
    after: str
    jobs: tuple[JobCheck, ...]

    @property
    def keeps_budgets(self) -> bool:
        """Return whether no job breaks a budget."""
        return not any(job.breaches for job in self.jobs)

    @property
    def keeps_fit(self) -> bool:
        """Return whether every job that fitted, or might, still does."""
        return not any(job.changes.breaks_fit for job in self.jobs if job.changes is not None)

    @property
    def is_neutral(self) -> bool:
        """Return whether no job changed in anything that is planned."""
        return all(job.changes is not None and job.changes.is_neutral for job in self.jobs)

    def title(self) -> str:
        """Return the verdict."""
        broken = sum(len(job.breaches) for job in self.jobs)
        if broken:
            return f"{broken} broken budgets" if broken > 1 else "a broken budget"
        if not self.keeps_fit:
            return "does not fit any more"
        return "nothing that is planned changes" if self.is_neutral else "within the budgets"

    def to_rows(self) -> list[Row]:
        """Return a row for each measure of each job."""
        return [
            {"job": job.path, **row}
            for job in self.jobs
            if job.changes is not None
            for row in job.changes.to_rows()
        ]
