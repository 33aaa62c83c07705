"""A dry run for a terminal: what the rank would hold, send and compute, counted beside
predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from moewright.diagnosis.compare_ledgers import LedgerComparison, LedgerLine, LineStatus, Section
from moewright.report.console import make_table, show_flops
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.units import format_bytes

_OF_THE_DEVICE = (Component.COMMUNICATION, Component.FRAGMENTATION)
_VERDICTS = {
    LineStatus.EQUAL: ("equal", "green"),
    LineStatus.WITHIN: ("within 3%", "yellow"),
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
) -> None:
    """Every line of the comparison, and the fullest moment: the bytes of `states` and of tensors
    `beside` them, counted (see engine.dryrun), and the memory that the planner expects on the
    device, if it knows the device.
    """
    _section(console, comparison.lines_in(Section.MEMORY), "Memory held", "bytes of", format_bytes)
    _section(
        console,
        comparison.lines_in(Section.COMM),
        "Collectives, payload",
        "operation / group",
        format_bytes,
    )
    _section(
        console,
        comparison.lines_in(Section.CALLS),
        "Collectives, calls",
        "operation / group",
        "{:,.0f}".format,
    )
    _section(console, comparison.lines_in(Section.FLOPS), "FLOPs", "operation / module", show_flops)
    parts = ", ".join(
        f"{module.replace('_', ' ')} {format_bytes(size)}" for module, size in tensor_bytes if size
    )
    total = states_bytes + sum(size for _, size in tensor_bytes)
    console.print(
        Text(
            f"Fullest moment: {format_bytes(total)}, of which states {format_bytes(states_bytes)}; the rest by maker: {parts}"
        )
    )
    if planned is not None:
        own = sum(row.bytes for row in planned.memory if row.component in _OF_THE_DEVICE)
        tensors = sum(row.bytes for row in planned.memory) - own
        console.print(
            Text(
                f"The planner expects {format_bytes(tensors)} of tensors there under the load factor of the job, and "
                f"{format_bytes(own)} more for communicators, context and fragmentation"
            )
        )
    if comparison.notes:
        console.print(Text("\nWhat a CUDA device keeps or holds otherwise", style="bold"))
        for note in comparison.notes:
            console.print(Text(f"- {note}"))


def _section(
    console: Console,
    lines: Sequence[LedgerLine],
    title: str,
    what: str,
    show: Callable[[float], str],
) -> None:
    if not lines:
        return
    rows = make_table(what, "predicted", "counted", "", text_columns=(what,), title=title)
    for line in lines:
        word, style = _VERDICTS[line.status]
        rows.add_row(line.label, show(line.predicted), show(line.counted), Text(word, style=style))
    console.print(rows)
