"""What pipeline ranks hand each other as they run a timetable: when a message is asked for, and
known to be taken.

A forward hands its hidden state to the next virtual stage, a backward the gradient of its input to
the stage before; on the turn of a V both lie on one rank and nothing is sent. Every rank knows all
tables, so nobody has to ask: a rank takes another's messages in the order in which they are sent,
and the only thing that it ever waits for is the input of its next row. Where a table can be run on
paper (rules.events) the messages therefore cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moewright.rules.stages import stage_position, virtual_stage
from moewright.rules.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout, Overlap

MessageKey = tuple[
    RowKind, int, int
]  # what a message is the input of: kind, micro-batch, virtual stage


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineAction:
    """One row of a rank, its stage, and its messages. Places count the rank's rows from 0.

    `source` is the pipeline rank that makes the input of the row, `target` the one to which its
    result goes; None where there is none. Before the row runs, the messages for the rows at `asked`
    are to be asked for, in that order; once its input is there, the results of the rows at `taken`
    have reached the ranks that they were sent to.
    """

    row: TimetableRow
    stage: int
    source: int | None
    target: int | None
    recvs_to_post: tuple[int, ...]
    sends_completed: tuple[int, ...]


def input_stage(layout: Layout, kind: RowKind, stage: int) -> int | None:
    """The virtual stage that makes the input of a forward or backward on `stage`; None at the ends
    and for W rows."""
    if kind is RowKind.W:
        return None
    before = stage - 1 if kind is RowKind.F else stage + 1
    return before if 0 <= before < layout.pp * layout.vpp else None


def output_stage(layout: Layout, kind: RowKind, stage: int) -> int | None:
    """The virtual stage that a forward or backward on `stage` hands its result to; None at the ends
    and for W rows."""
    if kind is RowKind.W:
        return None
    after = stage + 1 if kind is RowKind.F else stage - 1
    return after if 0 <= after < layout.pp * layout.vpp else None


def pipeline_actions(
    layout: Layout, table: Sequence[Sequence[TimetableRow]], pp_rank: int
) -> tuple[PipelineAction, ...]:
    """The rows of a pipeline rank with their messages.

    With overlap=p2p the message of a row is asked for one row early, so that it travels while that
    row computes.
    """
    mine = table[pp_rank]
    stages = [virtual_stage(layout, pp_rank, row.chunk) for row in mine]
    sources = [
        _rank(layout, input_stage(layout, row.kind, stage))
        for row, stage in zip(mine, stages, strict=True)
    ]
    targets = [
        _rank(layout, output_stage(layout, row.kind, stage))
        for row, stage in zip(mine, stages, strict=True)
    ]
    asked = _asked(layout, table, pp_rank, sources, early=Overlap.P2P in layout.overlap)
    taken = _taken(layout, table, pp_rank, sources, targets)
    pieces = zip(mine, stages, sources, targets, asked, taken, strict=True)
    return tuple(
        PipelineAction(
            row=row,
            stage=stage,
            source=source,
            target=target,
            recvs_to_post=tuple(ask),
            sends_completed=tuple(take),
        )
        for row, stage, source, target, ask, take in pieces
    )


def _rank(layout: Layout, stage: int | None) -> int | None:
    return None if stage is None else stage_position(layout, stage)[0]


def _inputs(layout: Layout, rows: Sequence[TimetableRow], pp_rank: int) -> dict[MessageKey, int]:
    """The place of each row, by what it takes."""
    return {
        (row.kind, row.micro_batch, virtual_stage(layout, pp_rank, row.chunk)): place
        for place, row in enumerate(rows)
    }


def _sent(
    layout: Layout, rows: Sequence[TimetableRow], pp_rank: int, target: int
) -> Iterator[tuple[int, MessageKey]]:
    """Places of the rows of a rank whose result goes to rank `target`, in order, each with what it
    is the input of."""
    for place, row in enumerate(rows):
        to = output_stage(layout, row.kind, virtual_stage(layout, pp_rank, row.chunk))
        if to is not None and stage_position(layout, to)[0] == target:
            yield place, (row.kind, row.micro_batch, to)


def _asked(
    layout: Layout,
    table: Sequence[Sequence[TimetableRow]],
    pp_rank: int,
    sources: Sequence[int | None],
    *,
    early: bool,
) -> list[list[int]]:
    """By row, the messages to ask for before it: those up to its own in the order of their
    sender."""
    here = _inputs(layout, table[pp_rank], pp_rank)
    asked: list[list[int]] = [[] for _ in sources]
    for source in {s for s in sources if s is not None and s != pp_rank}:
        order = [here[key] for _, key in _sent(layout, table[source], source, pp_rank)]
        position = {place: index for index, place in enumerate(order)}
        done = 0
        for place, from_rank in enumerate(sources):
            if from_rank == source and position[place] >= done:
                asked[max(0, place - early)] += order[done : position[place] + 1]
                done = position[place] + 1
    return asked


def _taken(
    layout: Layout,
    table: Sequence[Sequence[TimetableRow]],
    pp_rank: int,
    sources: Sequence[int | None],
    targets: Sequence[int | None],
) -> list[list[int]]:
    """By row, the results that must have been taken by now: the row's input was made after they
    were used."""
    here = _inputs(layout, table[pp_rank], pp_rank)
    taken: list[list[int]] = [[] for _ in sources]
    for other in {t for t in targets if t is not None and t != pp_rank}:
        there = _inputs(layout, table[other], other)
        sent = sorted(
            (there[key], place) for place, key in _sent(layout, table[pp_rank], pp_rank, other)
        )
        done = 0
        for place, made in sorted(
            (here[key], made) for made, key in _sent(layout, table[other], other, pp_rank)
        ):
            while done < len(sent) and sent[done][0] < made:
                taken[place].append(sent[done][1])
                done += 1
    return taken
