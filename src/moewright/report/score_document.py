"""The planner's score on measured runs as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moewright.calibration.score import Score, ScoredRow, ScoreSummary
from moewright.calibration.splits import ChoiceSummary
from moewright.report.document import (
    Document,
    DocumentSection,
    Extent,
    build_table,
    numbers,
    tabulate,
    words,
)
from moewright.spec.record import Row

# Most rows that the tables of the worst predictions and of skipped rows show.
_MAX_WORST = 8
_MAX_REASONS = 12


def build_score_document(score: Score) -> Document:
    """Build errors, order of layouts, memory and verdicts, and what was worst or skipped."""
    summary = score.summary
    return Document(
        heading=(
            f"{summary.rows} rows: {summary.scored} scored, "
            f"{summary.skipped} skipped with their reason"
        ),
        sections=tuple(_list_sections(score)),
        hint="Publishers, groups, picks and skipped rows: -v",
    )


def _list_sections(score: Score) -> Iterator[DocumentSection]:
    summary = score.summary
    if summary.all_speeds:
        yield _list_errors(summary)
        yield _list_splits(summary)
    if summary.groups:
        yield _list_groups(summary)
    if summary.choices:
        yield _list_choices(summary.choices)
        yield _list_biases(summary.choices)
    yield _count_verdicts(summary)
    yield from _list_worst(score.rows)
    if summary.skipped:
        yield _list_skipped(score.rows)
    if summary.contradictions:
        rule = "No model of the stated fields can fit both"
        lines = tuple(f"{rule}: {line}" for line in summary.contradictions)
        yield DocumentSection(lines=lines, extent=Extent.LONG)
    if summary.lone_devices:
        yield DocumentSection(lines=tuple(f"Note: {line}" for line in summary.lone_devices))
    yield _list_rows(score.rows)


def _list_errors(summary: ScoreSummary) -> DocumentSection:
    rows = (
        ("all that decides is stated", summary.complete_speeds),
        ("all scored rows", summary.all_speeds),
    )
    return DocumentSection(
        title="Speed: predicted tokens/s against measured",
        table=build_table(
            (*words("rows"), *numbers("count", "median", "mean", "p90", "bias")),
            (
                (
                    name,
                    str(speeds.rows),
                    f"{speeds.median_error:.1%}",
                    f"{speeds.mean_error:.1%}",
                    f"{speeds.p90_error:.1%}",
                    f"{speeds.bias:+.1%}",
                )
                for name, speeds in rows
                if speeds
            ),
        ),
    )


def _list_choices(choices: ChoiceSummary) -> DocumentSection:
    return DocumentSection(
        title="Tables replayed as choices: what the layout predicted best would have cost",
        table=build_table(
            (
                *words("job"),
                *numbers("layouts", "regret", "by bound", "error of the pick", "by bound"),
            ),
            (
                (
                    job.job,
                    str(job.layouts),
                    f"{job.by_prediction.regret:.1%}",
                    f"{job.by_bound.regret:.1%}",
                    f"{job.by_prediction.error:+.1%}",
                    f"{job.by_bound.error:+.1%}",
                )
                for job in choices.jobs
            ),
            total=(
                "mean",
                "",
                f"{choices.regret_by_prediction:.1%}",
                f"{choices.regret_by_bound:.1%}",
                f"{choices.error_by_prediction:.1%}",
                f"{choices.error_by_bound:.1%}",
            ),
        ),
        extent=Extent.LONG,
    )


def _list_biases(choices: ChoiceSummary) -> DocumentSection:
    return DocumentSection(
        title="Picks: predicted over measured speed of the layout predicted best",
        table=build_table(
            (*words("jobs"), *numbers("count", "pick", "its job", "pick over its job", "expected")),
            (
                (
                    bias.name,
                    str(bias.jobs),
                    f"{bias.error:+.1%}",
                    f"{bias.job_error:+.1%}",
                    # What is left of the pick's error without that of all layouts of its job.
                    f"{(1 + bias.error) / (1 + bias.job_error) - 1:+.1%}",
                    f"{bias.expected:+.1%}",
                )
                for bias in choices.biases
            ),
        ),
        extent=Extent.LONG,
    )


def _list_splits(summary: ScoreSummary) -> DocumentSection:
    errors = ("count", "median", "p90", "bias", "in 80 %", "in 95 %", "rank corr.", "regret")
    return DocumentSection(
        title="Speed by what is stated, and by publisher",
        table=build_table(
            (*words("rows", ""), *numbers(*errors)),
            (
                (
                    split.by,
                    split.name,
                    str(split.speeds.rows),
                    f"{split.speeds.median_error:.1%}",
                    f"{split.speeds.p90_error:.1%}",
                    f"{split.speeds.bias:+.1%}",
                    _format_share(split.coverage_80),
                    _format_share(split.coverage_95),
                    "" if split.rank_correlation is None else f"{split.rank_correlation:+.2f}",
                    _format_share(split.regret),
                )
                for split in summary.splits
            ),
        ),
        extent=Extent.LONG,
    )


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _list_groups(summary: ScoreSummary) -> DocumentSection:
    mean = summary.mean_rank_correlation or 0.0
    worst = summary.worst_regret or 0.0
    return DocumentSection(
        title="Order of layouts in one model on one device",
        table=build_table(
            (*words("model", "device"), *numbers("layouts", "rank corr.", "regret")),
            (
                (
                    group.model.rpartition("/")[2],
                    group.hardware,
                    str(group.layouts),
                    f"{group.rank_correlation:+.2f}",
                    f"{group.regret:.1%}",
                )
                for group in summary.groups
            ),
            total=("mean; worst regret", "", "", f"{mean:+.2f}", f"{worst:.1%}"),
        ),
        extent=Extent.LONG,
    )


def _count_verdicts(summary: ScoreSummary) -> DocumentSection:
    memory = summary.memory
    error = ""
    if memory.peaks:
        error = f"{memory.median_error:.1%} of {memory.peaks} peaks, p90 {memory.p90_error:.1%}"
    overflows = memory.out_of_memory
    fits, uncertain = memory.out_of_memory_fits, memory.out_of_memory_uncertain
    counts = (
        ("ran", memory.ran, memory.ran_fits, memory.ran_uncertain, error),
        ("out of memory", overflows, fits, uncertain, ""),
    )
    return DocumentSection(
        title="Memory",
        table=build_table(
            (*words("rows"), *numbers("count", "fits", "uncertain", "oom", "median error")),
            (
                (name, str(count), str(fits), str(unsure), str(count - fits - unsure), text)
                for name, count, fits, unsure, text in counts
            ),
        ),
    )


def _list_worst(rows: tuple[ScoredRow, ...]) -> Iterator[DocumentSection]:
    errors = [
        (row.predicted_tokens_per_s_per_gpu / row.measured_tokens_per_s_per_gpu - 1, row)
        for row in rows
        if row.predicted_tokens_per_s_per_gpu and row.measured_tokens_per_s_per_gpu
    ]
    if not errors:
        return
    yield DocumentSection(
        title="Speed predicted worst",
        table=build_table(
            (*words("row"), *numbers("measured", "predicted", "error"), *words("calibration")),
            (
                (
                    row.id,
                    f"{row.measured_tokens_per_s_per_gpu:,.0f}",
                    f"{row.predicted_tokens_per_s_per_gpu:,.0f}",
                    f"{error:+.1%}",
                    row.calibration,
                )
                for error, row in sorted(errors, key=lambda pair: -abs(pair[0]))[:_MAX_WORST]
            ),
        ),
    )


def _list_skipped(rows: tuple[ScoredRow, ...]) -> DocumentSection:
    reasons = Counter(row.skipped for row in rows if row.skipped).most_common()
    shown = [(str(count), reason) for reason, count in reasons[:_MAX_REASONS]]
    others = sum(count for _, count in reasons[_MAX_REASONS:])
    if others:
        shown.append((str(others), "other reasons; --json lists each row"))
    return DocumentSection(
        title="Skipped",
        table=build_table((*numbers("rows"), *words("reason")), shown),
        extent=Extent.LONG,
    )


def _list_rows(rows: tuple[ScoredRow, ...]) -> DocumentSection:
    scored: list[Row] = [
        {
            "row": row.id,
            "publisher": row.publisher,
            "stated": row.stated,
            "measured tokens/s": row.measured_tokens_per_s_per_gpu,
            "predicted tokens/s": row.predicted_tokens_per_s_per_gpu,
            "measured peak, GB": row.measured_peak_memory_gb,
            "predicted peak, GB": row.predicted_peak_memory_gb,
        }
        for row in rows
        if row.skipped is None
    ]
    return DocumentSection(title="Every row", table=tabulate(scored), extent=Extent.WHOLE)
