"""A dry run for a terminal: what the rank would hold, send and compute, counted beside
predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from moewright.diagnosis.compare_ledgers import Comparison, Line, Section, Status
from moewright.report.console import new_table, show_flops
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.units import show_bytes

_OF_THE_DEVICE = (Component.COMMUNICATION, Component.FRAGMENTATION)
_VERDICTS = {
    Status.EQUAL: ("equal", "green"),
    Status.WITHIN: ("within 3%", "yellow"),
    Status.DIFFERS: ("differs", "red"),
    Status.ONLY_PREDICTED: ("only predicted", "red"),
    Status.ONLY_COUNTED: ("only counted", "red"),
}


def print_dry_run(
    console: Console,
    comparison: Comparison,
    *,
    states: int,
    beside: Sequence[tuple[Module, int]],
    planned: Ledger | None,
) -> None:
    """Every line of the comparison, and the fullest moment: the bytes of `states` and of tensors
    `beside` them, counted (see engine.dryrun), and the memory that the planner expects on the
    device, if it knows the device.
    """
    _section(console, comparison.of(Section.MEMORY), "Memory held", "bytes of", show_bytes)
    _section(
        console,
        comparison.of(Section.COMM),
        "Collectives, payload",
        "operation / group",
        show_bytes,
    )
    _section(
        console,
        comparison.of(Section.CALLS),
        "Collectives, calls",
        "operation / group",
        "{:,.0f}".format,
    )
    _section(console, comparison.of(Section.FLOPS), "FLOPs", "operation / module", show_flops)
    parts = ", ".join(
        f"{module.replace('_', ' ')} {show_bytes(size)}" for module, size in beside if size
    )
    total = states + sum(size for _, size in beside)
    console.print(
        Text(
            f"Fullest moment: {show_bytes(total)}, of which states {show_bytes(states)}; the rest by maker: {parts}"
        )
    )
    if planned is not None:
        own = sum(row.bytes for row in planned.memory if row.component in _OF_THE_DEVICE)
        tensors = sum(row.bytes for row in planned.memory) - own
        console.print(
            Text(
                f"The planner expects {show_bytes(tensors)} of tensors there under the load factor of the job, and "
                f"{show_bytes(own)} more for communicators, context and fragmentation"
            )
        )
    if comparison.notes:
        console.print(Text("\nWhat a CUDA device keeps or holds otherwise", style="bold"))
        for note in comparison.notes:
            console.print(Text(f"- {note}"))


def _section(
    console: Console, lines: Sequence[Line], title: str, what: str, show: Callable[[float], str]
) -> None:
    if not lines:
        return
    rows = new_table(what, "predicted", "counted", "", left=(what,), title=title)
    for line in lines:
        word, style = _VERDICTS[line.status]
        rows.add_row(line.label, show(line.predicted), show(line.counted), Text(word, style=style))
    console.print(rows)
