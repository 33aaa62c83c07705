"""A sweep as document, CSV and SVG: the seven columns of benchmark tables, with predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from moewright.report.document import (
    Column,
    Document,
    DocumentSection,
    build_table,
    numbers,
    words,
)
from moewright.spec.plan import Estimate
from moewright.spec.quoting import Csv, Html
from moewright.spec.units import GIB, format_figures, format_given, mention
from moewright.tuning.sweep import StepFigures, SweepRow, peak_memory_by_part, step_figures

COLUMNS = (
    "configuration",
    "SeqLen",
    "GBS",
    "GPUs",
    "time/iter (s)",
    "tokens/GPU/s",
    "TFLOP/s/GPU",
    "predicted time/iter (s)",
    "predicted tokens/GPU/s",
    "predicted TFLOP/s/GPU",
    "error",
    "predicted memory",
)

NO_NOTES: Mapping[str, str] = MappingProxyType({})

# Sizes of a drawing, in pixels.
_ROW_HEIGHT = 34
_THIN_ROW_HEIGHT = 18
_TITLE_HEIGHT = 26
_LABEL_WIDTH = 330
_BAR_WIDTH = 420
_MEASURED_FILL = Html.write('fill="#3b6ea5"')
_PREDICTED_OUTLINE = Html.write('fill="none" stroke="#b5651d"')


def format_row(row: SweepRow) -> tuple[str, ...]:
    """Return one line of the table as texts; "-" stands for what nobody measured."""
    predicted = step_figures(row.predicted) if row.predicted else None
    error = ""
    if predicted and row.measured and row.measured.tokens:
        error = f"{predicted.tokens / row.measured.tokens - 1:+.1%}"
    memory = row.refusal
    if row.predicted:
        memory = f"{row.predicted.peak_bytes / GIB:.1f} GiB, {row.predicted.verdict}"
    name = row.spec.name
    if row.trial and row.trial.failed:
        name += f" [{row.trial.failed}]"
    return (
        name,
        str(row.seq_len),
        str(row.global_batch),
        str(row.devices),
        *_format_figures(row.measured),
        *_format_figures(predicted),
        error,
        memory,
    )


def _format_figures(figures: StepFigures | None) -> tuple[str, str, str]:
    if figures is None:
        return "-", "-", "-"
    digits = 1
    if figures.tokens < 1000 or figures.time_s > 1:
        digits = 2
    return (
        f"{figures.time_s:.3f}".rstrip("0").rstrip(".") if figures.time_s else "-",
        f"{figures.tokens:.{digits}f}" if figures.tokens else "-",
        format_given(figures.tflops, format_figures, "-"),
    )


def build_sweep_document(
    title: str,
    tables: Mapping[str, Sequence[SweepRow]],
    memory: Mapping[str, Estimate],
    *,
    source: str = "",
    notes: Mapping[str, str] = NO_NOTES,
) -> Document:
    """Build the tables of a sweep by title, each with its note, and the memory of some layouts."""
    return Document(
        heading=title,
        subject=mention("Measured: {}.", source),
        sections=(
            *(
                DocumentSection(
                    title=name,
                    table=build_table(_list_columns(), map(format_row, rows)),
                    notes=tuple(notes.get(name, "").splitlines()),
                )
                for name, rows in tables.items()
            ),
            *(_build_memory(name, estimate) for name, estimate in memory.items()),
        ),
    )


def _list_columns() -> Iterator[Column]:
    first, *numbered, last = COLUMNS
    yield from words(first)
    yield from numbers(*numbered)
    yield from words(last)


def _build_memory(name: str, estimate: Estimate) -> DocumentSection:
    """Build the memory of a layout's fullest rank: GiB and share by component, by module."""
    peak = f"{estimate.peak_bytes / GIB:.1f} GiB"
    parts = []
    for kind, sizes in peak_memory_by_part(estimate):
        total = sum(sizes.values())
        rows = ((key, f"{size / GIB:.2f}", f"{size / total:.1%}") for key, size in sizes.items())
        columns = (*words(f"by {kind}"), *numbers("GiB", "share"))
        parts.append(DocumentSection(table=build_table(columns, rows)))
    return DocumentSection(
        title=f"Memory of {name}: {peak} on the fullest rank (predicted)", sections=tuple(parts)
    )


def render_csv(tables: Mapping[str, Sequence[SweepRow]]) -> Csv:
    """Return all tables, by title, as one CSV."""
    cells: list[tuple[str, ...]] = [("table", *COLUMNS)]
    cells += [(title, *format_row(row)) for title, rows in tables.items() for row in rows]
    return Csv.dump(cells)


def render_svg(tables: Mapping[str, Sequence[SweepRow]]) -> Html:
    """Return SVG bars of tokens a second and device: measured solid, predicted outlined."""
    rows = [row for table in tables.values() for row in table]
    longest = max((figures.tokens for row in rows for figures in _all_figures(row)), default=1.0)
    # Not 0, which is divided by.
    tokens_of_full_bar = longest or 1.0
    shapes: list[Html] = []
    y = 10
    for title, table in tables.items():
        if not table:
            continue
        y += _TITLE_HEIGHT
        shapes.append(_title(title, y))
        for row in table:
            shapes.append(Html.write('<text x="8" y="{}">{}</text>', y + 14, row.spec.name))
            shapes += _token_bars(row, y, tokens_of_full_bar)
            y += _ROW_HEIGHT
    return _svg(shapes, y)


def render_memory_svg(estimates: Mapping[str, Estimate]) -> Html:
    """Return SVG bars of what fills the fullest rank of each layout, on one scale.

    Each layout has a picture by component, then one by module.
    """
    pictures = [
        (name, kind, sizes)
        for name, estimate in estimates.items()
        for kind, sizes in peak_memory_by_part(estimate)
    ]
    largest = max((size for _, _, sizes in pictures for size in sizes.values()), default=1)
    bytes_of_full_bar = largest or 1
    shapes: list[Html] = []
    y = 10
    for name, kind, sizes in pictures:
        y += _TITLE_HEIGHT
        shapes.append(_title(f"{name}: {sum(sizes.values()) / GIB:.1f} GiB by {kind}", y))
        for key, size in sizes.items():
            width = _BAR_WIDTH * size / bytes_of_full_bar
            shapes.append(Html.write('<text x="8" y="{}">{}</text>', y + 13, key))
            shapes.append(_bar(y + 2, width, _MEASURED_FILL))
            shapes.append(_bar_text(y + 13, width, f"{size / GIB:.2f} GiB"))
            y += _THIN_ROW_HEIGHT
    return _svg(shapes, y)


def _all_figures(row: SweepRow) -> Iterator[StepFigures]:
    if row.measured:
        yield row.measured
    if row.predicted:
        yield step_figures(row.predicted)


def _token_bars(row: SweepRow, y: int, tokens_of_full_bar: float) -> Iterator[Html]:
    if row.measured and row.measured.tokens:
        width = _BAR_WIDTH * row.measured.tokens / tokens_of_full_bar
        yield _bar(y + 2, width, _MEASURED_FILL)
        yield _bar_text(y + 13, width, f"{row.measured.tokens:,.0f}")
    if row.predicted:
        tokens = step_figures(row.predicted).tokens
        width = _BAR_WIDTH * tokens / tokens_of_full_bar
        yield _bar(y + 16, width, _PREDICTED_OUTLINE)
        yield _bar_text(y + 27, width, f"{tokens:,.0f} predicted")


def _title(text: str, y: int) -> Html:
    return Html.write('<text x="8" y="{}" font-weight="bold">{}</text>', y - 8, text)


def _bar(y: int, width: float, style: Html) -> Html:
    return Html.write(
        '<rect x="{}" y="{}" width="{:.1f}" height="12" {}/>', _LABEL_WIDTH, y, width, style
    )


def _bar_text(y: int, width: float, text: str) -> Html:
    return Html.write('<text x="{:.1f}" y="{}">{}</text>', _LABEL_WIDTH + width + 4, y, text)


def _svg(shapes: Sequence[Html], height: int) -> Html:
    return Html.write(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{}" height="{}" '
        'font-family="sans-serif" font-size="12">{}</svg>\n',
        _LABEL_WIDTH + _BAR_WIDTH + 90,
        height + 10,
        Html.concat(shapes),
    )
