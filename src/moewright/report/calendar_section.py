"""A budget by the calendar as a section: goodput, days, money and energy, and what is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isinf

from moewright.cost.calendar_time import CalendarTime, WhenShort, read_reliability
from moewright.report.document import (
    DocumentSection,
    Extent,
    Table,
    build_table,
    numbers,
    words,
)
from moewright.spec.units import HOUR_S, format_bytes, format_figures, format_seconds


def build_calendar_section(calendars: Sequence[CalendarTime]) -> DocumentSection:
    """Build the days by the calendar, where their time goes, and where the figures are from."""
    return DocumentSection(
        title="By the calendar",
        table=_tabulate_days(calendars),
        sections=(
            DocumentSection(title="Shares of the calendar", table=_tabulate_shares(calendars)),
            DocumentSection(table=_tabulate_saves(calendars), extent=Extent.LONG),
            DocumentSection(
                title="Failures by part, expected",
                table=_tabulate_parts(calendars),
                extent=Extent.LONG,
            ),
        ),
        notes=tuple(_list_notes(calendars)),
    )


def _tabulate_days(calendars: Sequence[CalendarTime]) -> Table:
    has_cost = calendars[0].cost is not None
    has_energy = any(calendar.energy_kWh for calendar in calendars)
    has_co2 = any(calendar.co2_kg for calendar in calendars)
    names = ["devices", "spares", "goodput", "days", "80 %", "device-hours"]
    names += ["cost"] * has_cost + ["MWh"] * has_energy + ["t CO2"] * has_co2
    rows = []
    for calendar in calendars:
        low, high = calendar.goodput_range
        cells = [
            f"{calendar.devices:,}",
            f"{calendar.spares * calendar.unit_devices:,}",
            f"{calendar.goodput:.1%} ({low:.0%}-{high:.0%})",
            format_figures(calendar.days),
            f"{format_figures(calendar.days_80[0])}-{format_figures(calendar.days_80[1])}",
            f"{calendar.device_hours:,.0f}",
        ]
        cells += [f"{calendar.cost or 0:,.0f}"] * has_cost
        cells += [format_figures(calendar.energy_kWh / 1000)] * has_energy
        cells += [format_figures(calendar.co2_kg / 1000)] * has_co2
        rows.append(cells)
    return build_table(numbers(*names), rows)


def _tabulate_shares(calendars: Sequence[CalendarTime]) -> Table:
    names = ("devices", "MTBF, h", "failures", "saves", "recovery", "replay", "planned", "parts")
    rows = [
        (
            f"{calendar.devices:,}",
            _format_hours(calendar.mtbf_s),
            format_figures(calendar.failures),
            f"{calendar.shares.saves:.2%}",
            f"{calendar.shares.recovery:.2%}",
            f"{calendar.shares.replay:.2%}",
            f"{calendar.shares.planned:.2%}",
            f"{1 - calendar.running:.2%}",
        )
        for calendar in calendars
    ]
    return build_table(numbers(*names), rows)


def _tabulate_saves(calendars: Sequence[CalendarTime]) -> Table:
    names = ("devices", "save every", "steps", "stands still", "durable after", "recovery")
    rows = [
        (
            f"{calendar.devices:,}",
            format_seconds(calendar.shares.interval_s),
            f"{calendar.save_every_steps:,}",
            format_seconds(calendar.save_s),
            format_seconds(calendar.durable_s),
            format_seconds(calendar.recovery_s),
        )
        for calendar in calendars
    ]
    return build_table(numbers(*names), rows)


def _tabulate_parts(calendars: Sequence[CalendarTime]) -> Table:
    columns = (*words("part"), *numbers(*(f"{calendar.devices:,}" for calendar in calendars)))
    rows = [
        (name, *(format_figures(share * calendar.failures) for calendar in calendars))
        for name, share in read_reliability().parts
    ]
    return build_table(columns, rows)


def _list_notes(calendars: Sequence[CalendarTime]) -> Iterator[str]:
    facts = read_reliability()
    first = calendars[0]
    least_s, most_s = first.mtbf_range_s
    if least_s < most_s:
        names = "; ".join(rate.name for rate in facts.rates)
        yield f"Failures: the median of published rates, and their range ({names})."
    unit = first.unit_devices
    # Where parts are hardly ever missing, what the job does then is not told.
    short = {calendar.when_short for calendar in calendars if calendar.running < 0.9999}
    policy = " and ".join(
        "runs on with fewer replicas" if choice is WhenShort.SHRINK else "waits"
        for choice in sorted(short)
    )
    if policy:
        yield f"Without spares left, the job {policy}; parts are replaced {unit} devices at a time."
    yield (
        f"A checkpoint has {format_bytes(first.checkpoint_bytes)}; the interval is the one that "
        "loses the least."
    )
    if first.mean_delay:
        most = max(calendar.slowdown for calendar in calendars)
        if most:
            yield f"Stragglers: the slowest of the network's links adds up to {most:.1%} to a step."
        yield (
            f"Slow spells delay jobs by {first.mean_delay:.0%} in the mean and some far longer "
            "(exponential): that is in the interval of days alone."
        )
    if first.evaluation_days:
        days = format_figures(first.evaluation_days)
        yield f"Evaluations take {days} days on {first.devices:,} devices."
    if first.energy_kWh:
        busy, idle = facts.node_power_share, facts.idle_power_share
        yield (
            f"Power: a node takes {format_figures(busy.value)} of its devices' rated watts while "
            f"they compute ({busy.source}) and {format_figures(idle.value)} while they wait "
            f"({idle.source}); on {first.devices:,} devices they compute in "
            f"{first.computing:.0%} of the calendar."
        )


def _format_hours(seconds: float) -> str:
    if isinf(seconds):
        return "never"
    return format_figures(seconds / HOUR_S)
