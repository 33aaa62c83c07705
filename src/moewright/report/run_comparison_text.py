"""A run beside the nearest published runs as text: at most forty lines."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from moewright.diagnosis.published import Nearness
from moewright.diagnosis.run_comparison import ComparedRun, GapCloser, RunComparison
from moewright.report.console import format_rate, job_title, make_table
from moewright.report.diagnosis_text import format_fix
from moewright.spec.units import format_seconds

_MAX_GAPS = 6
_MAX_CLOSERS = 6
_MAX_NOTES = 3
_MAX_NOTE = 240  # characters


def print_run_comparison(
    console: Console, comparison: RunComparison, *, verbose: bool = False
) -> None:
    """Print the gap, the published runs beside it with their sources, and what closes it."""
    console.print(job_title(comparison.job), soft_wrap=True)
    console.print(Text(comparison.headline, style="bold"), soft_wrap=True)
    _print_speeds(console, comparison)
    if comparison.standing:
        console.print(comparison.standing, soft_wrap=True)
    _print_runs(console, comparison)
    _print_gaps(console, comparison, verbose=verbose)
    closers = comparison.closers if verbose else comparison.closers[:_MAX_CLOSERS]
    if closers:
        console.print("What closes it, in the order of trying")
    for number, closer in enumerate(closers, 1):
        console.print(Text(f"  {number}. {_format_closer(closer)}"), soft_wrap=True)
    notes = comparison.notes if verbose else comparison.notes[:_MAX_NOTES]
    for note in notes:
        text = note if verbose or len(note) <= _MAX_NOTE else f"{note[:_MAX_NOTE]}..."
        console.print(Text(text), soft_wrap=True)


def _print_speeds(console: Console, comparison: RunComparison) -> None:
    estimate = comparison.job.estimate
    for name, step_s, speed, mfu in (
        ("measured", comparison.measured_step_s, comparison.measured, comparison.mfu),
        ("predicted", estimate.step_s, comparison.predicted, comparison.predicted_mfu),
    ):
        rate = f", {mfu:.1%} of the bf16 peak" if mfu else ""
        text = f"{name:10}{format_seconds(step_s)} a step, {format_rate(speed)} tokens/s a device"
        console.print(f"{text}{rate}", soft_wrap=True)


def _print_runs(console: Console, comparison: RunComparison) -> None:
    columns = ("nearest published runs", "near", "differs in")
    table = make_table(
        *(columns[0], "tokens/s", "of bf16 peak", "this job so", columns[1], columns[2]),
        text_columns=columns,
    )
    for item in comparison.nearest:
        run = item.run
        name = f"{run.id}: {run.model.rpartition('/')[2]}, {run.devices} x {run.device}"
        table.add_row(
            name,
            format_rate(run.measured),
            f"{run.mfu:.1%}" if run.mfu else "",
            format_rate(item.expected) if item.expected else "",
            run.nearness.value,
            run.differs or "nothing compared",
        )
    console.print(table)
    sources: dict[str, list[str]] = {}
    for item in comparison.nearest:
        sources.setdefault(item.run.source, []).append(item.run.id)
    for source, names in sources.items():
        console.print(Text(f"  {', '.join(names)}: {source}"), soft_wrap=True)
    if any(_is_expected(item) for item in comparison.nearest):
        console.print('"this job so": if it came as near its prediction as that run did to its own')


def _is_expected(item: ComparedRun) -> bool:
    return item.run.nearness is not Nearness.FAR


def _print_gaps(console: Console, comparison: RunComparison, *, verbose: bool) -> None:
    columns = ("part of the step", "")
    table = make_table(
        columns[0], "measured", "predicted", "gap", "of the step", columns[1], text_columns=columns
    )
    gaps = comparison.gaps if verbose else comparison.gaps[:_MAX_GAPS]
    for gap in gaps:
        table.add_row(
            gap.name.value,
            format_seconds(gap.measured_s) if gap.is_measured else "",
            format_seconds(gap.predicted_s),
            f"{'-' if gap.gap_s < 0 else '+'}{format_seconds(abs(gap.gap_s))}",
            f"{gap.gap_s / comparison.measured_step_s:+.1%}",
            "" if gap.is_measured else "not measured",
        )
    console.print(table)


def _format_closer(closer: GapCloser) -> str:
    source = f" [{closer.source}]" if closer.source else ""
    return f"{closer.gap}: {format_fix(closer.fix)}{source}"
