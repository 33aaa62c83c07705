"""Pictures of pipelines, their timetables in units, and of where memory goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NoReturn

from moewright.rules.timetable.schedule import bubble_fraction, peak_live_chunks, timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, Module
from moewright.spec.units import format_bytes, format_seconds
from moewright.view.course.drawing import (
    BarLimit,
    BarPart,
    CoursePicture,
    Drawing,
    StackedBar,
    draw_bars,
    picture,
)
from moewright.view.course.job_figures import peak_ledger, sum_kept, sum_memory
from moewright.view.course.lesson import Lesson
from moewright.view.course.quantity import Quantity, Unit
from moewright.view.page import MEMORY_COLOURS, MODULE_COLOURS, ROW_COLOURS, TIME_COLOURS

_KEPT_TIMETABLES = 64  # of one chapter's controls


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRow:
    """A row of a rank with its place in time, in units of the forward of a whole stage."""

    kind: RowKind
    micro_batch: int
    chunk: int
    start: float
    length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTimetable:
    """The rows of every rank [ranks][rows], the end of the last, and what ranks hold at most."""

    ranks: tuple[tuple[UnitRow, ...], ...]
    end: float
    live: tuple[float, ...]  # micro-batches of a whole stage, at a rank's fullest

    @property
    def work(self) -> float:
        """The work of a rank; all have the same."""
        return sum(row.length for row in self.ranks[0])

    @property
    def idle(self) -> float:
        """The share of the time in which a rank has nothing to do."""
        return 1 - self.work / self.end


@lru_cache(maxsize=_KEPT_TIMETABLES)
def build_unit_timetable(layout: Layout, micro_batches: int) -> UnitTimetable:
    """Run a layout's timetable with equal stages and messages that take no time.

    A whole stage takes 1 for a forward and 2 for a backward, so a chunk takes 1 / vpp of that.
    """
    part = 1 / layout.vpp
    stages = [
        StageSeconds(forward=part, input_backward=part, weight_backward=part)
        for _ in range(layout.pp * layout.vpp)
    ]
    table = timetable(layout, micro_batches)
    ends = row_end_times(layout, table, stages)
    ranks = []
    for rank, rows in enumerate(table):
        split = {(row.micro_batch, row.chunk) for row in rows if row.kind is RowKind.W}
        timed = []
        for row in rows:
            stage = virtual_stage(layout, rank, row.chunk)
            is_whole = row.kind is RowKind.B and (row.micro_batch, row.chunk) not in split
            length = 2 * part if is_whole else part
            timed.append(
                UnitRow(
                    kind=row.kind,
                    micro_batch=row.micro_batch,
                    chunk=row.chunk,
                    start=ends[row.kind, row.micro_batch, stage] - length,
                    length=length,
                )
            )
        ranks.append(tuple(timed))
    return UnitTimetable(
        ranks=tuple(ranks),
        end=max(ends.values()),
        live=tuple(peak_live_chunks(rows) * part for rows in table),
    )


def lesson_timetable(lesson: Lesson) -> UnitTimetable:
    """Return the timetable of a lesson's job in units."""
    job = lesson.job
    return build_unit_timetable(job.layout, job.micro_batches)


def _pipe(lesson: Lesson, part: str) -> Quantity:
    table = lesson_timetable(lesson)
    plan = lesson.plan
    numbers = {
        "idle": (table.idle, Unit.PERCENT),
        "end": (table.end, Unit.NUMBER),
        "work": (table.work, Unit.NUMBER),
        "live": (table.live[0], Unit.NUMBER),
        "live_last": (table.live[-1], Unit.NUMBER),
        "rule": (bubble_fraction(plan.layout, plan.estimate.micro_batches), Unit.PERCENT),
    }
    if part not in numbers:
        _refuse(part)
    number, unit = numbers[part]
    return Quantity(number=number, unit=unit)


def _refuse(part: str) -> NoReturn:
    raise BadInput(Reason(field="chapter", value=f"pipe.{part}", rule="there is no such figure"))


PIPELINE_FIGURES: Mapping[str, Callable[[Lesson, str], Quantity]] = MappingProxyType(
    {"pipe": _pipe}
)


_ROW = 24  # points
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
        names = drawing.choose(narrow=22.0, wide=52.0)
        scale = (drawing.width - names) / table.end
        for rank, rows in enumerate(table.ranks):
            y = rank * (_ROW + 3)
            name = drawing.choose(narrow=f"{rank}", wide=f"stage {rank}")
            drawing.text(0, y + 16, name, "quiet")
            drawing.box(names, y, (table.end * scale, _ROW), "", kind="empty")
            _draw_passes(drawing, rows, (names, y), scale)
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


def _draw_passes(
    drawing: Drawing, rows: Sequence[UnitRow], corner: tuple[float, float], scale: float
) -> None:
    """Draw the passes of a rank: with its number where there is room, else alike ones together."""
    thin: dict[tuple[RowKind, bool, float], list[tuple[float, float]]] = {}
    for row in rows:
        x = corner[0] + row.start * scale
        width = row.length * scale
        if width >= _LEAST_FOR_TEXT:
            _draw_pass(drawing, row, (x, corner[1]), width)
        else:
            thin.setdefault((row.kind, row.chunk > 0, row.length), []).append((x, corner[1]))
    for (kind, is_later, length), corners in thin.items():
        size = (0.85 * length * scale, _ROW)
        drawing.boxes(corners, size, ROW_COLOURS[kind.value], "faded" if is_later else "")


def _draw_pass(drawing: Drawing, row: UnitRow, corner: tuple[float, float], width: float) -> None:
    x, y = corner
    hint = f"{_NAMES[row.kind]} of micro-batch {row.micro_batch + 1}, chunk {row.chunk + 1}"
    kind = "faded" if row.chunk else ""
    drawing.box(x, y, (width - 0.8, _ROW), ROW_COLOURS[row.kind.value], hint=hint, kind=kind)
    drawing.text(x + width / 2, y + 16, str(row.micro_batch + 1), "light small", anchor="middle")


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


_RECOMPUTE_CHOICES = (("nothing", "none"), ("selected modules", "select"), ("whole layers", "full"))


def _list_parts(lesson: Lesson) -> tuple[BarPart, ...]:
    ledger = peak_ledger(lesson)
    parts = []
    for name, colour in MEMORY_COLOURS.items():
        amount = sum_memory(ledger, Component(name))
        if amount and name != Component.HOST:
            text = format_bytes(amount)
            parts.append(BarPart(name=name, amount=amount, colour=colour, text=text))
    return tuple(parts)


def draw_device(lesson: Lesson) -> CoursePicture:
    """Draw the fullest device: every component on top of the other, and each by itself."""
    parts = _list_parts(lesson)
    estimate = lesson.plan.estimate
    capacity = BarLimit(
        amount=estimate.capacity_bytes, name=f"capacity {format_bytes(estimate.capacity_bytes)}"
    )
    peak = format_bytes(estimate.peak_bytes)
    whole = StackedBar(name="device", parts=parts, text=peak, kind=estimate.verdict.value)
    single = [StackedBar(name=part.name, parts=(part,), text=part.text) for part in parts]

    def draw(drawing: Drawing) -> None:
        end = draw_bars(drawing, 0, [whole], capacity)
        draw_bars(drawing, end + 14, single)

    says = (
        f"The fullest device holds {peak} at its peak; it can hold "
        f"{format_bytes(estimate.capacity_bytes)}: {estimate.verdict.value}."
    )
    return picture(says, draw, ("component", "bytes"), [(part.name, part.text) for part in parts])


def draw_kept(lesson: Lesson) -> CoursePicture:
    """Draw what the modules of the model keep for backward."""
    ledger = peak_ledger(lesson)
    bars = []
    for name, colour in MODULE_COLOURS.items():
        amount = sum_kept(ledger, Module(name))
        if amount:
            text = format_bytes(amount)
            part = BarPart(name=name, amount=amount, colour=colour, text=text)
            bars.append(StackedBar(name=name.replace("_", " "), parts=(part,), text=text))
    bars.sort(key=lambda bar: -bar.amount)
    most = bars[0]
    says = f"Of what forward keeps for backward, {most.name} has most: {most.text}."
    rows = [(bar.name, bar.text) for bar in bars]
    return picture(says, lambda drawing: _draw_all(drawing, bars), ("module", "kept"), rows)


def _draw_all(drawing: Drawing, bars: list[StackedBar]) -> None:
    draw_bars(drawing, 0, bars)


def draw_recompute(lesson: Lesson) -> CoursePicture:
    """Draw the peak and the step under each choice of recompute."""
    estimates = []
    for name, value in _RECOMPUTE_CHOICES:
        try:
            estimate = lesson.change({"recompute": value}).plan.estimate
        except BadInput:  # a layout that this choice does not go with
            continue
        estimates.append((name, estimate))
    bars = []
    for name, estimate in estimates:
        kind = estimate.verdict.value
        text = f"{format_bytes(estimate.peak_bytes)}, {format_seconds(estimate.step_s)}"
        colour = MEMORY_COLOURS["activations"]
        part = BarPart(name=name, amount=estimate.peak_bytes, colour=colour, text=text)
        bars.append(StackedBar(name=name, parts=(part,), text=text, kind=kind))
    capacity = lesson.plan.estimate.capacity_bytes
    limit = BarLimit(amount=capacity, name=f"capacity {format_bytes(capacity)}")
    says = "Peak and step where backward computes again: " + "; ".join(
        f"{bar.name} {bar.text}" for bar in bars
    )
    rows = [
        (name, format_bytes(item.peak_bytes), format_seconds(item.step_s), item.verdict.value)
        for name, item in estimates
    ]
    return picture(
        says,
        lambda drawing: _draw_limited(drawing, bars, limit),
        ("computed again", "peak", "step", "verdict"),
        rows,
    )


def _draw_limited(drawing: Drawing, bars: list[StackedBar], limit: BarLimit) -> None:
    draw_bars(drawing, 0, bars, limit)
