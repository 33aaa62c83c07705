"""The answer of a check: the jobs of a change, what each costs, and the budgets that it breaks."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.diagnosis.change_budgets import BudgetBreach
from moewright.diagnosis.plan_changes import PlanChanges
from moewright.spec.record import Record, Row


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
