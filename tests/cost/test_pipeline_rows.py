"""The timetable row by row: no rank runs two rows at once, and its idle time is the bubble."""

import numpy as np
import pytest

import moewright as mw
from moewright.cost.pipeline_rows import simulate_plan
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.spec.plan import TimePart

LAYOUTS = (
    "tp2,ep8,pp8,mbs1,recompute=full",
    "tp2,ep8,pp8,vpp2,mbs1,recompute=full",
    "tp2,ep8,pp8,mbs1,recompute=full,schedule=zb-h1",
    "tp2,ep8,pp4,mbs2,recompute=full,schedule=zbv",
    "tp2,ep8,pp4,vpp4,mbs1,overlap=ep",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_idle_time_is_the_bubble_of_the_estimate(layout):
    plan = mw.estimate("Qwen3-30B-A3B", layout, on="64xH100", global_batch=256)
    rows = simulate_plan(plan)
    bubble_s = {share.part: share.seconds for share in plan.estimate.shares}[TimePart.BUBBLE]
    assert rows.idle_s == pytest.approx(bubble_s, rel=1e-9)
    ends = rows.start_s + rows.length_s
    assert (rows.start_s[:, 1:] >= ends[:, :-1] - 1e-9).all()
    assert rows.end_s == ends.max()


def test_rows_are_those_of_the_simulation_row_by_row():
    plan = mw.estimate(
        "Qwen3-30B-A3B", "tp2,ep8,pp4,vpp2,mbs1,recompute=full", on="64xH100", global_batch=128
    )
    rows = simulate_plan(plan)
    prices = rows.prices
    seconds = [
        StageSeconds(forward=forward, input_backward=backward, weight_backward=0.0)
        for forward, backward in zip(prices.forward_s, prices.backward_s, strict=True)
    ]
    layout = plan.layout
    ends = row_end_times(layout, timetable(layout, plan.estimate.micro_batches), seconds)
    for rank in range(layout.pp):
        for place in range(rows.kind.shape[1]):
            stage = rows.chunk[rank, place] * layout.pp + rank
            key = "FB"[rows.kind[rank, place]], int(rows.micro_batch[rank, place]), int(stage)
            end_s = rows.start_s[rank, place] + rows.length_s[rank, place]
            assert end_s == pytest.approx(ends[key], rel=1e-12)
    assert np.isfinite(prices.saved_bytes).all()
