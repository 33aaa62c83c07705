"""Timetables that split the backward: input gradients first (B), weight gradients later (W).

ZB-H1 and ZBV: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241) and "Pipeline
Parallelism with Controllable Memory" (arXiv 2405.15362). DualPipeV: DeepSeek's DualPipe (arXiv
2412.19437) cut in half, as published with its code. Each function builds the rows of all pipeline
ranks. Chunk 1 of ZBV and DualPipeV lies on the way back of a V (`stages.virtual_stage`), so the
first rank holds the first and the last virtual stage.

Timetables along a V that hold half or a third of what 1F1B holds. V-Half and V-Min: Qi et al.,
"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362). A micro-batch passes its
pipeline in a pattern that begins again every six seconds, where F, B and W of a chunk take a second
each. The pattern decides how long a rank holds a chunk, and so the peak. Ranks run the rows as
early as their inputs and the peak allow, and compute weight gradients while they would wait. The
offsets of the patterns are those of the code published with the paper.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

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


_PERIOD_S = 6  # F, B and W of two chunks


class _PatternRow(NamedTuple):
    """A row that each micro-batch has on a rank, and when that of micro-batch 0 starts."""

    start_s: int
    kind: RowKind
    chunk: int


def v_half(pp: int, micro_batches: int) -> Table:
    """Build V-Half: every rank holds (pp + 2) // 2 micro-batches, where 1F1B holds pp.

    With F = B = W it idles about half as long as 1F1B.
    """
    # In an even pipeline two rows of a rank would else start in one second of the period.
    gap_s = 3 if pp % 2 == 0 else 0
    starts_s = tuple(
        (2 * rank, 3 * pp - rank - 2, 3 * pp + gap_s + 2 * rank - 1, 6 * pp + gap_s - rank - 2)
        for rank in range(pp)
    )
    return _lay_out(starts_s, micro_batches, most_chunks=2 * ((pp + 2) // 2))


def v_min(pp: int, micro_batches: int) -> Table:
    """Build V-Min: every rank holds at most (pp + 4) // 3 micro-batches, where 1F1B holds pp.

    With F = B = W it idles about two thirds as long as 1F1B.
    """
    # Where 3 divides pp, two rows of a rank would else start in one second of the period.
    gap_s = 2 if pp % 3 == 0 else 0
    starts_s = tuple(
        (rank, 2 * pp - rank - 1, 2 * pp + gap_s + rank, 4 * pp + gap_s - rank - 1)
        for rank in range(pp)
    )
    return _lay_out(starts_s, micro_batches, most_chunks=2 * ((pp + 4) // 3))


def _lay_out(
    starts_s: tuple[tuple[int, int, int, int], ...], micro_batches: int, *, most_chunks: int
) -> Table:
    """Return the rows of all ranks, each second the ready row that the pattern has first.

    `starts_s` are, for each rank, the starts of F of chunk 0, F of chunk 1, B of chunk 1 and B of
    chunk 0. A forward waits while its rank holds `most_chunks`. Forwards keep the order of the
    pattern, in which no rank holds more; so the first of all waiting forwards can always run, and
    nothing waits for ever.
    """
    ranks = [_RankState(starts, micro_batches) for starts in starts_s]
    done: set[tuple[RowKind, int, int, int]] = set()
    rows_left = len(ranks) * micro_batches * _PERIOD_S
    while rows_left:
        ended = []
        for rank, state in enumerate(ranks):
            row = state.next_row(rank, len(ranks), done, most_chunks)
            if row is not None:
                state.run(row)
                ended.append((row.kind, row.micro_batch, row.chunk, rank))
        # After all ranks: a result reaches its neighbour in the next second, whoever ran first.
        done.update(ended)
        rows_left -= len(ended)
    return tuple(tuple(state.rows) for state in ranks)


class _RankState:
    """The rows of one rank so far, and what comes next of each kind and chunk."""

    def __init__(self, starts_s: tuple[int, int, int, int], micro_batches: int) -> None:
        kinds = ((RowKind.F, 0), (RowKind.F, 1), (RowKind.B, 1), (RowKind.B, 0))
        self.rows: list[TimetableRow] = []
        self._pattern = [
            _PatternRow(start_s, kind, chunk)
            for start_s, (kind, chunk) in zip(starts_s, kinds, strict=True)
        ]
        self._micro_batches = micro_batches
        self._next = {(row.kind, row.chunk): 0 for row in self._pattern}
        self._weights: deque[tuple[int, int]] = deque()
        self._held = 0

    def next_row(
        self, rank: int, pp: int, done: set[tuple[RowKind, int, int, int]], most_chunks: int
    ) -> TimetableRow | None:
        """Return the row to run now; a W row where no other is ready, None where none is."""
        candidates = self._due_rows()
        forwards = [item for item in candidates if item[1].kind is RowKind.F]
        ready = [item for item in candidates if item[1].kind is RowKind.B]
        if forwards and self._held < most_chunks:
            ready.append(min(forwards, key=lambda item: item[0]))
        ready = [item for item in ready if _has_input(item[1], rank, pp, done)]
        if ready:
            return min(ready, key=lambda item: item[0])[1]
        if self._weights:
            micro_batch, chunk = self._weights[0]
            return TimetableRow(kind=RowKind.W, micro_batch=micro_batch, chunk=chunk)
        return None

    def run(self, row: TimetableRow) -> None:
        self.rows.append(row)
        if row.kind is RowKind.W:
            self._weights.popleft()
            self._held -= 1
            return
        self._next[row.kind, row.chunk] += 1
        if row.kind is RowKind.F:
            self._held += 1
        else:
            self._weights.append((row.micro_batch, row.chunk))

    def _due_rows(self) -> list[tuple[int, TimetableRow]]:
        """Return the next row of each kind and chunk with its start in the pattern."""
        due = []
        for start_s, kind, chunk in self._pattern:
            micro_batch = self._next[kind, chunk]
            if micro_batch < self._micro_batches:
                row = TimetableRow(kind=kind, micro_batch=micro_batch, chunk=chunk)
                due.append((start_s + _PERIOD_S * micro_batch, row))
        return due


def _has_input(
    row: TimetableRow, rank: int, pp: int, done: set[tuple[RowKind, int, int, int]]
) -> bool:
    """Tell whether the row whose result a forward or backward takes has ended."""
    goes_down = (row.kind is RowKind.F) == (row.chunk == 0)
    neighbour = rank - 1 if goes_down else rank + 1
    if 0 <= neighbour < pp:
        return (row.kind, row.micro_batch, row.chunk, neighbour) in done
    # The ends of the pipeline, and the turn of the V, where a rank takes its own result.
    if row.kind is RowKind.F:
        return row.chunk == 0 or (RowKind.F, row.micro_batch, 0, rank) in done
    taken = (RowKind.F, 1) if row.chunk else (RowKind.B, 1)
    return (taken[0], row.micro_batch, taken[1], rank) in done
