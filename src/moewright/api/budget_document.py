"""A budget as a document: what the tokens take on each number of devices, and by which layout."""

from __future__ import annotations

from moewright.api.budgets import Budget
from moewright.codec import format_layout
from moewright.report.calendar_section import build_calendar_section
from moewright.report.document import (
    Document,
    DocumentSection,
    Face,
    ItemList,
    Line,
    Phrase,
    build_table,
    numbers,
)
from moewright.spec.units import format_seconds, plural

_DAYS_OF_HOURS = 2.0  # below so many days a duration is told in hours


def build_budget_document(budget: Budget) -> Document:
    """Build the table of a budget, then the layout of each number of devices."""
    calendars = [line.calendar for line in budget.lines if line.calendar is not None]
    sections = [_build_figures(budget)]
    if calendars:
        sections.append(build_calendar_section(calendars))
    if budget.deadline_days:
        sections.append(DocumentSection(lines=(_describe_best(budget),)))
    return Document(
        heading=f"{budget.title()}: {budget.lines[0].steps:,} steps",
        sections=(*sections, _list_layouts(budget)),
    )


def _describe_best(budget: Budget) -> str:
    """Say which number of devices meets the deadline with the fewest device-hours."""
    best = budget.best
    if best is None:
        return f"No number of devices above ends within {budget.deadline_days:g} days."
    days = best.days if best.calendar is None else best.calendar.days
    return (
        f"{best.devices:,} devices end within {budget.deadline_days:g} days with the fewest "
        f"device-hours: {days:.3g} days."
    )


def _build_figures(budget: Budget) -> DocumentSection:
    least = min(line.device_hours for line in budget.lines)
    has_ramp = any(line.ramp_days for line in budget.lines)
    has_cost = budget.price is not None
    names = ["devices", "step", "days", "80 %", "device-hours", "x least"]
    names += ["ramp"] * has_ramp + ["cost"] * has_cost
    rows: list[tuple[Line, ...]] = [
        (
            f"{line.devices:,}",
            format_seconds(line.plan.estimate.step_s),
            *_format_days(line.days, line.days_80),
            f"{line.device_hours:,.0f}",
            f"{line.device_hours / least:.2f}",
            *(_format_days(line.ramp_days)[:1] * has_ramp),
            *((f"{line.cost or 0:,.0f}",) * has_cost),
        )
        for line in budget.lines
    ]
    notes = ["Days count training steps only; --mtbf auto adds those by the calendar."]
    if budget.without_layout:
        counts = ", ".join(map(str, budget.without_layout))
        notes.append(f"No layout fits with the probability that a plan asks for: {counts}.")
    return DocumentSection(table=build_table(numbers(*names), rows), notes=tuple(notes))


def _list_layouts(budget: Budget) -> DocumentSection:
    items = tuple(
        (
            f"{plural(line.devices, 'device')}: ",
            Phrase(text=format_layout(line.plan.layout), face=Face.CODE),
        )
        for line in budget.lines
    )
    return DocumentSection(items=ItemList(items=items))


def _format_days(days: float, interval: tuple[float, float] = (0.0, 0.0)) -> tuple[str, str]:
    """Return a duration, and an interval of it in the same unit: days, or hours of a short one."""
    scale = 24.0 if days < _DAYS_OF_HOURS else 1.0
    unit = " h" if scale > 1 else ""
    texts = [
        f"{value * scale:,.3g}" if value * scale < 1000 else f"{value * scale:,.0f}"
        for value in (days, *interval)
    ]
    return f"{texts[0]}{unit}", f"{texts[1]} to {texts[2]}{unit}"
