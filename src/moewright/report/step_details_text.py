"""Finer splits of a traced step, and what changed between two, as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.diagnosis.traces.step_details import ChangeLevel, StepChange, StepDetails
from moewright.report.console import make_table
from moewright.spec.units import GB, format_bytes, format_seconds

_SHOWN_LAYERS = 4  # slowest
_SHOWN_CHANGES = 8  # of each level
_NAME_WIDTH = 72


def print_details(console: Console, details: Sequence[StepDetails]) -> None:
    """Print phases, slowest layers, achieved bandwidths and the spread over steps."""
    first = details[0]
    phases = {
        row.phase: fmean(
            next((other.seconds for other in rank.phases if other.phase is row.phase), 0.0)
            for rank in details
        )
        for row in first.phases
    }
    if phases:
        parts = ", ".join(f"{phase} {format_seconds(s)}" for phase, s in phases.items())
        text = f"phases of the layers: {parts} a step (measured, own unions)"
        console.print(Text(text), soft_wrap=True)
    if len(first.layers) > 1:
        slowest = sorted(first.layers, key=lambda row: -row.seconds)[:_SHOWN_LAYERS]
        middle = format_seconds(median(row.seconds for row in first.layers))
        parts = ", ".join(f"{row.layer}: {format_seconds(row.seconds)}" for row in slowest)
        text = f"slowest of {len(first.layers)} layers: {parts}; the median {middle} (measured)"
        console.print(Text(text), soft_wrap=True)
    lengths_s = first.step_lengths_s
    if len(lengths_s) > 1:
        low, middle, high = (
            format_seconds(s) for s in (min(lengths_s), median(lengths_s), max(lengths_s))
        )
        text = f"{len(lengths_s)} steps of {low} to {high}, median {middle} (measured, on the host)"
        console.print(Text(text), soft_wrap=True)
    if first.collectives:
        console.print(_collective_table(first))


def _collective_table(details: StepDetails) -> Table:
    heading = "collective (measured)"
    table = make_table(
        heading, "ranks", "calls", "payload", "bus GB/s", "best", text_columns=(heading,)
    )
    for rate in sorted(details.collectives, key=lambda rate: -rate.payload_bytes * rate.calls):
        table.add_row(
            f"{rate.comm} {rate.op}",
            str(rate.size),
            f"{rate.calls:,}",
            format_bytes(round(rate.payload_bytes)),
            f"{rate.bus_Bps / GB:.1f}",
            f"{rate.best_Bps / GB:.1f}",
        )
    return table


def print_changes(console: Console, changes: Sequence[StepChange]) -> None:
    """Print the largest changes of each level."""
    for level in ChangeLevel:
        of_level = [change for change in changes if change.level is level]
        if of_level:
            console.print(_change_table(level, of_level[:_SHOWN_CHANGES]))
            if len(of_level) > _SHOWN_CHANGES:
                console.print(f"and {len(of_level) - _SHOWN_CHANGES} smaller")


def _change_table(level: ChangeLevel, changes: Sequence[StepChange]) -> Table:
    heading = f"{level} (measured)"
    table = make_table(heading, "before", "after", "change", text_columns=(heading,))
    for change in changes:
        name = change.name
        if len(name) > _NAME_WIDTH:
            name = f"{name[: _NAME_WIDTH - 1]}…"
        sign = "+" if change.change_s >= 0 else "-"
        table.add_row(
            name,
            format_seconds(change.before_s),
            format_seconds(change.after_s),
            f"{sign}{format_seconds(abs(change.change_s))}",
        )
    return table
