"""Simulate a timetable: when each row ends, given the seconds of each virtual stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moewright.rules.timetable.schedule import split_backwards
from moewright.rules.timetable.stages import stage_position, virtual_stage
from moewright.rules.timetable.timetable_row import RowKey, RowKind, TimetableRow
from moewright.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """The seconds of one micro-batch on a virtual stage.

    A backward that is not split takes both of its parts.
    """

    forward: float
    input_backward: float
    weight_backward: float


def row_end_times(
    layout: Layout,
    table: Sequence[Sequence[TimetableRow]],
    stages: Sequence[StageSeconds],
    *,
    transfer_s: float = 0.0,
) -> dict[RowKey, float]:
    """Return when each row of a timetable ends, in seconds.

    A forward waits for the same micro-batch's forward one virtual stage before; a backward for its
    own forward and for the backward one stage after; weight gradients for their backward. A result
    reaches another rank `transfer_s` after its row has ended, while both ranks compute.

    Raises:
        RuntimeError: The rows wait for each other for ever.
    """
    last_stage = layout.pp * layout.vpp - 1
    end_times: dict[RowKey, float] = {}
    clocks = [0.0] * len(table)
    next_rows = [0] * len(table)
    split = [split_backwards(rows) for rows in table]
    awake_ranks = list(range(len(table)))
    while awake_ranks:
        rank = awake_ranks.pop()
        while next_rows[rank] < len(table[rank]):
            row = table[rank][next_rows[rank]]
            stage = virtual_stage(layout, rank, row.chunk)
            needs = _needed_rows(row, stage, last_stage)
            ready_s = _ready_time(layout, rank, needs, end_times, transfer_s)
            if ready_s is None:
                break
            start_s = max(clocks[rank], ready_s)
            clocks[rank] = start_s + _row_seconds(row, stages[stage], split[rank])
            end_times[row.kind, row.micro_batch, stage] = clocks[rank]
            next_rows[rank] += 1
            # What ended may be what a neighbour's next row waits for; all others stay asleep.
            awake_ranks += [
                stage_position(layout, neighbour)[0]
                for neighbour in (stage - 1, stage + 1)
                if 0 <= neighbour <= last_stage
            ]
    # No rank is awake: the rows that are left wait for each other.
    stuck = [rank for rank in range(len(table)) if next_rows[rank] < len(table[rank])]
    if stuck:
        raise RuntimeError(f"the timetable deadlocks on pipeline ranks {stuck}")
    return end_times


def _ready_time(
    layout: Layout,
    rank: int,
    needs: Sequence[RowKey],
    end_times: Mapping[RowKey, float],
    transfer_s: float,
) -> float | None:
    """Return when the results of all needed rows are on `rank`, or None while one is not known."""
    ready_s = 0.0
    for need in needs:
        arrival_s = end_times.get(need)
        if arrival_s is None:
            return None
        if stage_position(layout, need[2])[0] != rank:
            arrival_s += transfer_s
        ready_s = max(ready_s, arrival_s)
    return ready_s


def _row_seconds(
    row: TimetableRow, seconds: StageSeconds, split: frozenset[tuple[int, int]]
) -> float:
    if row.kind is RowKind.F:
        return seconds.forward
    if row.kind is RowKind.W:
        return seconds.weight_backward
    if (row.micro_batch, row.chunk) in split:
        return seconds.input_backward
    return seconds.input_backward + seconds.weight_backward


def _needed_rows(row: TimetableRow, stage: int, last_stage: int) -> tuple[RowKey, ...]:
    """Return the rows that must have ended before a row starts."""
    if row.kind is RowKind.F:
        if stage:
            return ((RowKind.F, row.micro_batch, stage - 1),)
        return ()
    if row.kind is RowKind.W:
        return ((RowKind.B, row.micro_batch, stage),)
    forward = (RowKind.F, row.micro_batch, stage)
    if stage == last_stage:
        return (forward,)
    return (forward, (RowKind.B, row.micro_batch, stage + 1))
