"""A job that fits in no layout: how near it comes, and that what is said to fit does fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from moewright.api.judging import view_misfit
from moewright.api.planning import Plans, search_request
from moewright.api.requests import read_plan_request
from moewright.codec import parse_layout
from moewright.search.misfit import Misfit
from moewright.search.search import build_plan, search
from moewright.spec.errors import BadInput
from moewright.spec.options import SearchOptions, WorkloadOptions
from moewright.spec.plan import Verdict
from moewright.spec.workload import Dtype

MODEL = "Mixtral-8x22B-v0.1"  # whose states two H100 and their host do not hold


@pytest.fixture(scope="module")
def plans() -> Plans:
    request = read_plan_request(MODEL, "2xH100", WorkloadOptions())
    return search_request(request, Path("model"), SearchOptions())


@pytest.fixture(scope="module")
def misfit(plans: Plans) -> Misfit:
    *_, final = view_misfit(plans)
    return final


def fit_probability(plans: Plans, text: str, count: int) -> float:
    request = plans.request
    hardware = replace(request.hardware, count=count)
    layout = parse_layout(text, world_size=count)
    return build_plan(request.model, request.workload, hardware, layout).estimate.fit_probability


def test_no_legal_layout_lacks_less_than_the_nearest_miss(plans: Plans) -> None:
    nearest = plans.search.nearest_miss
    assert plans.best is None
    assert nearest is not None
    random = Random(3)
    compared = 0
    while compared < 30:
        tp, pp, ep, etp = (random.choice((1, 2)) for _ in range(4))
        text = f"tp{tp},pp{pp},ep{ep},etp{etp},mbs1"
        text += random.choice((",zero2", ",zero3", ",offload=optimizer", ",offload=moe_act"))
        text += random.choice(("", ",recompute=full"))
        try:
            layout = parse_layout(text, world_size=2)
            other = build_plan(nearest.model, nearest.workload, nearest.hardware, layout)
        except BadInput:
            continue
        if other.estimate.host_verdict is not Verdict.FITS:
            continue
        compared += 1
        assert other.estimate.peak_bytes >= nearest.estimate.peak_bytes, text


def test_what_is_short_and_where_is_that_of_the_estimate(plans: Plans, misfit: Misfit) -> None:
    nearest = plans.search.nearest_miss
    assert nearest is not None
    assert misfit.short_bytes == -nearest.estimate.margin_bytes > 0
    assert misfit.largest == nearest.estimate.largest
    assert "GiB a device on pipeline rank" in misfit.lines()[0]


def test_a_search_without_room_for_the_states_ends_as_a_whole_one(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moewright.search.search._may_hold_states", lambda *_: True)
    search.cache_clear()
    whole = search_request(plans.request, Path("model"), SearchOptions()).search
    assert whole.nearest_miss == plans.search.nearest_miss
    assert (whole.rejected, whole.scored) == (plans.search.rejected, plans.search.scored)


def test_devices_and_changes_that_are_said_to_fit_do(plans: Plans, misfit: Misfit) -> None:
    assert misfit.enough > plans.request.hardware.count
    assert fit_probability(plans, misfit.enough_layout, misfit.enough) >= 0.9
    assert misfit.fitting
    for variant in misfit.fitting:
        options = WorkloadOptions(lora_rank=16) if "LoRA" in variant.change else WorkloadOptions()
        request = read_plan_request(MODEL, "2xH100", options)
        if not options.lora_rank or "nf4" in variant.setting:
            continue
        layout = parse_layout(variant.layout, world_size=2)
        plan = build_plan(request.model, request.workload, request.hardware, layout)
        assert plan.estimate.fit_probability >= 0.9
        assert plan.estimate.step_s == variant.step_s
    tried = {variant.change for variant in misfit.fitting}
    assert tried <= set(misfit.tried)
    assert plans.request.workload.optimizer.moment_dtype is Dtype.FP32  # the job is as it was
