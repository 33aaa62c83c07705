"""Run a timetable on paper: when each row ends, given the seconds of each virtual stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moewright.rules.schedule import RowKind, TimetableRow, split_backwards
from moewright.rules.stages import stage_position, virtual_stage
from moewright.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """One micro-batch on a virtual stage; a backward that is not split takes both of its parts."""

    forward: float
    input_backward: float
    weight_backward: float


def row_end_times(
    layout: Layout,
    table: Sequence[Sequence[TimetableRow]],
    stages: Sequence[StageSeconds],
    *,
    transfer_s: float = 0.0,
) -> dict[tuple[RowKind, int, int], float]:
    """When each row of a table ends, in seconds, by (kind, micro-batch, virtual stage).

    A forward waits for the same micro-batch's forward one virtual stage before; a backward for its
    own forward and for the backward one stage after; weight gradients for their backward. What
    comes from another rank arrives `transfer_s` after it was made, while both compute. Raises
    RuntimeError when the rows wait for each other for ever.
    """
    last_stage = layout.pp * layout.vpp - 1
    ended: dict[tuple[RowKind, int, int], float] = {}
    clock, position = [0.0] * len(table), [0] * len(table)
    split = [split_backwards(rows) for rows in table]
    awake = list(range(len(table)))
    while awake:
        rank = awake.pop()
        while position[rank] < len(table[rank]):
            row = table[rank][position[rank]]
            stage = virtual_stage(layout, rank, row.chunk)
            start = clock[rank]
            for need in _needs(row, stage, last_stage):
                if need not in ended:
                    break
                away = stage_position(layout, need[2])[0] != rank
                start = max(start, ended[need] + (transfer_s if away else 0.0))
            else:
                clock[rank] = start + _length_s(row, stages[stage], split[rank])
                ended[row.kind, row.micro_batch, stage] = clock[rank]
                position[rank] += 1
                awake += [
                    stage_position(layout, near)[0]
                    for near in (stage - 1, stage + 1)
                    if 0 <= near <= last_stage
                ]
                continue
            break
    if any(position[rank] < len(table[rank]) for rank in range(len(table))):
        stuck = [rank for rank in range(len(table)) if position[rank] < len(table[rank])]
        raise RuntimeError(f"the timetable deadlocks on pipeline ranks {stuck}")
    return ended


def _length_s(row: TimetableRow, seconds: StageSeconds, split: frozenset[tuple[int, int]]) -> float:
    if row.kind is RowKind.F:
        return seconds.forward
    if row.kind is RowKind.W:
        return seconds.weight_backward
    alone = (row.micro_batch, row.chunk) in split
    return seconds.input_backward + (0.0 if alone else seconds.weight_backward)


def _needs(row: TimetableRow, stage: int, last_stage: int) -> tuple[tuple[RowKind, int, int], ...]:
    if row.kind is RowKind.F:
        return ((RowKind.F, row.micro_batch, stage - 1),) if stage else ()
    if row.kind is RowKind.W:
        return ((RowKind.B, row.micro_batch, stage),)
    own = (RowKind.F, row.micro_batch, stage)
    return (own,) if stage == last_stage else (own, (RowKind.B, row.micro_batch, stage + 1))
