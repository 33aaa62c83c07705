"""The planner's score on measured runs, as tables for a terminal."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.calibration.choices import ChoiceSummary
from moewright.calibration.score import Score, ScoredRow, ScoreSummary
from moewright.calibration.splits import SpeedErrors

# Most rows that the tables of the worst predictions and of skipped rows show.
_MAX_WORST = 8
_MAX_REASONS = 12


def print_score(console: Console, score: Score, *, verbose: bool = True) -> None:
    """Print errors, order of layouts, memory and verdicts, and which rows were worst or skipped.

    Without `verbose`: errors, memory and the rows that were predicted worst.
    """
    summary = score.summary
    console.print(
        f"{summary.rows} rows: {summary.scored} scored, "
        f"{summary.skipped} skipped with their reason\n",
        soft_wrap=True,
    )
    if summary.all_speeds:
        console.print(_error_table(summary))
        if verbose:
            console.print(_split_table(summary))
    if summary.groups and verbose:
        console.print(_group_table(summary))
    if summary.choices and verbose:
        console.print(_choice_table(summary.choices))
    console.print(_memory_table(summary))
    worst = _worst_table(score.rows)
    if worst.row_count:
        console.print(worst)
    if not verbose:
        console.print(Text("Publishers, groups, picks and skipped rows: -v"))
        return
    if summary.skipped:
        console.print(_skipped_table(score.rows))
    for line in summary.contradictions:
        console.print(Text(f"No model of the stated fields can fit both: {line}"))


def _make_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _error_table(summary: ScoreSummary) -> Table:
    table = _make_table(
        "Speed: predicted tokens/s against measured",
        "rows",
        "count",
        "median",
        "mean",
        "p90",
        "bias",
    )
    rows: tuple[tuple[str, SpeedErrors | None], ...] = (
        ("all that decides is stated", summary.complete_speeds),
        ("all scored rows", summary.all_speeds),
    )
    for name, speeds in rows:
        if speeds:
            table.add_row(
                name,
                str(speeds.rows),
                f"{speeds.median_error:.1%}",
                f"{speeds.mean_error:.1%}",
                f"{speeds.p90_error:.1%}",
                f"{speeds.bias:+.1%}",
            )
    return table


def _choice_table(choices: ChoiceSummary) -> Table:
    table = _make_table(
        "Tables replayed as choices: what the layout predicted best would have cost",
        "job",
        "layouts",
        "regret",
        "by bound",
        "error of the pick",
        "by bound",
    )
    for job in choices.jobs:
        first, second = job.by_prediction, job.by_bound
        table.add_row(
            Text(job.job),
            str(job.layouts),
            f"{first.regret:.1%}",
            f"{second.regret:.1%}",
            f"{first.error:+.1%}",
            f"{second.error:+.1%}",
        )
    table.add_section()
    table.add_row(
        "mean",
        "",
        f"{choices.regret_by_prediction:.1%}",
        f"{choices.regret_by_bound:.1%}",
        f"{choices.error_by_prediction:.1%}",
        f"{choices.error_by_bound:.1%}",
    )
    return table


def _split_table(summary: ScoreSummary) -> Table:
    table = _make_table(
        "Speed by what is stated, and by publisher",
        "rows",
        "",
        "count",
        "median",
        "p90",
        "bias",
        "in 80 %",
        "in 95 %",
        "rank corr.",
        "regret",
    )
    table.columns[1].justify = "left"
    for split in summary.splits:
        speeds = split.speeds
        table.add_row(
            split.by,
            split.name,
            str(speeds.rows),
            f"{speeds.median_error:.1%}",
            f"{speeds.p90_error:.1%}",
            f"{speeds.bias:+.1%}",
            _share(split.coverage_80),
            _share(split.coverage_95),
            "" if split.rank_correlation is None else f"{split.rank_correlation:+.2f}",
            _share(split.regret),
        )
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _group_table(summary: ScoreSummary) -> Table:
    table = _make_table(
        "Order of layouts in one model on one device",
        "model",
        "device",
        "layouts",
        "rank corr.",
        "regret",
    )
    table.columns[1].justify = "left"
    for group in summary.groups:
        table.add_row(
            group.model.rpartition("/")[2],
            group.hardware,
            str(group.layouts),
            f"{group.rank_correlation:+.2f}",
            f"{group.regret:.1%}",
        )
    mean = summary.mean_rank_correlation or 0.0
    worst = summary.worst_regret or 0.0
    table.add_row("mean; worst regret", "", "", f"{mean:+.2f}", f"{worst:.1%}", style="bold")
    return table


def _memory_table(summary: ScoreSummary) -> Table:
    memory = summary.memory
    table = _make_table("Memory", "rows", "count", "fits", "uncertain", "oom", "median error")
    error = ""
    if memory.peaks:
        error = f"{memory.median_error:.1%} of {memory.peaks} peaks, p90 {memory.p90_error:.1%}"
    table.add_row(
        "ran",
        str(memory.ran),
        str(memory.ran_fits),
        str(memory.ran_uncertain),
        str(memory.ran - memory.ran_fits - memory.ran_uncertain),
        error,
    )
    caught = memory.out_of_memory - memory.out_of_memory_fits - memory.out_of_memory_uncertain
    table.add_row(
        "out of memory",
        str(memory.out_of_memory),
        str(memory.out_of_memory_fits),
        str(memory.out_of_memory_uncertain),
        str(caught),
        "",
    )
    return table


def _worst_table(rows: tuple[ScoredRow, ...]) -> Table:
    table = _make_table(
        "Speed predicted worst", "row", "measured", "predicted", "error", "calibration"
    )
    table.columns[4].justify = "left"
    errors = [
        (row.predicted_tokens_per_s_per_gpu / row.measured_tokens_per_s_per_gpu - 1, row)
        for row in rows
        if row.predicted_tokens_per_s_per_gpu and row.measured_tokens_per_s_per_gpu
    ]
    for error, row in sorted(errors, key=lambda pair: -abs(pair[0]))[:_MAX_WORST]:
        table.add_row(
            row.id,
            f"{row.measured_tokens_per_s_per_gpu:,.0f}",
            f"{row.predicted_tokens_per_s_per_gpu:,.0f}",
            f"{error:+.1%}",
            row.calibration,
        )
    return table


def _skipped_table(rows: tuple[ScoredRow, ...]) -> Table:
    table = _make_table("Skipped", "rows", "reason")
    table.columns[0].justify = "right"
    table.columns[1].justify = "left"
    reasons = Counter(row.skipped for row in rows if row.skipped).most_common()
    for reason, count in reasons[:_MAX_REASONS]:
        table.add_row(str(count), reason)
    others = sum(count for _, count in reasons[_MAX_REASONS:])
    if others:
        table.add_row(str(others), "other reasons; --json lists each row")
    return table
