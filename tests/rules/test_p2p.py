"""Messages between pipeline ranks: each is asked for and made once, in one order on both sides, and
nobody hangs."""

from __future__ import annotations

import pytest

from moewright.rules.p2p import PipelineAction, output_stage, pipeline_actions
from moewright.rules.schedule import max_in_flight, timetable
from moewright.rules.stages import stage_position
from moewright.rules.timetable_row import RowKind
from moewright.spec.layout import Layout
from pipeline_tables import tables

Message = tuple[RowKind, int, int]


def walk(layout: Layout, stops: list[tuple[PipelineAction, ...]]) -> tuple[int, int]:
    """Run the itineraries rank by rank as far as each goes, over and over, messages in order of
    sending.

    Checks that every message meets the row that asks for it, and that what is said to be taken has
    been used. Returns the most messages a rank had asked for ahead of need, and the most results
    that it still held.
    """
    at, seen = [0] * layout.pp, [-1] * layout.pp
    sent: dict[tuple[int, int], list[Message]] = {}
    asked: dict[tuple[int | None, int], list[int]] = {}
    here: set[Message] = set()
    used: set[Message] = set()
    held: list[dict[int, Message]] = [{} for _ in stops]
    most_asked = most_held = 0
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(stops):
            while at[rank] < len(own):
                stop = own[at[rank]]
                need = (stop.row.kind, stop.row.micro_batch, stop.stage)
                if seen[rank] < at[rank]:
                    seen[rank] = at[rank]
                    for place in stop.recvs_to_post:
                        asked.setdefault((own[place].source, rank), []).append(place)
                if stop.source == rank:
                    if need not in here:
                        break
                elif stop.source is not None:
                    line, places = sent.get((stop.source, rank), []), asked[stop.source, rank]
                    place = places.index(at[rank])
                    if place >= len(line):
                        break
                    assert line[place] == need  # the sender's order is the receiver's
                    most_asked = max(most_asked, sum(p > at[rank] for p in places))
                    for done in stop.sends_completed:
                        assert held[rank].pop(done) in used
                used.add(need)
                to = output_stage(layout, stop.row.kind, stop.stage)
                if to is not None:
                    message = (stop.row.kind, stop.row.micro_batch, to)
                    assert stop.target == stage_position(layout, to)[0]
                    if stop.target == rank:
                        here.add(message)
                    else:
                        sent.setdefault((rank, stop.target), []).append(message)
                        held[rank][at[rank]] = message
                        most_held = max(most_held, len(held[rank]))
                at[rank] += 1
                moved = True
    assert at == [len(own) for own in stops], f"stuck at {at}"
    return most_asked, most_held


@pytest.mark.parametrize(("pp", "most"), [(2, 9), (3, 8), (4, 9), (5, 11)])
def test_no_table_deadlocks_and_messages_meet_their_rows(pp: int, most: int) -> None:
    count = 0
    for layout, m in tables(pp, most):
        table = timetable(layout, m)
        asked, held = walk(layout, [pipeline_actions(layout, table, rank) for rank in range(pp)])
        assert max(asked, held) <= max(max_in_flight(layout, m, rank) for rank in range(pp)), (
            layout,
            m,
        )
        forwards = [[row for row in rows if row.kind is RowKind.F] for rows in table]
        walk(layout, [pipeline_actions(layout, forwards, rank) for rank in range(pp)])
        count += 1
    assert count > 40


def test_a_rank_of_1f1b_holds_what_it_sent_until_the_gradient_is_back() -> None:
    layout = Layout(world_size=4, pp=4)
    first, *_ = stops = [pipeline_actions(layout, timetable(layout, 8), rank) for rank in range(4)]
    assert walk(layout, stops) == (0, 4)
    assert [stop.sends_completed for stop in first if stop.row.kind is RowKind.B][:2] == [
        (0, 1, 2),
        (3,),
    ]
