"""How well the planner predicts measured runs, as calm tables for a terminal."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.calibration.score import Score, ScoredRow, ScoreSummary, SpeedErrors

_WORST = 8
_REASONS = 12


def print_score(console: Console, found: Score) -> None:
    """Errors, ranks by group, memory and verdicts; the rows predicted worst; what was skipped and
    what contradicts."""
    summary = found.summary
    console.print(
        f"{summary.rows} rows: {summary.scored} scored, {summary.skipped} skipped with their reason\n",
        soft_wrap=True,
    )
    if summary.all_speeds:
        console.print(_errors(summary))
    if summary.groups:
        console.print(_groups(summary))
    console.print(_memory(summary))
    worst = _worst(found.rows)
    if worst.row_count:
        console.print(worst)
    if summary.skipped:
        console.print(_skipped(found.rows))
    for line in summary.contradictions:
        console.print(Text(f"No model of the stated fields can fit both: {line}"))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    return table


def _errors(summary: ScoreSummary) -> Table:
    table = _table(
        "Speed: predicted tokens/s against measured",
        "rows",
        "count",
        "median",
        "mean",
        "p90",
        "bias",
    )
    named: tuple[tuple[str, SpeedErrors | None], ...] = (
        ("all that decides is stated", summary.complete_speeds),
        ("all scored rows", summary.all_speeds),
    )
    for name, one in named:
        if one:
            errors = (f"{value:.1%}" for value in (one.median_error, one.mean_error, one.p90_error))
            table.add_row(name, str(one.rows), *errors, f"{one.bias:+.1%}")
    return table


def _groups(summary: ScoreSummary) -> Table:
    table = _table(
        "Order of layouts in one model on one device",
        "model",
        "device",
        "layouts",
        "rank corr.",
        "regret",
    )
    table.columns[1].justify = "left"
    for one in summary.groups:
        rank, regret = f"{one.rank_correlation:+.2f}", f"{one.regret:.1%}"
        table.add_row(one.model.rpartition("/")[2], one.hardware, str(one.layouts), rank, regret)
    mean, worst = summary.mean_rank_correlation or 0.0, summary.worst_regret or 0.0
    table.add_row("mean; worst regret", "", "", f"{mean:+.2f}", f"{worst:.1%}", style="bold")
    return table


def _memory(summary: ScoreSummary) -> Table:
    one = summary.memory
    table = _table("Memory", "rows", "count", "fits", "uncertain", "oom", "median error")
    error = f"{one.median_error:.1%} of {one.peaks} peaks" if one.peaks else ""
    counts = (one.ran_fits, one.ran_uncertain, one.ran - one.ran_fits - one.ran_uncertain)
    table.add_row("ran", str(one.ran), *map(str, counts), error)
    out, fits, uncertain = one.out_of_memory, one.out_of_memory_fits, one.out_of_memory_uncertain
    table.add_row("out of memory", *map(str, (out, fits, uncertain, out - fits - uncertain)), "")
    return table


def _worst(rows: tuple[ScoredRow, ...]) -> Table:
    table = _table("Speed predicted worst", "row", "measured", "predicted", "error", "calibration")
    table.columns[4].justify = "left"
    far = [
        (row.predicted_tokens_per_s_per_gpu / row.measured_tokens_per_s_per_gpu - 1, row)
        for row in rows
        if row.predicted_tokens_per_s_per_gpu and row.measured_tokens_per_s_per_gpu
    ]
    for error, row in sorted(far, key=lambda one: -abs(one[0]))[:_WORST]:
        figures = (
            f"{row.measured_tokens_per_s_per_gpu:,.0f}",
            f"{row.predicted_tokens_per_s_per_gpu:,.0f}",
        )
        table.add_row(row.id, *figures, f"{error:+.1%}", row.calibration)
    return table


def _skipped(rows: tuple[ScoredRow, ...]) -> Table:
    table = _table("Skipped", "rows", "reason")
    table.columns[0].justify, table.columns[1].justify = "right", "left"
    reasons = Counter(row.skipped for row in rows if row.skipped).most_common()
    for reason, count in reasons[:_REASONS]:
        table.add_row(str(count), reason)
    rest = sum(count for _, count in reasons[_REASONS:])
    if rest:
        table.add_row(str(rest), "other reasons; --json lists each row")
    return table
