"""The comparison of two trainings as a document: of each kind the figure nearest its bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moewright.report.document import DocumentSection, build_table, numbers, words
from moewright.spec.training_check import (
    CheckedRun,
    ComparedKind,
    SettingLine,
    TrainingCheck,
    TrainingLine,
)
from moewright.spec.units import plural

_FAILURES_SHOWN = 8  # the first tell the cause; later ones follow from it


def build_training_check(check: TrainingCheck) -> DocumentSection:
    """Build how far the layout is from one process in a format, and what is too far."""
    columns = (
        *words("run", "figure"),
        *numbers("compared"),
        *words("nearest to its bound"),
        *numbers("apart", "rounding", "bound"),
        *words(""),
    )
    failed = [line for line in check.lines if not line.holds]
    lines = [_describe_failure(line) for line in failed[:_FAILURES_SHOWN]]
    if len(failed) > _FAILURES_SHOWN:
        lines.append(f"and {plural(len(failed) - _FAILURES_SHOWN, 'figure')} more")
    lines += map(_describe_setting, check.settings)
    return DocumentSection(
        title=f"{plural(check.steps, 'step')} in {check.precision}, {check.clipped_steps} clipped",
        table=build_table(columns, _list_rows(check)),
        sections=(DocumentSection(lines=tuple(lines)),),
    )


def _list_rows(check: TrainingCheck) -> Iterator[tuple[str, ...]]:
    """Yield a row for each run and kind of figure that was compared."""
    for run, kind in product(CheckedRun, ComparedKind):
        lines = [line for line in check.lines if (line.run, line.kind) == (run, kind)]
        if not lines:
            continue
        worst = max(lines, key=lambda line: line.difference / line.bound)
        kept = sum(line.holds for line in lines)
        mark = "holds" if kept == len(lines) else f"{len(lines) - kept} too far"
        yield run.value, kind.value, str(len(lines)), worst.name, *_show(worst), mark


def _describe_failure(line: TrainingLine) -> str:
    apart, _, bound = _show(line)
    return f"{line.run}: {line.kind} {line.name}: {apart} apart, at most {bound}"


def _describe_setting(line: SettingLine) -> str:
    if line.holds:
        return (
            f"with another {line.name}: {line.changed} of {plural(line.compared, 'figure')} change"
        )
    return f"with another {line.name}: nothing changes, so that training never reads it"


def _show(line: TrainingLine) -> Iterator[str]:
    yield from (f"{value:.1e}" for value in (line.difference, line.rounding, line.bound))
