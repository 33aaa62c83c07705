"""Timetables that split the backward: input gradients first (B), weight gradients when there is
time for them (W).

ZB-H1 and ZBV: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241) and "Pipeline
Parallelism with Controllable Memory" (arXiv 2405.15362). DualPipeV: DeepSeek's DualPipe (arXiv
2412.19437) cut in half, as published with its code. Each function gives the rows of one pipeline
rank; chunk 1 of ZBV and DualPipeV lies on the way back of a V (`stages.stage_of`), so the first
rank holds the first and the last virtual stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moewright.rules.timetable_row import RowKind, TimetableRow

TimetableBuilder = Callable[[int, int, int], list[TimetableRow]]


class _Rank:
    """Rows of a rank as they are decided: micro-batches of a chunk go in order, weight gradients as
    they came."""

    def __init__(self, chunks: int) -> None:
        self.rows: list[TimetableRow] = []
        self._forwards = [0] * chunks
        self._backwards = [0] * chunks
        self._owed: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self._add(RowKind.F, self._forwards[chunk], chunk)
        self._forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool) -> None:
        micro_batch = self._backwards[chunk]
        self._add(RowKind.B, micro_batch, chunk)
        self._backwards[chunk] += 1
        if split:
            self._owed.append((micro_batch, chunk))

    def weight(self) -> None:
        """The oldest weight gradients still owed."""
        self._add(RowKind.W, *self._owed.popleft())

    def settle(self) -> None:
        while self._owed:
            self.weight()

    def left(self, chunk: int, micro_batches: int) -> bool:
        return self._forwards[chunk] < micro_batches

    def _add(self, kind: RowKind, micro_batch: int, chunk: int) -> None:
        self.rows.append(TimetableRow(kind=kind, micro_batch=micro_batch, chunk=chunk))


def zb_h1(pp: int, rank: int, micro_batches: int) -> list[TimetableRow]:
    """1F1B whose rank r owes the weight gradients of r micro-batches, and pays them while it would
    wait at the end.

    Every rank holds as much as the first one of 1F1B; the bubble falls from (pp - 1)(F + B + W) to
    (pp - 1)(F + B - W).
    """
    at = _Rank(1)
    ahead = min(pp - rank - 1, micro_batches)
    for _ in range(ahead):
        at.forward(0)
    for done in range(micro_batches):
        if at.left(0, micro_batches):
            at.forward(0)
        at.backward(0, split=True)
        if done >= rank:
            at.weight()
    at.settle()
    return at.rows


def zbv(pp: int, rank: int, micro_batches: int) -> list[TimetableRow]:
    """No rank waits between its first and its last row where F, B and W take equal time and there
    are 2 pp - 1 micro-batches; every rank holds what the first one of 1F1B holds.

    Fewer micro-batches run the table of 2 pp - 1 with the others' rows left out.
    """
    whole = max(micro_batches, 2 * pp - 1)
    at = _Rank(2)
    for _ in range(2 * (pp - rank) - 1):
        at.forward(0)
    for _ in range(rank):
        at.forward(1)
        at.forward(0)
    for _ in range(pp - rank):
        at.forward(1)
        at.backward(1, split=True)
        at.weight()
    while at.left(1, whole):
        if at.left(0, whole):
            at.forward(0)
        at.backward(0, split=True)
        at.weight()
        at.forward(1)
        at.backward(1, split=True)
        at.weight()
    for _ in range(rank):
        at.backward(0, split=True)
        at.backward(1, split=True)
    for _ in range(pp - rank):
        at.backward(0, split=True)
        at.weight()
    at.settle()
    return [row for row in at.rows if row.micro_batch < micro_batches]


def dualpipev(pp: int, rank: int, micro_batches: int) -> list[TimetableRow]:
    """Forward and backward side by side in the steady state, so that each hides the other's
    communication.

    Only fill and drain split the backward. Needs 2 pp micro-batches.
    """
    behind = pp - rank - 1
    at = _Rank(2)
    for _ in range(2 * behind):
        at.forward(0)
    for _ in range(rank + 1):
        at.forward(0)
        at.forward(1)
    for _ in range(behind):
        at.backward(1, split=True)
        at.weight()
        at.forward(1)
    for _ in range(micro_batches - 2 * pp + rank + 1):
        at.forward(0)
        at.backward(1, split=False)
        at.forward(1)
        at.backward(0, split=False)
    for _ in range(behind):
        at.backward(1, split=False)
        at.forward(1)
        at.backward(0, split=False)
    half = (rank + 1) // 2
    for index in range(rank + 1):
        # The second half is split; where the number of backwards is odd the boundary falls between
        # the two chunks.
        at.backward(1, split=index > half or (index == half and rank % 2 == 1))
        at.backward(0, split=index >= half)
    for _ in range(behind):
        at.weight()
        at.backward(0, split=True)
    at.settle()
    return at.rows
