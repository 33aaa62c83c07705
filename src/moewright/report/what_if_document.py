"""Replays of a changed trace as a document."""

from __future__ import annotations

from collections.abc import Sequence

from moewright.diagnosis.traces.what_if_trace import ALL_RANKS, TraceWhatIf
from moewright.report.document import (
    Document,
    DocumentSection,
    build_table,
    numbers,
)
from moewright.spec.units import format_seconds


def build_what_if_document(subject: str, replays: Sequence[TraceWhatIf]) -> Document:
    """Build a table of the ranks: the step as measured, replayed, and between its two bounds."""
    rows = (
        (
            "all" if item.rank == ALL_RANKS else str(item.rank),
            format_seconds(item.measured_s),
            f"{item.replayed_s / item.measured_s - 1:+.2%}",
            f"{format_seconds(item.low_s)} to {format_seconds(item.high_s)}",
            f"{item.low_s / item.measured_s - 1:+.1%} to {item.high_s / item.measured_s - 1:+.1%}",
        )
        for item in replays
    )
    columns = numbers("rank", "a step", "replayed", "with the change", "of the step")
    note = (
        "The bounds: kernels wait for other streams where their start shows it, or for all that "
        "had ended. Ranks are replayed alone: what they wait for each other is in their kernels."
    )
    if any(item.rank == ALL_RANKS for item in replays):
        note = "All ranks are replayed together: each waits for the others as it did in the trace."
    section = DocumentSection(table=build_table(columns, rows), notes=(note,))
    return Document(subject=subject, heading=replays[0].title(), sections=(section,))
