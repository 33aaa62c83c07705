"""Pictures of pipelines: the timetable of every rank in units, and what schedules come to."""

from __future__ import annotations

from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.errors import BadInput
from moewright.view.course.bars import BarPart, StackedBar, draw_bars
from moewright.view.course.drawing import CoursePicture, Drawing, picture
from moewright.view.course.lesson import Lesson
from moewright.view.course.pipeline_counts import UnitRow, lesson_timetable
from moewright.view.palette import ROW_COLOURS, TIME_COLOURS

_ROW = 24
_LEAST_FOR_TEXT = 15  # units of width under a number
_NAMES = {RowKind.F: "forward", RowKind.B: "backward", RowKind.W: "weight gradients"}
_COMPARED = (
    ("1F1B", {"schedule": "1f1b", "vpp": "1"}),
    ("interleaved", {"schedule": "interleaved", "vpp": "2"}),
    ("ZB-H1", {"schedule": "zb-h1", "vpp": "1"}),
    ("ZBV", {"schedule": "zbv", "vpp": "2"}),
    ("DualPipeV", {"schedule": "dualpipev", "vpp": "2"}),
)


def draw_timetable(lesson: Lesson) -> CoursePicture:
    """Draw when each rank runs which micro-batch; empty time is the bubble."""
    table = lesson_timetable(lesson)

    def draw(drawing: Drawing) -> None:
        names = 22.0 if drawing.is_narrow else 52.0
        scale = (drawing.width - names) / table.end
        for rank, rows in enumerate(table.ranks):
            y = rank * (_ROW + 3)
            name = str(rank) if drawing.is_narrow else f"stage {rank}"
            drawing.text(0, y + 16, name, "quiet")
            drawing.box(names, y, (table.end * scale, _ROW), "", kind="empty")
            for row in rows:
                _draw_pass(drawing, row, (names, y), scale)
        kinds = {row.kind for rows in table.ranks for row in rows}
        keys = [(ROW_COLOURS[kind.value], name) for kind, name in _NAMES.items() if kind in kinds]
        drawing.keys(len(table.ranks) * (_ROW + 3) + 6, keys)

    rows = [
        (str(rank), f"{table.work:g}", f"{table.end - table.work:g}", f"{table.live[rank]:g}")
        for rank in range(len(table.ranks))
    ]
    says = (
        f"{len(table.ranks)} stages need {table.end:g} units for {table.work:g} units of work: "
        f"{table.idle:.0%} of the time is idle."
    )
    columns = ("stage", "units of work", "idle units", "micro-batches held at most")
    return picture(says, draw, columns, rows)


def _draw_pass(drawing: Drawing, row: UnitRow, corner: tuple[float, float], scale: float) -> None:
    x = corner[0] + row.start * scale
    width = row.length * scale
    hint = f"{_NAMES[row.kind]} of micro-batch {row.micro_batch + 1}, chunk {row.chunk + 1}"
    kind = "faded" if row.chunk else ""
    drawing.box(
        x, corner[1], (width - 0.8, _ROW), ROW_COLOURS[row.kind.value], hint=hint, kind=kind
    )
    if width >= _LEAST_FOR_TEXT:
        text = str(row.micro_batch + 1)
        drawing.text(x + width / 2, corner[1] + 16, text, "light small", anchor="middle")


def draw_schedules(lesson: Lesson) -> CoursePicture:
    """Draw the idle share of every schedule for the same stages and micro-batches."""
    bars = []
    rows = []
    for name, settings in _COMPARED:
        other = lesson.change(settings)
        try:
            table = lesson_timetable(other)
        except BadInput:  # not for so few micro-batches
            continue
        colour = TIME_COLOURS["bubble"]
        part = BarPart(name=name, amount=table.idle, colour=colour, text=f"{table.idle:.1%}")
        least, most = min(table.live), max(table.live)
        holds = f"holds {most:g}" if least == most else f"holds {least:g} to {most:g}"
        bars.append(StackedBar(name=name, parts=(part,), text=f"{table.idle:.1%}, {holds}"))
        rows.append((name, f"{table.idle:.1%}", f"{max(table.live):g}"))
    says = "Idle share: " + "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    columns = ("schedule", "idle", "micro-batches held at most")
    return picture(says, lambda drawing: _draw_plain(drawing, bars), columns, rows)


def _draw_plain(drawing: Drawing, bars: list[StackedBar]) -> None:
    draw_bars(drawing, 0, bars)
