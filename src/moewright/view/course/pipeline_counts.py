"""Figures of a pipeline in units: a forward takes 1, the two parts of a backward 1 each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from moewright.view.course.lesson import Lesson
from moewright.view.course.quantity import Quantity, Unit

_KEPT_TIMETABLES = 64


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
    plan = lesson.plan
    return build_unit_timetable(plan.layout, plan.estimate.micro_batches)


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
