"""Runs beside others as documents: published runs, a changed trace, a forecast of loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from moewright.diagnosis.load_forecast import LoadForecast, PlacementOffer
from moewright.diagnosis.published import Nearness
from moewright.diagnosis.run_comparison import ComparedRun, GapCloser, RunComparison
from moewright.diagnosis.traces.what_if_trace import ALL_RANKS, TraceWhatIf
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
    format_bytes,
    format_change,
    format_figures,
    format_given,
    format_seconds,
    mention,
    plural,
)

_MAX_GAPS = 6  # before -v
_MAX_CLOSERS = 2  # before -v


def build_run_comparison_document(comparison: RunComparison) -> Document:
    """Build the gap, the published runs beside it with their sources, and what closes it.

    At most forty lines on a terminal.
    """
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


def build_what_if_document(subject: str, replays: Sequence[TraceWhatIf]) -> Document:
    """Build a table of the ranks: the step as measured, replayed, and between its two bounds."""
    rows = (
        (
            "all" if item.rank == ALL_RANKS else str(item.rank),
            format_seconds(item.measured_s),
            f"{item.replayed_s / item.measured_s - 1:+.2%}",
            f"{format_seconds(item.low_s)} to {format_seconds(item.high_s)}",
            f"{item.low_s / item.measured_s - 1:+.1%} to {item.high_s / item.measured_s - 1:+.1%}",
        )
        for item in replays
    )
    columns = numbers("rank", "a step", "replayed", "with the change", "of the step")
    note = (
        "The bounds: kernels wait for other streams where their start shows it, or for all that "
        "had ended. Ranks are replayed alone: what they wait for each other is in their kernels."
    )
    if any(item.rank == ALL_RANKS for item in replays):
        note = "All ranks are replayed together: each waits for the others as it did in the trace."
    section = DocumentSection(table=build_table(columns, rows), notes=(note,))
    return Document(subject=subject, heading=replays[0].title(), sections=(section,))


def build_forecast_document(subject: str, forecast: LoadForecast) -> Document:
    """Build a table of the layers, and one of placements that are made for the load ahead."""
    layers = build_table(
        numbers("layer", "hottest rank", "now", "ahead", "8 of 10", "balanced", "a replica each"),
        (
            (
                str(layer.layer),
                str(layer.hottest_rank),
                f"{layer.now:.2f}",
                f"{layer.expected:.2f}",
                f"{layer.low:.2f} to {layer.high:.2f}",
                f"{layer.balanced:.2f}",
                f"{layer.replicated:.2f}",
            )
            for layer in forecast.layers
        ),
    )
    offers = build_table(
        (*words("layout"), *numbers("a step", "gains", "experts moved", "takes", "pays after")),
        (
            (
                offer.layout,
                format_seconds(offer.step_s),
                f"{offer.gain_s / forecast.step_s:+.1%}",
                f"{offer.moved_experts:,}, {format_bytes(offer.moved_bytes)}",
                format_seconds(offer.move_s),
                _describe_pay(offer),
            )
            for offer in forecast.offers
        ),
    )
    note = (
        f"With the placement of the run {format_seconds(forecast.step_s)} a step is predicted. A "
        "move takes the weights and states of the rank that receives most, over the slowest link "
        "of its group."
    )
    return Document(
        subject=subject,
        heading=forecast.title(),
        sections=(
            DocumentSection(title="Rows of the hottest rank over the mean", table=layers),
            DocumentSection(title="Placements for that load", table=offers, notes=(note,)),
        ),
    )


def _describe_pay(offer: PlacementOffer) -> str:
    if not isfinite(offer.pays_after):
        return "never"
    return plural(max(1, round(offer.pays_after)), "step")
