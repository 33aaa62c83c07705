"""The messages that pipeline ranks send each other as they run a timetable, and their order.

A forward sends its hidden state to the next virtual stage, a backward the gradient of its input to
the stage before; on the turn of a V both stages lie on one rank and nothing is sent. Every rank
knows all timetables, so receives need no agreement: a rank receives the messages of another in the
order in which they are sent, and it only ever waits for the input of its next row. Where a
timetable can be simulated (rules.timetable.simulate), the messages therefore cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moewright.rules.timetable.stages import stage_position, virtual_stage
from moewright.rules.timetable.timetable_row import RowKey, RowKind, TimetableRow
from moewright.spec.layout import Layout, Overlap


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineAction:
    """One row of a rank, its virtual stage, and its messages.

    `source` is the pipeline rank that makes the input of the row, `target` the one that its result
    goes to; None where there is none.

    Before the row runs, the receives for the rows at `recvs_to_post` are to be posted, in that
    order. Once the input of the row has arrived, the results of the rows at `sends_completed` have
    reached the ranks that they were sent to. Both hold indices into the rows of the rank.
    """

    row: TimetableRow
    stage: int
    source: int | None
    target: int | None
    recvs_to_post: tuple[int, ...]
    sends_completed: tuple[int, ...]


def input_stage(layout: Layout, kind: RowKind, stage: int) -> int | None:
    """Return the virtual stage that makes the input of a forward or backward on `stage`.

    None at the ends of the pipeline and for W rows.
    """
    if kind is RowKind.W:
        return None
    return _within_pipeline(layout, stage - 1 if kind is RowKind.F else stage + 1)


def output_stage(layout: Layout, kind: RowKind, stage: int) -> int | None:
    """Return the virtual stage that the result of a forward or backward on `stage` goes to.

    None at the ends of the pipeline and for W rows.
    """
    if kind is RowKind.W:
        return None
    return _within_pipeline(layout, stage + 1 if kind is RowKind.F else stage - 1)


def _within_pipeline(layout: Layout, stage: int) -> int | None:
    if 0 <= stage < layout.pp * layout.vpp:
        return stage
    return None


def pipeline_actions(
    layout: Layout, table: Sequence[Sequence[TimetableRow]], pp_rank: int
) -> tuple[PipelineAction, ...]:
    """Return the rows of a pipeline rank with their messages.

    With overlap=p2p the receive of a row is posted one row early, so that its message travels while
    that row computes.
    """
    rows = table[pp_rank]
    stages = [virtual_stage(layout, pp_rank, row.chunk) for row in rows]
    sources: list[int | None] = []
    targets: list[int | None] = []
    for row, stage in zip(rows, stages, strict=True):
        sources.append(_stage_rank(layout, input_stage(layout, row.kind, stage)))
        targets.append(_stage_rank(layout, output_stage(layout, row.kind, stage)))
    is_early = Overlap.P2P in layout.overlap
    receives = _receives_to_post(layout, table, pp_rank, sources, is_early=is_early)
    completed = _completed_sends(layout, table, pp_rank, targets)
    return tuple(
        PipelineAction(
            row=row,
            stage=stages[index],
            source=sources[index],
            target=targets[index],
            recvs_to_post=tuple(receives[index]),
            sends_completed=tuple(completed[index]),
        )
        for index, row in enumerate(rows)
    )


def _stage_rank(layout: Layout, stage: int | None) -> int | None:
    if stage is None:
        return None
    return stage_position(layout, stage)[0]


def _row_indices(layout: Layout, rows: Sequence[TimetableRow], pp_rank: int) -> dict[RowKey, int]:
    """Return the index of each row of a rank."""
    return {
        (row.kind, row.micro_batch, virtual_stage(layout, pp_rank, row.chunk)): index
        for index, row in enumerate(rows)
    }


def _sent_rows(
    layout: Layout, rows: Sequence[TimetableRow], pp_rank: int, target: int
) -> Iterator[tuple[int, RowKey]]:
    """Yield the rows of a rank whose result goes to rank `target`, in order.

    Each comes as its index and the key of the row that takes the result.
    """
    for index, row in enumerate(rows):
        stage = output_stage(layout, row.kind, virtual_stage(layout, pp_rank, row.chunk))
        if stage is not None and stage_position(layout, stage)[0] == target:
            yield index, (row.kind, row.micro_batch, stage)


def _receives_to_post(
    layout: Layout,
    table: Sequence[Sequence[TimetableRow]],
    pp_rank: int,
    sources: Sequence[int | None],
    *,
    is_early: bool,
) -> list[list[int]]:
    """Return, for each row, the receives to post before it, as indices of rows.

    They are those up to the row's own, in the order in which their sender sends, that are not
    posted yet.
    """
    indices = _row_indices(layout, table[pp_rank], pp_rank)
    to_post: list[list[int]] = [[] for _ in sources]
    for source in {rank for rank in sources if rank is not None and rank != pp_rank}:
        order = [indices[key] for _, key in _sent_rows(layout, table[source], source, pp_rank)]
        positions = {index: position for position, index in enumerate(order)}
        posted = 0
        for index, row_source in enumerate(sources):
            # It may be posted already, with one that is needed sooner and sent later.
            if row_source == source and positions[index] >= posted:
                upto = positions[index] + 1
                # A row early, if there is one; messages of different senders need no common order.
                to_post[max(0, index - is_early)] += order[posted:upto]
                posted = upto
    return to_post


def _completed_sends(
    layout: Layout,
    table: Sequence[Sequence[TimetableRow]],
    pp_rank: int,
    targets: Sequence[int | None],
) -> list[list[int]]:
    """Return, for each row, the sends that its input proves complete, as indices of rows.

    The sender of the row's input made it after it had used the results of these sends.
    """
    indices = _row_indices(layout, table[pp_rank], pp_rank)
    completed: list[list[int]] = [[] for _ in targets]
    for other in {rank for rank in targets if rank is not None and rank != pp_rank}:
        other_indices = _row_indices(layout, table[other], other)
        sends = sorted(
            (other_indices[key], index)
            for index, key in _sent_rows(layout, table[pp_rank], pp_rank, other)
        )
        inputs = sorted(
            (indices[key], made_at)
            for made_at, key in _sent_rows(layout, table[other], other, pp_rank)
        )
        done = 0
        for index, made_at in inputs:
            while done < len(sends) and sends[done][0] < made_at:
                completed[index].append(sends[done][1])
                done += 1
    return completed
