"""Layouts side by side; one with an option of its job changed; a budget by number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moewright.codec import format_layout
from moewright.codec.layout_words import describe_layout
from moewright.diagnosis.judgement import Quality, describe_fit, rate_plan
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate, Plan, TimePart, Verdict
from moewright.spec.record import Record, Row, spread
from moewright.view.plan_view import (
    JobView,
    ListedFigures,
    NamedValue,
    build_job_view,
    list_figures,
    sum_components,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPlan:
    """A layout beside the first one.

    `step_changes` by part and `memory_changes` by component, of each one's fullest rank, sum to the
    differences of step and peak. `lines` say what speaks against it; of an illegal layout they are
    all there is, and `headline` is "". `quality` is beside the fastest here that fits.
    """

    layout: str
    lines: tuple[str, ...]
    words: str = ""
    headline: str = ""
    quality: Quality = Quality.UNJUDGED
    figures: ListedFigures = field(
        default=ListedFigures(),
        metadata=spread(
            "verdict", "step_s", "peak_bytes", "margin_bytes", "tokens_per_s_per_device", "mfu"
        ),
    )
    step_changes: tuple[NamedValue, ...] = ()
    memory_changes: tuple[NamedValue, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ComparisonView(Record):
    """The first layout and those beside it."""

    job: JobView
    plans: tuple[ComparedPlan, ...]

    def title(self) -> str:
        """Return the job."""
        return self.job.title()

    def to_rows(self) -> list[Row]:
        """Return a row for each layout."""
        return [
            {
                "layout": plan.layout,
                "step_s": plan.figures.step_s,
                "peak_bytes": plan.figures.peak_bytes,
            }
            for plan in self.plans
        ]


def build_comparison_view(
    first: Plan, others: Sequence[Plan | str], lines: Mapping[str, tuple[str, ...]]
) -> ComparisonView:
    """Compare plans with the first; an illegal layout stands as its text.

    `lines` are what speaks against each layout, by its text.
    """
    plans = [first, *(other for other in others if isinstance(other, Plan))]
    fastest = _find_fastest(plans)
    compared = [_compare(first, first, fastest, ())]
    for other in others:
        if isinstance(other, str):
            compared.append(ComparedPlan(layout=other, lines=lines.get(other, ())))
        else:
            text = format_layout(other.layout)
            compared.append(_compare(first, other, fastest, lines.get(text, ())))
    return ComparisonView(job=build_job_view(first), plans=tuple(compared))


def _find_fastest(plans: Sequence[Plan]) -> Plan | None:
    """Return the plan with the shortest step of those that fit; None where none fits."""
    timed = [plan for plan in plans if not plan.estimate.untimed]
    fitting = [plan for plan in timed if plan.estimate.verdict is Verdict.FITS]
    return min(fitting, key=lambda plan: plan.estimate.step_s, default=None)


def _compare(first: Plan, plan: Plan, fastest: Plan | None, lines: tuple[str, ...]) -> ComparedPlan:
    estimate = plan.estimate
    quality, headline = Quality.UNJUDGED, describe_fit(plan)
    if fastest is not None and not estimate.untimed:
        quality, headline = rate_plan(plan, fastest, "the fastest here")
    before, after = _part_seconds(first.estimate), _part_seconds(estimate)
    held_before, held_after = _component_bytes(first.estimate), _component_bytes(estimate)
    return ComparedPlan(
        layout=format_layout(plan.layout),
        lines=lines,
        words=describe_layout(plan.layout).sentence,
        headline=headline,
        quality=quality,
        figures=list_figures(estimate),
        step_changes=tuple(
            NamedValue(name=part.value, value=after.get(part, 0.0) - before.get(part, 0.0))
            for part in TimePart
            if part in before or part in after
        ),
        memory_changes=tuple(
            NamedValue(
                name=component.value,
                value=held_after.get(component, 0) - held_before.get(component, 0),
            )
            for component in Component
            if component in held_before or component in held_after
        ),
    )


def _part_seconds(estimate: Estimate) -> dict[TimePart, float]:
    return {share.part: share.seconds for share in estimate.shares}


def _component_bytes(estimate: Estimate) -> dict[Component, int]:
    """Return the device bytes of the fullest rank by component."""
    for ledger in estimate.ledgers:
        if ledger.pp_rank == estimate.peak_rank:
            return sum_components(ledger)
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfPoint:
    """A value in place of the job's own, and what the layout does with it.

    `value` is that of the address. `rule` says why there is no figure, "" where there is one.
    """

    label: str
    value: str
    is_own: bool
    tokens_per_s_per_device: float = 0.0
    step_s: float = 0.0
    peak_bytes: int = 0
    verdict: str = ""
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfAxis:
    """The values of one option of the job, in their order; `key` is that of the address."""

    title: str
    key: str
    points: tuple[WhatIfPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WhatIfView(Record):
    """A layout around its own point, an option at a time."""

    axes: tuple[WhatIfAxis, ...]

    def title(self) -> str:
        """Return the options."""
        return ", ".join(axis.title for axis in self.axes)

    def to_rows(self) -> list[Row]:
        """Return a row for each value."""
        return [
            {"option": axis.title, "value": point.label, "step_s": point.step_s}
            for axis in self.axes
            for point in axis.points
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPoint:
    """What the tokens take on so many devices; `cost` is 0 without a price.

    `ramp_days` are those of the steps whose batch is below the full one.
    """

    devices: int
    layout: str
    words: str
    step_s: float
    steps: int
    days: float
    days_80: tuple[float, float]
    device_hours: float
    ramp_days: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class BudgetView(Record):
    """The points of a budget so far; `price` is the user's, so that costs are assumed.

    `fewest` is the smallest number of devices on which a layout fits as surely as a plan asks for,
    0 while that is not known and -1 where none is up to the largest number that was tried.
    """

    model: str
    device: str
    tokens: int
    tokens_per_step: int
    first_tokens: int  # of the first step, where the batch grows
    price: float
    points: tuple[BudgetPoint, ...]
    without_layout: tuple[int, ...]
    fewest: int
    is_final: bool

    def title(self) -> str:
        """Return model and tokens."""
        return f"{self.model} on {self.tokens:,} tokens"

    def to_rows(self) -> list[Row]:
        """Return a row for each number of devices."""
        return [
            {"devices": point.devices, "days": point.days, "step_s": point.step_s}
            for point in self.points
        ]
