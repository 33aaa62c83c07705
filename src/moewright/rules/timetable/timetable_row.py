"""The rows of a pipeline timetable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RowKind(StrEnum):
    """What a row of a timetable runs."""

    F = "F"  # forward
    B = "B"  # backward; input gradients alone where a W row follows
    W = "W"  # weight gradients alone, where a schedule splits them from B


@dataclass(frozen=True, kw_only=True, slots=True)
class TimetableRow:
    """One forward, backward or weight-gradient pass of a micro-batch through a model chunk."""

    kind: RowKind
    micro_batch: int
    chunk: int


Table = tuple[tuple[TimetableRow, ...], ...]  # the rows of every pipeline rank
# What identifies a row among those of all ranks: kind, micro-batch, virtual stage.
RowKey = tuple[RowKind, int, int]
