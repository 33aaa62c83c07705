"""A run beside the nearest published runs as a document: at most forty lines on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.diagnosis.published import Nearness
from moewright.diagnosis.run_comparison import ComparedRun, GapCloser, RunComparison
from moewright.report.document import (
    Document,
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Line,
    Phrase,
    build_table,
    numbers,
    words,
)
from moewright.report.estimate_document import job_title
from moewright.report.finding_sections import build_advice_section, list_fix_runs
from moewright.spec.units import (
    format_change,
    format_figures,
    format_given,
    format_seconds,
    mention,
)

_MAX_GAPS = 6  # before -v
_MAX_CLOSERS = 2  # before -v


def build_run_comparison_document(comparison: RunComparison) -> Document:
    """Build the gap, the published runs beside it with their sources, and what closes it."""
    return Document(
        subject=job_title(comparison.job),
        heading=comparison.headline,
        sections=tuple(_list_sections(comparison)),
    )


def _list_sections(comparison: RunComparison) -> Iterator[DocumentSection]:
    yield DocumentSection(facts=tuple(_list_speeds(comparison)))
    if comparison.standing:
        yield DocumentSection(lines=(comparison.standing,))
    yield _list_runs(comparison)
    yield _list_gaps(comparison)
    if comparison.advice is not None:
        yield build_advice_section(comparison.advice)
    if comparison.closers:
        closers = tuple(map(_list_closer_runs, comparison.closers))
        yield DocumentSection(items=ItemList(items=closers, short=_MAX_CLOSERS))
    yield DocumentSection(notes=comparison.notes)


def _list_speeds(comparison: RunComparison) -> Iterator[tuple[str, Line]]:
    estimate = comparison.job.estimate
    for name, step_s, speed, mfu in (
        ("measured", comparison.measured_step_s, comparison.measured, comparison.mfu),
        ("predicted", estimate.step_s, comparison.predicted, comparison.predicted_mfu),
    ):
        rate = ""
        if mfu:
            rate = f", {mfu:.1%} of the bf16 peak"
        yield (
            name,
            f"{format_seconds(step_s)} a step, {format_figures(speed)} tokens/s a device{rate}",
        )


def _list_runs(comparison: RunComparison) -> DocumentSection:
    sources: dict[str, list[str]] = {}
    for item in comparison.nearest:
        sources.setdefault(item.run.source, []).append(item.run.id)
    notes: tuple[Line, ...] = ()
    if any(item.run.nearness is not Nearness.FAR for item in comparison.nearest):
        notes = ('"this job so": if it came as near its prediction as that run did to its own',)
    layouts = (
        (item.run.id, item.run.precision, Phrase(text=item.run.layout, face=Face.CODE))
        for item in comparison.nearest
    )
    return DocumentSection(
        table=build_table(
            (
                *words("nearest published runs"),
                *numbers("tokens/s", "of bf16 peak", "this job so"),
                *words("near", "differs in"),
            ),
            map(_list_run_cells, comparison.nearest),
        ),
        items=ItemList(
            items=tuple(f"{', '.join(names)}: {source}" for source, names in sources.items())
        ),
        notes=notes,
        sections=(
            DocumentSection(
                title="Their layouts",
                table=build_table(words("run", "precision", "layout"), layouts),
                extent=Extent.WHOLE,
            ),
        ),
    )


def _list_run_cells(item: ComparedRun) -> Iterator[Line]:
    run = item.run
    yield f"{run.id}: {run.model.rpartition('/')[2]}, {run.devices} x {run.device}"
    yield format_figures(run.measured)
    yield mention("{:.1%}", run.mfu)
    yield format_given(item.expected, format_figures)
    yield run.nearness.value
    yield run.differs or "nothing compared"


def _list_gaps(comparison: RunComparison) -> DocumentSection:
    rows = (
        (
            gap.name.value,
            format_seconds(gap.measured_s) if gap.is_measured else "",
            format_seconds(gap.predicted_s),
            format_change(gap.gap_s, format_seconds),
            f"{gap.gap_s / comparison.measured_step_s:+.1%}",
            "" if gap.is_measured else "not measured",
        )
        for gap in comparison.gaps
    )
    columns = (
        *words("part of the step"),
        *numbers("measured", "predicted", "gap", "of the step"),
        *words(""),
    )
    return DocumentSection(table=build_table(columns, rows, short=_MAX_GAPS))


def _list_closer_runs(closer: GapCloser) -> tuple[str | Phrase, ...]:
    source = mention(" [{}]", closer.source)
    return (f"{closer.gap}: ", *list_fix_runs(closer.fix), source)
