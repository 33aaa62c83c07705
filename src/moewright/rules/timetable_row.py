"""What a timetable is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RowKind(StrEnum):
    F = "F"  # forward
    B = "B"  # backward; input gradients alone where a W row follows
    W = "W"  # weight gradients alone, where a schedule splits them from B


@dataclass(frozen=True, kw_only=True, slots=True)
class TimetableRow:
    kind: RowKind
    micro_batch: int
    chunk: int
