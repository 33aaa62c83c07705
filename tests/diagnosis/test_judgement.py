"""A judged layout: what it costs beside the best, and the one change that saves most."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from moewright.api.requests import read_plan_request
from moewright.codec import format_layout, parse_layout
from moewright.diagnosis.judgement import (
    Quality,
    describe_nearest_run,
    find_change,
    judge_plan,
    judge_quickly,
)
from moewright.diagnosis.published import find_fastest_run, find_nearest_runs
from moewright.intake import catalogue
from moewright.search.search import build_plan, search
from moewright.spec.errors import BadInput
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype

MODEL, ON = "Qwen3-30B-A3B", "16xH100"


@pytest.fixture(scope="module")
def best() -> Plan:
    request = read_plan_request(MODEL, ON, WorkloadOptions())
    return search(request.model, request.workload, request.hardware, top=1).plans[0]


def build(best: Plan, text: str) -> Plan:
    layout = parse_layout(text, world_size=best.layout.world_size)
    return build_plan(best.model, best.workload, best.hardware, layout)


def draw_plans(best: Plan, count: int) -> list[Plan]:
    """Draw legal layouts, good and bad."""
    random = Random(34)
    plans: list[Plan] = []
    while len(plans) < count:
        tp, pp, ep = (random.choice((1, 2, 4, 8)) for _ in range(3))
        recompute = random.choice(("none", "full", "layernorm+moe_act"))
        dispatcher = random.choice(("alltoall", "deepep"))
        text = f"tp{tp},pp{pp},ep{ep},mbs{random.choice((1, 2, 4))},recompute={recompute}"
        try:
            plans.append(build(best, f"{text},dispatcher={dispatcher}"))
        except BadInput:
            continue
    return plans


def test_a_slow_layout_that_fits_is_not_called_good(best: Plan) -> None:
    judged = judge_plan(build(best, "tp8,ep8,mbs1"), best)
    assert judged.quality is Quality.SLOW
    assert judged.times_best > 5
    assert "x slower than the best" in judged.headline
    assert judged.change == "with tp1, recompute=full"


def test_the_best_is_called_so_and_needs_no_change(best: Plan) -> None:
    judged = judge_plan(best, best, scored=1234)
    assert judged.quality is Quality.GOOD
    assert judged.change_layout == ""
    assert "the best of 1,234 layouts" in judged.speed


def test_a_change_is_of_one_choice_and_saves_what_it_says(best: Plan) -> None:
    for plan in draw_plans(best, 12):
        judged = judge_plan(plan, best)
        change = find_change(plan, best)
        assert (change is not None) == bool(judged.change_layout) or judged.times_best <= 1.02
        if change is None:
            continue
        again = build(best, judged.change_layout).estimate
        assert again.step_s == judged.change_step_s < 0.95 * plan.estimate.step_s
        assert again.fit_probability >= min(0.9, plan.estimate.fit_probability)
        assert format_layout(change.layout) == judged.change_layout
        assert (judged.quality is Quality.SLOW) == (
            plan.estimate.verdict.value == "fits" and judged.times_best >= 1.15
        )


def test_a_quick_judgement_never_calls_a_layout_the_best(best: Plan) -> None:
    judged = judge_quickly(best)
    assert judged.quality is Quality.GOOD
    assert "a quick search finds none" in judged.speed


def test_published_runs_in_fp8_are_of_the_format_whatever_their_scales(best: Plan) -> None:
    """The table writes "fp8 (current scaling)", which no plan of 8 bits was near to."""
    plan = replace(
        best,
        model=catalogue.model("Qwen3-235B-A22B"),
        workload=replace(best.workload, precision=Dtype.FP8),
        layout=parse_layout("tp2,pp8,vpp4,ep32", world_size=256),
    )
    (run,) = find_nearest_runs(plan, 1)
    assert run.precision.startswith("fp8")
    assert "fp8" not in run.differs
    fastest = find_fastest_run(plan)
    assert fastest is not None
    assert fastest.precision.startswith("fp8")


def test_the_nearest_run_is_named_with_its_error_or_called_far(best: Plan) -> None:
    (run,) = find_nearest_runs(best, 1)
    text = describe_nearest_run(run)
    assert run.model.rpartition("/")[2] in text
    assert f"{run.error:+.1%} off" in text
    request = read_plan_request("OLMoE-1B-7B-0924", "8xMI300X", WorkloadOptions())
    far = search(request.model, request.workload, request.hardware, top=1).plans[0]
    (run,) = find_nearest_runs(far, 1)
    assert ("No published run is near" in describe_nearest_run(run)) == (
        run.nearness.value == "far"
    )
