"""Layouts side by side: what each changes of the first one's step and memory, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moewright.codec import format_layout
from moewright.codec.layout_words import describe_layout
from moewright.diagnosis.judgement import describe_fit
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate, Plan, TimePart
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
    all there is, and `headline` is "".
    """

    layout: str
    lines: tuple[str, ...]
    words: str = ""
    headline: str = ""
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
    compared = [_compare(first, first, ())]
    for other in others:
        if isinstance(other, str):
            compared.append(ComparedPlan(layout=other, lines=lines.get(other, ())))
        else:
            text = format_layout(other.layout)
            compared.append(_compare(first, other, lines.get(text, ())))
    return ComparisonView(job=build_job_view(first), plans=tuple(compared))


def _compare(first: Plan, plan: Plan, lines: tuple[str, ...]) -> ComparedPlan:
    estimate = plan.estimate
    before, after = _part_seconds(first.estimate), _part_seconds(estimate)
    held_before, held_after = _component_bytes(first.estimate), _component_bytes(estimate)
    return ComparedPlan(
        layout=format_layout(plan.layout),
        lines=lines,
        words=describe_layout(plan.layout).sentence,
        headline=describe_fit(plan),
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
