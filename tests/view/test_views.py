"""The records behind pages: what they take from plans, and which steps they call legal."""

from xml.etree import ElementTree

import pytest

import moewright as mw
from docs.tools import published_runs
from moewright.codec import format_layout, parse_layout
from moewright.codec.layout_words import describe_layout
from moewright.diagnosis.judgement import Quality
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.spec.ledger import Component, Module, StepPhase
from moewright.spec.plan import TimePart, Verdict
from moewright.view.comparison_view import build_comparison_view
from moewright.view.layout_controls import ControlKind
from moewright.view.page import (
    MEMORY_COLOURS,
    MODULE_COLOURS,
    PHASE_COLOURS,
    TIME_COLOURS,
    render_page,
)
from moewright.view.plan_view import ListedFigures
from moewright.view.search_view import RankedKind, RankedPlan, mark_front

LAYOUT = "tp2,ep8,pp8,vpp2,mbs1,recompute=select"
JOB = {"on": "256xH800", "global_batch": 2048}


@pytest.fixture(scope="module")
def plan():
    return mw.estimate("Qwen3-235B-A22B", LAYOUT, **JOB)


@pytest.fixture(scope="module")
def shown():
    return mw.show("Qwen3-235B-A22B", LAYOUT, **JOB)


def test_a_view_has_the_figures_of_the_estimate(plan, shown):
    for name in ("step_s", "peak_bytes", "margin_bytes", "mfu", "bubble_fraction", "micro_batches"):
        assert shown.to_dict()[name] == getattr(plan.estimate, name)
    assert "estimate" not in shown.to_dict()
    assert [stage.peak_bytes for stage in shown.stages] == [
        ledger.device_bytes for ledger in plan.estimate.ledgers
    ]
    for stage in shown.stages:
        assert sum(item.value for item in stage.components) == stage.peak_bytes
    assert sum(part.seconds for part in shown.parts) == pytest.approx(
        shown.estimate.step_s, rel=1e-12
    )


def test_stages_say_what_they_hold(shown):
    assert shown.stages[0].holds == "embedding, layers 0-4, layers 47-52"
    assert shown.stages[-1].holds.endswith("head")


def test_every_step_of_a_control_is_as_legal_as_it_says(plan, shown):
    legal = illegal = 0
    for control in shown.controls:
        assert len({step.value for step in control.steps}) == len(control.steps)
        for step in control.steps:
            layout = parse_layout(step.layout, world_size=256)
            reasons = check_legality(Job(model=plan.model, workload=plan.workload, layout=layout))
            assert bool(reasons) == bool(step.rule), step
            legal += not reasons
            illegal += bool(reasons)
    assert legal > 20
    assert illegal > 5


def test_an_illegal_value_has_its_rule_and_the_nearest_legal_step():
    shown = mw.show("Qwen3-235B-A22B", "tp2,ep8,pp8,vpp5,mbs1", **JOB)
    assert shown.reasons[0].key == "vpp"
    control = next(item for item in shown.controls if item.key == "vpp")
    assert control.kind is ControlKind.SLIDER
    assert "divides neither" in control.rule
    assert control.nearest.value in ("4", "6")
    assert not control.nearest.rule
    others = [item for item in shown.controls if item.rule and item.key != "vpp"]
    assert others == []


def test_what_cannot_be_read_is_a_record_too():
    assert mw.show("no-such-model", on="8xH100").reasons[0].field == "model"
    assert mw.show("Qwen3-30B-A3B", on="8xNoSuch").reasons[0].field == "--on"
    assert mw.show("Qwen3-30B-A3B", "nonsense", on="8xH100").reasons
    assert mw.show("Qwen3-30B-A3B", on="8xH100", precision="int3").reasons[0].field == "precision"


def test_published_runs_are_those_of_the_page_on_accuracy(shown):
    assert published_runs.FILE.read_text() == published_runs.render_file(), "run: make accuracy"
    first = shown.nearest_runs[0]
    assert "Qwen3-235B-A22B" in first.model
    assert first.device == "H800"
    assert first.error == pytest.approx(first.predicted / first.measured - 1, abs=1e-4)


def test_a_part_has_one_colour_everywhere_and_no_two_share_it():
    for kind, names in (
        (MEMORY_COLOURS, Component),
        (TIME_COLOURS, TimePart),
        (MODULE_COLOURS, Module),
        (PHASE_COLOURS, StepPhase),
    ):
        assert set(kind) == {name.value for name in names}
        assert len(set(kind.values())) == len(kind)
    for name in ("attention", "experts", "head"):
        assert TIME_COLOURS[name] == MODULE_COLOURS[name]


def test_the_front_is_what_nothing_beats_in_time_and_memory():
    def rank(step_s, peak_bytes):
        return RankedPlan(
            kind=RankedKind.PLAN,
            layout="tp1",
            words="no tensor parallelism",
            figures=ListedFigures(step_s=step_s, peak_bytes=peak_bytes, fit_probability=1.0),
        )

    marked = mark_front([rank(3, 5), rank(1, 9), rank(2, 9), rank(2, 7), rank(4, 6)])
    assert [item.is_on_front for item in marked] == [True, True, False, True, False]


def test_a_page_holds_hostile_text_as_data(shown):
    page = render_page((shown,), "</title><script>alert(1)</script>")
    assert "<script>alert" not in page
    assert "default-src 'none'" in page
    assert "http-equiv" in page


def test_a_slow_layout_beside_a_fast_one_is_not_shown_as_good():
    fast = mw.estimate("Qwen3-235B-A22B", "tp4,ep8,pp8,mbs1", **JOB)
    slow = mw.estimate("Qwen3-235B-A22B", "tp8,ep8,pp4,mbs1,recompute=full", **JOB)
    assert slow.estimate.verdict is Verdict.FITS
    view = build_comparison_view(fast, [slow, "tp3"], {"tp3": ("is not legal",)})
    times = slow.estimate.step_s / fast.estimate.step_s
    assert times > 2
    first, second, third = view.plans
    assert first.quality is Quality.GOOD
    assert second.quality is Quality.SLOW
    assert second.headline == f"Fits, but is {times:.2f} x slower than the fastest here"
    assert (third.quality, third.headline) == (Quality.UNJUDGED, "")


def test_a_notebook_shows_answers_in_words_as_ranks_and_as_whole_texts():
    plans = mw.plan("OLMoE-1B-7B-0924", on="4xH100", global_batch=64, top=3)
    page = plans._repr_html_()
    root = ElementTree.fromstring(f"<body>{page.replace('<br>', '<br/>')}</body>")
    answers = list(root.iter("div"))
    assert answers
    for answer in answers:
        (text,) = (node.text for node in answer.iter("code"))
        layout = parse_layout(text, world_size=4)
        assert format_layout(layout) == text
        assert describe_layout(layout).sentence in [node.text for node in answer.iter("b")]
        labels = [node.text for node in answer.iter("span")]
        assert tuple(labels) == describe_layout(layout).labels
        assert len([node for node in answer.iter() if node.tag.endswith("rect")]) == 4
    cells = [node.text for node in root.iter("td")]
    assert all(format_layout(plan.layout) in cells for plan in plans)  # none is cut
