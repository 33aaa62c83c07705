import json
from dataclasses import replace
from itertools import pairwise

import pytest

from moewright.codec import parse_layout
from moewright.report.trace import build_trace, write_trace
from moewright.spec.errors import BadInput
from sample_run import plan


def plan_pipeline(layout: str, micro_batches: int):
    base = plan()
    return replace(
        base,
        layout=parse_layout(layout, world_size=4),
        estimate=replace(base.estimate, micro_batches=micro_batches),
    )


def trace_bars(pipeline):
    return [event for event in build_trace(pipeline)["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("layout_text", ["pp4", "pp2,vpp3"])
def test_every_micro_batch_runs_forward_and_backward_on_every_stage_and_no_track_overlaps(
    layout_text,
):
    pipeline = plan_pipeline(layout_text, 8)
    layout = pipeline.layout
    events = trace_bars(pipeline)
    assert len(events) == 2 * 8 * layout.pp * layout.vpp
    for rank in range(layout.pp):
        track = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == rank
        )
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(track))


def test_the_last_backward_ends_before_gradient_reduction_and_optimizer():
    events = trace_bars(plan_pipeline("pp4", 8))
    end = max(event["ts"] + event["dur"] for event in events)
    assert end == pytest.approx((1.29 - 0.05 - 0.04) * 1e6)
    busy = sum(event["dur"] for event in events) / 4
    assert 1 - busy / end == pytest.approx(3 / 11)  # (pp - 1) / (m + pp - 1)


def test_a_forward_follows_the_stage_before_it():
    events = trace_bars(plan_pipeline("pp2,vpp3", 4))
    forwards = {
        (event["args"]["micro_batch"], event["args"]["virtual_stage"]): event
        for event in events
        if event["cat"] == "forward"
    }
    for (micro_batch, stage), event in forwards.items():
        if stage:
            before = forwards[micro_batch, stage - 1]
            assert event["ts"] >= before["ts"] + before["dur"] - 1e-6


def test_the_file_is_chrome_json_with_a_named_track_a_rank(tmp_path):
    write_trace(plan_pipeline("pp4", 4), tmp_path / "timeline.json")
    data = json.loads((tmp_path / "timeline.json").read_text())
    names = [
        event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"
    ]
    assert names == [f"pipeline rank {rank}" for rank in range(4)]


def test_a_schedule_without_a_timetable_is_refused():
    with pytest.raises(BadInput):
        build_trace(plan_pipeline("pp4,schedule=dualpipev", 4))


def test_split_backwards_have_bars_of_their_own():
    events = build_trace(plan_pipeline("pp2,schedule=zbv", 4))["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    lengths = {
        kind: {round(bar["dur"], 6) for bar in bars if bar["name"][0] == kind} for kind in "FBW"
    }
    assert lengths["F"] == lengths["B"] == lengths["W"]
    assert {bar["args"]["virtual_stage"] for bar in bars if bar["tid"] == 0} == {0, 3}
