"""The comparison of two trainings for a terminal: of each kind the figure nearest to its bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from rich.console import Console

from moewright.report.console import make_table
from moewright.spec.training_check import CheckedRun, ComparedKind, TrainingCheck, TrainingLine
from moewright.spec.units import plural

_FAILURES_SHOWN = 8


def print_training_checks(console: Console, checks: Sequence[TrainingCheck]) -> None:
    """Print for each format how far the layout is from one process, and what is too far."""
    for check in checks:
        title = f"{plural(check.steps, 'step')} in {check.precision}, {check.clipped_steps} clipped"
        table = make_table(
            "run",
            "figure",
            "compared",
            "nearest to its bound",
            "apart",
            "rounding",
            "bound",
            "",
            text_columns=("run", "figure", "nearest to its bound", ""),
            title=title,
        )
        for run, kind in product(CheckedRun, ComparedKind):
            lines = [line for line in check.lines if (line.run, line.kind) == (run, kind)]
            if not lines:
                continue
            worst = max(lines, key=lambda line: line.difference / line.bound)
            kept = sum(line.holds for line in lines)
            mark = "holds" if kept == len(lines) else f"{len(lines) - kept} too far"
            table.add_row(run.value, kind.value, str(len(lines)), worst.name, *_show(worst), mark)
        console.print(table)
        failed = [line for line in check.lines if not line.holds]
        for line in failed[:_FAILURES_SHOWN]:
            apart, _, bound = _show(line)
            console.print(
                f"{line.run}: {line.kind} {line.name}: {apart} apart, at most {bound}",
                soft_wrap=True,
            )
        if len(failed) > _FAILURES_SHOWN:
            console.print(f"and {plural(len(failed) - _FAILURES_SHOWN, 'figure')} more")


def _show(line: TrainingLine) -> Iterator[str]:
    yield from (f"{value:.1e}" for value in (line.difference, line.rounding, line.bound))
