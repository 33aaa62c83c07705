"""Messages between pipeline ranks: each is sent and received once, in order, without deadlock."""

from __future__ import annotations

import pytest

from moewright.rules.timetable.p2p import PipelineAction, output_stage, pipeline_actions
from moewright.rules.timetable.schedule import max_in_flight, timetable
from moewright.rules.timetable.stages import stage_position
from moewright.rules.timetable.timetable_row import RowKey, RowKind
from moewright.spec.layout import Layout
from pipeline_tables import legal_layouts


def run_actions(layout: Layout, actions: list[tuple[PipelineAction, ...]]) -> tuple[int, int]:
    """Run the actions rank by rank as far as each gets, over and over.

    Messages travel in the order of sending. Every message must meet the row whose receive was
    posted for it, and what counts as a completed send must have been used. Return the most receives
    that a rank had posted ahead of need, and the most results that it still held.
    """
    next_rows = [0] * layout.pp
    started = [-1] * layout.pp
    sent: dict[tuple[int, int], list[RowKey]] = {}
    posted: dict[tuple[int | None, int], list[int]] = {}
    local: set[RowKey] = set()
    used: set[RowKey] = set()
    unacknowledged: list[dict[int, RowKey]] = [{} for _ in actions]
    most_posted = most_unacknowledged = 0
    moved = True
    while moved:
        moved = False
        for rank, rank_actions in enumerate(actions):
            while next_rows[rank] < len(rank_actions):
                index = next_rows[rank]
                action = rank_actions[index]
                key = (action.row.kind, action.row.micro_batch, action.stage)
                if started[rank] < index:
                    started[rank] = index
                    for receive in action.recvs_to_post:
                        source = rank_actions[receive].source
                        posted.setdefault((source, rank), []).append(receive)
                if action.source == rank:
                    if key not in local:
                        break
                elif action.source is not None:
                    messages = sent.get((action.source, rank), [])
                    receives = posted[action.source, rank]
                    position = receives.index(index)
                    if position >= len(messages):
                        break
                    assert messages[position] == key  # the sender's order is the receiver's
                    most_posted = max(most_posted, sum(later > index for later in receives))
                    for send in action.sends_completed:
                        assert unacknowledged[rank].pop(send) in used
                used.add(key)
                stage = output_stage(layout, action.row.kind, action.stage)
                if stage is not None:
                    message = (action.row.kind, action.row.micro_batch, stage)
                    assert action.target == stage_position(layout, stage)[0]
                    if action.target == rank:
                        local.add(message)
                    else:
                        sent.setdefault((rank, action.target), []).append(message)
                        unacknowledged[rank][index] = message
                        most_unacknowledged = max(most_unacknowledged, len(unacknowledged[rank]))
                next_rows[rank] += 1
                moved = True
    assert next_rows == [len(rank_actions) for rank_actions in actions], f"stuck at {next_rows}"
    return most_posted, most_unacknowledged


@pytest.mark.parametrize(("pp", "most"), [(2, 9), (3, 8), (4, 9), (5, 11)])
def test_no_table_deadlocks_and_messages_meet_their_rows(pp: int, most: int) -> None:
    count = 0
    for layout, m in legal_layouts(pp, most):
        table = timetable(layout, m)
        actions = [pipeline_actions(layout, table, rank) for rank in range(pp)]
        messages = max(run_actions(layout, actions))
        bound = max(max_in_flight(layout, m, rank) for rank in range(pp))
        assert messages <= bound, (layout, m)
        forwards = [[row for row in rows if row.kind is RowKind.F] for rows in table]
        run_actions(layout, [pipeline_actions(layout, forwards, rank) for rank in range(pp)])
        count += 1
    assert count > 40


def test_a_rank_of_1f1b_holds_what_it_sent_until_the_gradient_is_back() -> None:
    layout = Layout(world_size=4, pp=4)
    table = timetable(layout, 8)
    actions = [pipeline_actions(layout, table, rank) for rank in range(4)]
    assert run_actions(layout, actions) == (0, 4)
    backwards = [action for action in actions[0] if action.row.kind is RowKind.B]
    assert [action.sends_completed for action in backwards][:2] == [(0, 1, 2), (3,)]
