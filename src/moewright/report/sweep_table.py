"""A sweep as Markdown, CSV and a drawing: the seven columns of benchmark tables, predicted beside
measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from moewright.spec.plan import Estimate
from moewright.spec.units import GIB
from moewright.tuning.sweep import StepFigures, SweepRow, peak_memory_by_part, step_figures

COLUMNS = (
    *("configuration", "SeqLen", "GBS", "GPUs", "time/iter (s)", "tokens/GPU/s", "TFLOP/s/GPU"),
    *(
        "predicted time/iter (s)",
        "predicted tokens/GPU/s",
        "predicted TFLOP/s/GPU",
        "error",
        "predicted memory",
    ),
)
_ROW, _THIN, _LEFT, _WIDE = 34, 18, 330, 420  # of a drawing, pixels


def format_row(row: SweepRow) -> tuple[str, ...]:
    """One line of the table; "-" for what nobody measured."""
    ours = step_figures(row.predicted) if row.predicted else None
    error = ""
    if ours and row.measured and row.measured.tokens:
        error = f"{ours.tokens / row.measured.tokens - 1:+.1%}"
    memory = (
        f"{row.predicted.peak_bytes / GIB:.1f} GiB, {row.predicted.verdict}"
        if row.predicted
        else row.refusal
    )
    failed = row.trial.failed if row.trial else ""
    return (
        row.spec.name + (f" [{failed}]" if failed else ""),
        str(row.seq_len),
        str(row.global_batch),
        str(row.devices),
        *_figures(row.measured),
        *_figures(ours),
        error,
        memory,
    )


def _figures(found: StepFigures | None) -> tuple[str, str, str]:
    if found is None:
        return "-", "-", "-"
    digits = 2 if found.tokens < 1000 or found.time_s > 1 else 1
    return (
        f"{found.time_s:.3f}".rstrip("0").rstrip(".") if found.time_s else "-",
        f"{found.tokens:.{digits}f}" if found.tokens else "-",
        f"{found.tflops:.4g}" if found.tflops else "-",
    )


def render_markdown(title: str, rows: Sequence[SweepRow], note: str = "") -> str:
    lines = [f"### {title}", "", " | ".join(COLUMNS), " | ".join("--" for _ in COLUMNS)]
    lines += [" | ".join(format_row(row)) for row in rows]
    return "\n".join([*lines, *(["", note] if note else []), ""])


def render_csv(tables: Mapping[str, Sequence[SweepRow]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("table", *COLUMNS))
    for title, rows in tables.items():
        writer.writerows((title, *format_row(row)) for row in rows)
    return out.getvalue()


def render_memory_markdown(name: str, found: Estimate) -> str:
    """Both memory pictures of a layout in words: GiB and share by component, by module."""
    lines = [
        f"### Memory of {name}: {found.peak_bytes / GIB:.1f} GiB on the fullest rank (predicted)",
        "",
    ]
    for what, held in peak_memory_by_part(found):
        total = sum(held.values())
        lines += [f"by {what} | GiB | share", "-- | -- | --"]
        lines += [f"{key} | {size / GIB:.2f} | {size / total:.1%}" for key, size in held.items()]
        lines.append("")
    return "\n".join(lines)


def render_svg(tables: Mapping[str, Sequence[SweepRow]]) -> str:
    """SVG bars of tokens a second and device: measured solid, predicted outlined."""
    rows = [(title, row) for title, of in tables.items() for row in of]
    most = max((figures.tokens for _, row in rows for figures in _both(row)), default=1.0) or 1.0
    parts, at, last = [], 10, ""
    for title, row in rows:
        if title != last:
            at += 26
            parts.append(f'<text x="8" y="{at - 8}" font-weight="bold">{escape(title)}</text>')
            last = title
        parts.append(f'<text x="8" y="{at + 14}">{escape(row.spec.name)}</text>')
        parts += _bars(row, at, most)
        at += _ROW
    return _svg(parts, at)


def _svg(parts: Sequence[str], at: int) -> str:
    size = f'width="{_LEFT + _WIDE + 90}" height="{at + 10}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def render_memory_svg(found: Mapping[str, Estimate]) -> str:
    """SVG bars of what fills the fullest rank of each layout: by component, then by module, on one
    scale."""
    pictures = [
        (name, what, held)
        for name, each in found.items()
        for what, held in peak_memory_by_part(each)
    ]
    most = max((size for _, _, held in pictures for size in held.values()), default=1) or 1
    parts, at = [], 10
    for name, what, held in pictures:
        at += 26
        title = f"{name}: {sum(held.values()) / GIB:.1f} GiB by {what}"
        parts.append(f'<text x="8" y="{at - 8}" font-weight="bold">{escape(title)}</text>')
        for key, size in held.items():
            wide = _WIDE * size / most
            parts.append(f'<text x="8" y="{at + 13}">{escape(key)}</text>')
            parts.append(
                f'<rect x="{_LEFT}" y="{at + 2}" width="{wide:.1f}" height="12" fill="#3b6ea5"/>'
            )
            parts.append(
                f'<text x="{_LEFT + wide + 4:.1f}" y="{at + 13}">{size / GIB:.2f} GiB</text>'
            )
            at += _THIN
    return _svg(parts, at)


def _both(row: SweepRow) -> Iterator[StepFigures]:
    if row.measured:
        yield row.measured
    if row.predicted:
        yield step_figures(row.predicted)


def _bars(row: SweepRow, at: int, most: float) -> Iterator[str]:
    if row.measured and row.measured.tokens:
        wide = _WIDE * row.measured.tokens / most
        yield f'<rect x="{_LEFT}" y="{at + 2}" width="{wide:.1f}" height="12" fill="#3b6ea5"/>'
        yield f'<text x="{_LEFT + wide + 4:.1f}" y="{at + 13}">{row.measured.tokens:,.0f}</text>'
    if row.predicted:
        tokens = step_figures(row.predicted).tokens
        wide = _WIDE * tokens / most
        yield f'<rect x="{_LEFT}" y="{at + 16}" width="{wide:.1f}" height="12" fill="none" stroke="#b5651d"/>'
        yield f'<text x="{_LEFT + wide + 4:.1f}" y="{at + 27}">{tokens:,.0f} predicted</text>'
