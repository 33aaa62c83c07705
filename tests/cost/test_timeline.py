"""The closed forms of the pipeline against the timetable itself."""

from __future__ import annotations

import pytest

from moewright.codec import parse_layout
from moewright.cost.timeline import pipeline_s
from moewright.rules import events, schedule


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(1, 1, 5), (2, 1, 7), (4, 1, 8), (4, 2, 8), (8, 3, 16)])
def test_even_stages_take_the_makespan_of_the_table(pp: int, vpp: int, micro_batches: int) -> None:
    text = f"pp{pp},vpp{vpp}"
    table = schedule.timetable(parse_layout(text, world_size=pp), micro_batches)
    exact = events.makespan_s(table, forward_s=1.0, backward_s=2.0)
    closed = pipeline_s([3.0 * vpp] * pp, vpp=vpp, micro_batches=micro_batches, transfer_s=0.0)
    assert closed == pytest.approx(exact)


def test_the_slowest_stage_sets_the_pace() -> None:
    assert pipeline_s([1.0, 3.0, 1.0], vpp=1, micro_batches=10, transfer_s=0.0) == pytest.approx(5 + 9 * 3)
    assert pipeline_s([1.0, 3.0, 2.0], vpp=2, micro_batches=9, transfer_s=0.0) == pytest.approx(9 * 3 + 2 / 2 * 2)


def test_interleaving_hides_transfers_but_for_fill_and_drain() -> None:
    plain, hidden = (
        pipeline_s([1.0] * 4, vpp=vpp, micro_batches=8, transfer_s=0.1)
        - pipeline_s([1.0] * 4, vpp=vpp, micro_batches=8, transfer_s=0.0)
        for vpp in (1, 2)
    )
    # What a rank sends and what it receives pass each other on the wire.
    assert plain == pytest.approx((4 + 7) * 2 * 0.1)
    assert hidden == pytest.approx(2 * 4 * 0.1)
