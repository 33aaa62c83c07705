"""Runs whose layout changes on the way: what reads them, reads each step under its own layout."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.api.diagnosing import diagnose
from moewright.api.reporting import build_report, view_run, write_page
from moewright.codec import format_layout, format_record, read_run, write_json
from moewright.engine.observe.record import write_rank_timings
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout
from moewright.spec.run import GroupWait, HostTime, RankTiming, StepRecord
from moewright.studio.folder import read_runs
from sample_run import EXPERTS, LAYERS, layer_load, plan, record, step_record, time_rows

DEGREES = st.sampled_from((1, 2, 4))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = draw(DEGREES), draw(st.sampled_from((1, 2, 3))), draw(DEGREES)
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if dp % ep == 0]))
    return Layout(world_size=tp * pp * dp, tp=tp, pp=pp, ep=ep, mbs=1)


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[Layout, int, int]]:
    """Draw layouts, the first step under each, and the steps that were done under it."""
    drawn = []
    done = 0
    for layout in draw(st.lists(layouts(), min_size=1, max_size=4)):
        first = draw(st.integers(min_value=max(1, done - 2), max_value=done + 1))
        steps = draw(st.integers(min_value=0, max_value=5))
        drawn.append((layout, first, steps))
        done = first + steps - 1
    return drawn


def step_under(layout: Layout, step: int, seconds: float) -> StepRecord:
    """Return the record of a step with the loads of the ranks of its layout."""
    loads = []
    for layer in range(LAYERS):
        load = layer_load(layer, step)
        width = EXPERTS // layout.ep
        parts = [load.counts[first : first + width] for first in range(0, EXPERTS, width)]
        loads.append(replace(load, rank_counts=tuple(map(sum, parts))))
    group = "ep" if layout.ep > 1 else "dp_cp"
    return replace(
        step_record(step),
        loads=tuple(loads),
        step_s=seconds,
        waits=(GroupWait(group=group, seconds=0.1 * seconds),),
        host=HostTime(running_s=0.8 * seconds),
    )


def write_folder(folder: Path, drawn: list[tuple[Layout, int, int]], *, is_old: bool) -> None:
    """Write the folder of a run; `is_old`: as versions did that stated no layout."""
    whole = record()
    last_layout = drawn[-1][0]
    lines = []
    for number, (layout, first, count) in enumerate(drawn):
        session = replace(whole.sessions[0], first_step=first, world_size=layout.world_size)
        if not is_old:
            session = replace(session, layout=format_layout(layout))
        lines.append(session)
        lines += [step_under(layout, first + index, number + 1.0) for index in range(count)]
    degrees = {name: getattr(last_layout, name) for name in ("world_size", "tp", "pp", "ep", "mbs")}
    write_json(folder / "plan.json", plan(**degrees))
    (folder / "steps.jsonl").write_text("".join(map(format_record, lines)))


def rank_timings(layout: Layout) -> list[RankTiming]:
    waits = (GroupWait(group="dp_cp", seconds=0.1),)
    return [
        RankTiming(rank=rank, steps=2, phases=time_rows(9.0), waits=waits, host=HostTime())
        for rank in range(layout.world_size)
    ]


@given(sessions(), st.booleans(), st.data())
@settings(max_examples=25, deadline=None)
def test_every_reader_answers_and_mixes_no_layouts(
    drawn: list[tuple[Layout, int, int]], is_old: bool, data: st.DataObject
) -> None:
    layout = drawn[-1][0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, drawn, is_old=is_old)
        timed = data.draw(st.sampled_from([layout for layout, _, _ in drawn]))
        write_rank_timings(folder, timed, rank_timings(timed))
        run = read_run(folder)
        assert len(run.paces) in (0, layout.world_size)
        report = build_report(folder)
        view = view_run(report)
        assert write_page(report, folder / "report.html", [report]).stat().st_size > 0
        shown = json.loads(read_runs([folder]))
        if run.planned_steps:
            assert diagnose(folder).waterfall is not None
        else:
            with pytest.raises(BadInput, match="no finished steps"):
                diagnose(folder)
    assert shown["kind"] == "RunView"
    if view.experts is not None:
        assert {len(layer.ranks) for layer in view.experts.layers} == {layout.ep}
    assert (view.experts is not None) == bool(run.planned_steps)
    if is_old:
        return
    # The seconds of a step tell in which session it was done.
    trailing = itertools.takewhile(lambda item: item[0] == layout, reversed(drawn))
    numbers = range(len(drawn) + 1 - len(list(trailing)), len(drawn) + 1)
    assert {step.step_s for step in run.planned_steps} <= set(numbers)
    assert {step.step_s for step in run.steps if step.step_s in numbers} == {
        step.step_s for step in run.planned_steps
    }
