"""A dry run for a terminal: what the rank holds, sends and computes, counted and predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from moewright.diagnosis.compare_ledgers import LedgerComparison, LedgerLine, LineStatus, Section
from moewright.report.console import format_flops, make_table
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.units import format_bytes

# What a device holds besides tensors.
_DEVICE_COMPONENTS = (Component.COMMUNICATION, Component.FRAGMENTATION)
_STATUS_MARKS = {
    LineStatus.EQUAL: ("equal", "green"),
    LineStatus.WITHIN: ("within its bound", "yellow"),
    LineStatus.DIFFERS: ("differs", "red"),
    LineStatus.ONLY_PREDICTED: ("only predicted", "red"),
    LineStatus.ONLY_COUNTED: ("only counted", "red"),
}


def print_dry_run(
    console: Console,
    comparison: LedgerComparison,
    *,
    states_bytes: int,
    tensor_bytes: Sequence[tuple[Module, int]],
    planned: Ledger | None,
    verbose: bool = True,
) -> None:
    """Print the lines of the comparison, and what fills the rank at its peak.

    Without `verbose` a section shows the lines that differ, and counts the others.
    `states_bytes` are the counted bytes of model states and `tensor_bytes` those of the other
    tensors by the module that made them (see engine.run.dryrun). `planned` is the memory that the
    planner expects on the device, None where the device is not known.
    """
    show = _print_section if verbose else _print_differences
    show(console, comparison.lines_in(Section.MEMORY), "Memory held", "bytes of", format_bytes)
    show(
        console,
        comparison.lines_in(Section.STORAGES),
        "All storages, whoever holds them",
        "moment",
        format_bytes,
    )
    show(
        console,
        comparison.lines_in(Section.COMM),
        "Collectives, payload",
        "operation / group",
        format_bytes,
    )
    show(
        console,
        comparison.lines_in(Section.CALLS),
        "Collectives, calls",
        "operation / group",
        "{:,.0f}".format,
    )
    show(console, comparison.lines_in(Section.FLOPS), "FLOPs", "operation / module", format_flops)
    _print_peak(console, states_bytes, tensor_bytes)
    if planned is not None:
        _print_planned(console, planned)
    if comparison.notes:
        console.print(Text("\nWhat a CUDA device holds instead", style="bold"))
        for note in comparison.notes:
            console.print(Text(f"- {note}"))


def _print_section(
    console: Console,
    lines: Sequence[LedgerLine],
    title: str,
    row_heading: str,
    show: Callable[[float], str],
) -> None:
    if not lines:
        return
    table = make_table(
        row_heading, "predicted", "counted", "", text_columns=(row_heading,), title=title
    )
    for line in lines:
        mark, style = _STATUS_MARKS[line.status]
        table.add_row(line.label, show(line.predicted), show(line.counted), Text(mark, style=style))
    console.print(table)


def _print_differences(
    console: Console,
    lines: Sequence[LedgerLine],
    title: str,
    row_heading: str,
    show: Callable[[float], str],
) -> None:
    """Print a section's lines that differ from their prediction, and how many others there are."""
    others = [line for line in lines if line.status not in (LineStatus.EQUAL, LineStatus.WITHIN)]
    if not lines:
        return
    equal = len(lines) - len(others)
    console.print(Text(f"{title}: {equal} of {len(lines)} lines as predicted"))
    if others:
        _print_section(console, others, "", row_heading, show)


def _print_peak(
    console: Console, states_bytes: int, tensor_bytes: Sequence[tuple[Module, int]]
) -> None:
    total = states_bytes + sum(size for _, size in tensor_bytes)
    tensors = ", ".join(
        f"{module.replace('_', ' ')} {format_bytes(size)}" for module, size in tensor_bytes if size
    )
    console.print(
        Text(
            f"At its peak the rank holds {format_bytes(total)}, "
            f"of which states {format_bytes(states_bytes)}; the other tensors by module: {tensors}"
        )
    )


def _print_planned(console: Console, planned: Ledger) -> None:
    device_bytes = sum(row.bytes for row in planned.memory if row.component in _DEVICE_COMPONENTS)
    tensor_bytes = sum(row.bytes for row in planned.memory) - device_bytes
    console.print(
        Text(
            f"The planner expects {format_bytes(tensor_bytes)} of tensors at that moment, with the "
            f"expert load of the job, and {format_bytes(device_bytes)} more for communicators, "
            "context and fragmentation"
        )
    )
