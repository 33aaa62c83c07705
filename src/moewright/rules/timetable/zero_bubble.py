"""Timetables that split the backward: input gradients first (B), weight gradients later (W).

ZB-H1 and ZBV: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241) and "Pipeline
Parallelism with Controllable Memory" (arXiv 2405.15362). DualPipeV: DeepSeek's DualPipe (arXiv
2412.19437) cut in half, as published with its code. Each function builds the rows of all pipeline
ranks. Chunk 1 of ZBV and DualPipeV lies on the way back of a V (`stages.virtual_stage`), so the
first rank holds the first and the last virtual stage.
"""

from __future__ import annotations

from collections import deque

from moewright.rules.timetable.timetable_row import RowKind, Table, TimetableRow


class _RankRows:
    """The rows of one rank while they are laid out.

    Micro-batches of a chunk run in order, weight gradients in the order of their backwards.
    """

    def __init__(self, chunks: int) -> None:
        self.order: list[TimetableRow] = []
        self._forwards = [0] * chunks
        self._backwards = [0] * chunks
        self._pending_weights: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self._add(RowKind.F, self._forwards[chunk], chunk)
        self._forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool) -> None:
        micro_batch = self._backwards[chunk]
        self._add(RowKind.B, micro_batch, chunk)
        self._backwards[chunk] += 1
        if split:
            self._pending_weights.append((micro_batch, chunk))

    def weight(self) -> None:
        """Run the oldest pending weight gradients."""
        self._add(RowKind.W, *self._pending_weights.popleft())

    def run_pending_weights(self) -> None:
        while self._pending_weights:
            self.weight()

    def has_forward(self, chunk: int, micro_batches: int) -> bool:
        return self._forwards[chunk] < micro_batches

    def _add(self, kind: RowKind, micro_batch: int, chunk: int) -> None:
        self.order.append(TimetableRow(kind=kind, micro_batch=micro_batch, chunk=chunk))


def zb_h1(pp: int, micro_batches: int) -> Table:
    """Build ZB-H1: 1F1B where rank r delays the weight gradients of r micro-batches.

    It runs them at the end, while it would wait. Every rank holds as much as the first rank of
    1F1B; the bubble falls from (pp - 1)(F + B + W) to (pp - 1)(F + B - W).
    """
    return tuple(_zb_h1_rows(pp, rank, micro_batches) for rank in range(pp))


def _zb_h1_rows(pp: int, rank: int, micro_batches: int) -> tuple[TimetableRow, ...]:
    rows = _RankRows(1)
    ahead = min(pp - rank - 1, micro_batches)
    for _ in range(ahead):
        rows.forward(0)
    for done in range(micro_batches):
        if rows.has_forward(0, micro_batches):
            rows.forward(0)
        rows.backward(0, split=True)
        if done >= rank:
            rows.weight()
    rows.run_pending_weights()
    return tuple(rows.order)


def zbv(pp: int, micro_batches: int) -> Table:
    """Build ZBV, which has no bubble between the first and the last row of a rank.

    That holds where F, B and W take equal time and there are 2 pp - 1 micro-batches or more. Every
    rank holds what the first rank of 1F1B holds. Fewer micro-batches run the timetable of 2 pp - 1
    without the rows of the missing ones.
    """
    return tuple(_zbv_rows(pp, rank, micro_batches) for rank in range(pp))


def _zbv_rows(pp: int, rank: int, micro_batches: int) -> tuple[TimetableRow, ...]:
    total = max(micro_batches, 2 * pp - 1)
    rows = _RankRows(2)
    for _ in range(2 * (pp - rank) - 1):
        rows.forward(0)
    for _ in range(rank):
        rows.forward(1)
        rows.forward(0)
    for _ in range(pp - rank):
        rows.forward(1)
        rows.backward(1, split=True)
        rows.weight()
    while rows.has_forward(1, total):
        if rows.has_forward(0, total):
            rows.forward(0)
        rows.backward(0, split=True)
        rows.weight()
        rows.forward(1)
        rows.backward(1, split=True)
        rows.weight()
    for _ in range(rank):
        rows.backward(0, split=True)
        rows.backward(1, split=True)
    for _ in range(pp - rank):
        rows.backward(0, split=True)
        rows.weight()
    rows.run_pending_weights()
    return tuple(row for row in rows.order if row.micro_batch < micro_batches)


def dualpipev(pp: int, micro_batches: int) -> Table:
    """Build DualPipeV: forward and backward side by side, so that each hides communication.

    Only warm-up and cool-down split the backward. It needs 2 pp micro-batches.
    """
    return tuple(_dualpipev_rows(pp, rank, micro_batches) for rank in range(pp))


def _dualpipev_rows(pp: int, rank: int, micro_batches: int) -> tuple[TimetableRow, ...]:
    behind = pp - rank - 1
    rows = _RankRows(2)
    for _ in range(2 * behind):
        rows.forward(0)
    for _ in range(rank + 1):
        rows.forward(0)
        rows.forward(1)
    for _ in range(behind):
        rows.backward(1, split=True)
        rows.weight()
        rows.forward(1)
    for _ in range(micro_batches - 2 * pp + rank + 1):
        rows.forward(0)
        rows.backward(1, split=False)
        rows.forward(1)
        rows.backward(0, split=False)
    for _ in range(behind):
        rows.backward(1, split=False)
        rows.forward(1)
        rows.backward(0, split=False)
    half = (rank + 1) // 2
    for index in range(rank + 1):
        # The second half is split; where the number of backwards is odd the boundary falls between
        # the two chunks.
        rows.backward(1, split=index > half or (index == half and rank % 2 == 1))
        rows.backward(0, split=index >= half)
    for _ in range(behind):
        rows.weight()
        rows.backward(0, split=True)
    rows.run_pending_weights()
    return tuple(rows.order)
