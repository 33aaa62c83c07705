"""Budgets: steps, days and device-hours of a number of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

import pytest

import moewright as mw
from moewright.api.budgets import Budget, build_budget_document, compute_budget
from moewright.api.calendar import read_operations
from moewright.api.requests import read_hardware
from moewright.cost.calendar_time import (
    CalendarTime,
    WhenShort,
    estimate_calendar,
    unit_devices,
)
from moewright.report.calendar_section import build_calendar_section
from moewright.spec.options import BudgetOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.workload import SaveMode


@pytest.fixture(scope="module")
def answer() -> Budget:
    return mw.budget("OLMoE-1B-7B-0924", on="8xH200", tokens="1T", global_batch=64, price=2.5)


def test_days_are_steps_of_the_best_plan(answer: Budget) -> None:
    for line in answer.lines:
        step_s = line.plan.estimate.step_s
        assert line.steps == ceil(10**12 / (64 * 4096))
        assert line.days == pytest.approx(line.steps * step_s / 86400)
        assert line.device_hours == pytest.approx(24 * line.days * line.devices)
        assert line.days_80[0] < line.days < line.days_80[1]
        assert line.plan.estimate.fit_probability >= 0.9


def test_the_price_is_marked_as_the_users(answer: Budget) -> None:
    assert "your price" in answer.title()
    assert answer.lines[0].cost == pytest.approx(2.5 * answer.lines[0].device_hours)
    assert "cost" in answer.to_rows()[0]


def test_its_table_tells_days_their_interval_and_what_more_devices_cost(answer: Budget) -> None:
    (row, *_), *_ = (section.table.rows for section in build_budget_document(answer).sections[:1])
    line = answer.lines[0]
    low, high = (f"{24 * days:.3g}" if line.days < 2 else f"{days:.3g}" for days in line.days_80)
    assert [row.cells[0], row.cells[3]] == [str(line.devices), f"{low} to {high}"]
    ratios = [line.device_hours / answer.lines[0].device_hours for line in answer.lines]
    assert row.cells[5] == f"{1 / min(ratios):.2f}"


def test_more_devices_take_fewer_days(answer: Budget) -> None:
    days = [line.days for line in answer.lines]
    assert [line.devices for line in answer.lines] == sorted(line.devices for line in answer.lines)
    assert days == sorted(days, reverse=True)


def test_a_ramp_takes_more_steps_each_of_its_batch_s_time() -> None:
    options = WorkloadOptions(global_batch=64, rampup_batch_size=(32, 16, 1000))
    model, on = "OLMoE-1B-7B-0924", "8xH200"
    answer = compute_budget(model, on, options, tokens="1B", options=BudgetOptions(devices=(8,)))
    (line,) = answer.lines
    samples = ceil(10**9 / 4096)
    # 32 sequences a step until 500 are consumed, 48 until 1,000, then 64.
    steps = [ceil(500 / 32), ceil((1000 - 512) / 48)]
    steps.append(ceil((samples - 32 * steps[0] - 48 * steps[1]) / 64))
    assert line.steps == sum(steps)
    layout = line.plan.layout
    step_times = [
        mw.estimate(model, layout, on=on, global_batch=b).estimate.step_s for b in (32, 48)
    ]
    ramp_s = steps[0] * step_times[0] + steps[1] * step_times[1]
    assert line.ramp_days == pytest.approx(ramp_s / 86400)
    full_s = steps[2] * line.plan.estimate.step_s
    assert line.days == pytest.approx((ramp_s + full_s) / 86400)


@pytest.mark.parametrize(
    ("numbers", "rule"),
    [((0, 16, 100), "1 or more"), ((32, 20, 100), "must divide"), ((128, 16, 9), "must be")],
)
def test_a_ramp_that_is_none_is_refused(numbers: tuple[int, int, int], rule: str) -> None:
    options = WorkloadOptions(global_batch=64, rampup_batch_size=numbers)
    with pytest.raises(mw.BadInput, match=rf"--rampup-batch-size.*{rule}"):
        compute_budget("OLMoE-1B-7B-0924", "8xH200", options, tokens="1B")


@pytest.mark.parametrize(
    ("tokens", "price", "field"),
    [
        ("0", None, "--tokens"),
        ("many", None, "--tokens"),
        ("15", None, "--tokens"),  # billions, or trillions
        ("1T", -1.0, "--price"),
    ],
)
def test_bad_budgets_are_refused(tokens: str, price: float | None, field: str) -> None:
    with pytest.raises(mw.BadInput, match=field):
        mw.budget("OLMoE-1B-7B-0924", on="8xH200", tokens=tokens, price=price)


TRAINING_S, STEPS = 20 * 86400.0, 100_000


@cache
def plan_own_job() -> Plan:
    return mw.estimate("OLMoE-1B-7B-0924", "ep8,mbs2", on="64xH100", global_batch=256)


def by_the_calendar(plan: Plan | None = None, **options: Any) -> CalendarTime:
    plan = plan or plan_own_job()
    choices = BudgetOptions(**{"mtbf": "auto", **options})
    operations = read_operations(choices, plan.hardware, plan.workload)
    assert operations is not None
    return estimate_calendar(plan, TRAINING_S, STEPS, 0.1, operations)


def test_calendar_days_are_those_of_steps_over_the_goodput() -> None:
    answer = mw.budget(
        "OLMoE-1B-7B-0924", on="16xH200", tokens="1T", global_batch=64, devices=(8,), mtbf="12"
    )
    (line,) = answer.lines
    calendar = line.calendar
    assert calendar is not None
    # Twelve hours of the sixteen devices that were named.
    assert calendar.mtbf_s == pytest.approx(24 * 3600)
    (note,) = build_budget_document(answer).sections[0].notes
    assert "--mtbf" not in note  # it was given
    assert calendar.days == pytest.approx(line.days / calendar.goodput)
    assert calendar.goodput == pytest.approx(calendar.shares.training * calendar.running)
    hours = (8 + calendar.spares * calendar.unit_devices) * 24 * calendar.days
    assert calendar.device_hours == pytest.approx(hours)
    assert calendar.failures == pytest.approx(24 * calendar.days / 24)
    # 12 bytes of a parameter: fp32 weights and two fp32 moments.
    assert calendar.checkpoint_bytes == pytest.approx(12 * 6.92e9, rel=0.01)
    assert "goodput" in answer.to_rows()[0]


def test_published_rates_have_a_range() -> None:
    calendar = by_the_calendar()
    low, high = calendar.goodput_range
    assert low < calendar.goodput < high
    assert calendar.mtbf_range_s[0] < calendar.mtbf_s < calendar.mtbf_range_s[1]


def test_a_job_that_never_fails_keeps_all_but_its_last_save() -> None:
    calendar = by_the_calendar(mtbf="inf")
    assert calendar.failures == 0
    assert calendar.goodput > 0.9999


@pytest.mark.parametrize(
    "worse",
    [
        {"mtbf": "1"},
        {"restart": 120.0},
        {"storage": 0.1},
        {"checkpoint": "sync", "storage": 0.1},
        {"spares": 0, "repair": 400.0},
        {"slowdown": 0.1},
        {"save_every": 600.0, "mtbf": "4"},
    ],
)
def test_what_goes_worse_takes_longer(worse: dict[str, Any]) -> None:
    assert by_the_calendar(**worse).days > by_the_calendar(spares=1).days


def test_delays_are_in_the_interval_of_days() -> None:
    plain, known = by_the_calendar(mtbf="inf"), by_the_calendar(mtbf="inf", slowdown=0.0)
    assert plain.days == pytest.approx(known.days)
    assert known.days_80[1] / known.days == pytest.approx(known.days / known.days_80[0])
    assert plain.days_80[1] > known.days_80[1] * 1.1
    assert plain.days_80[0] > known.days_80[0]


@pytest.mark.parametrize("network", ["", "tree:1024+tree:4096:7"])
def test_stragglers_count_once(network: str) -> None:
    """The predicted step has the slowest of its devices; links of levels count beside it."""
    layout = "pp2,ep64,mbs1,recompute=full"
    machine = mw.hardware("98304xH100", network=network)
    large = mw.estimate("Qwen3-235B-A22B", layout, on=machine, global_batch=98304)
    own_s, slowdown = large.estimate.step_s, 0.0
    if large.estimate.spread is not None:
        large = replace(
            large,
            estimate=replace(
                large.estimate, spread=replace(large.estimate.spread, mean_s=1.02 * own_s)
            ),
        )
        slowdown = 0.02
    calendar = by_the_calendar(large)
    assert calendar.slowdown == pytest.approx(slowdown)
    ratio = calendar.days / by_the_calendar(large, slowdown=slowdown).days
    assert ratio == pytest.approx(1.0, abs=1e-4)
    text = " ".join(str(note) for note in build_calendar_section([calendar]).notes)
    assert ("adds up to 2.0%" in text) == (slowdown > 0)


def test_synchronous_saves_stand_still_until_they_are_durable() -> None:
    calendar = by_the_calendar(checkpoint=SaveMode.SYNC)
    assert calendar.save_s == calendar.durable_s
    assert by_the_calendar().save_s < calendar.save_s


def test_spares_are_whole_domains_of_racks_and_whole_nodes_elsewhere() -> None:
    # Of 72: a rack that lost a GPU is no domain of 72.
    assert unit_devices(read_hardware("144xGB200").fabric, 144) == 72
    assert unit_devices(read_hardware("144xGB200").fabric, 36) == 36
    assert by_the_calendar(spares=9).spares == 2  # nodes of eight


def test_a_long_repair_without_spares_is_waited_for_or_shrunk_from() -> None:
    calendar = by_the_calendar(spares=0, repair=200.0, mtbf="24")
    assert calendar.running < 0.9
    assert calendar.when_short is WhenShort.SHRINK
    spared = by_the_calendar(repair=200.0, mtbf="24")
    assert spared.spares > 0
    assert spared.device_hours <= calendar.device_hours


def test_energy_is_that_of_nodes_with_the_data_centre_s_overhead() -> None:
    calendar = by_the_calendar(pue=1.1, grid=0.4, spares=8)
    # 0.76 of 10.2 kW for eight that compute, and idle nodes of BLOOM's, by what they are rated at.
    busy_kW, idle_kW = 0.76 * 10.2 / 8, 0.7 / 0.4 * 256_646 / 1_082_990
    node_kW = idle_kW + (busy_kW - idle_kW) * calendar.computing
    assert 0.3 < calendar.computing < calendar.goodput + calendar.shares.replay
    hours = 24 * calendar.days
    expected_kWh = hours * (64 * node_kW + 8 * idle_kW) * 1.1
    assert calendar.energy_kWh == pytest.approx(expected_kWh, rel=1e-3)
    assert calendar.co2_kg == pytest.approx(0.4 * calendar.energy_kWh)
    assert by_the_calendar(watts=350.0).energy_kWh < calendar.energy_kWh


def test_the_cheapest_number_of_devices_that_meets_a_deadline_is_best(answer: Budget) -> None:
    days = sorted(line.days for line in answer.lines)
    late = replace(answer, deadline_days=days[0] / 2)
    assert late.best is None
    in_time = replace(answer, deadline_days=(days[0] + days[1]) / 2)
    assert in_time.best is not None
    assert in_time.best.days == days[0]
    assert answer.best is not None  # without a deadline, the fewest device-hours of all
    assert answer.best.device_hours == min(line.device_hours for line in answer.lines)


def test_the_soonest_number_of_devices_within_a_cost_is_best(answer: Budget) -> None:
    costs = sorted(line.cost or 0.0 for line in answer.lines)
    assert replace(answer, max_cost=costs[0] / 2).best is None
    bounded = replace(answer, max_cost=costs[-2])
    allowed = [line for line in answer.lines if (line.cost or 0.0) <= costs[-2]]
    assert bounded.best is not None
    assert bounded.best.days == min(line.days for line in allowed)
    assert f"{bounded.best.devices} devices end for at most" in str(
        build_budget_document(bounded).sections[1].lines[0]
    )
    # With a deadline too, it is the cheapest of those that meet both.
    both = replace(bounded, deadline_days=max(line.days for line in allowed)).best
    assert both is not None
    assert both.device_hours == min(line.device_hours for line in allowed)


def test_a_hundred_thousand_devices_lose_a_good_part_to_failures() -> None:
    layout = "pp2,ep64,mbs1,recompute=full"
    plan = mw.estimate("Qwen3-235B-A22B", layout, on="98304xH100", global_batch=98304)
    calendar = by_the_calendar(plan)
    # The published 18 minutes between failures of as many.
    assert calendar.mtbf_s == pytest.approx(18 * 60, rel=0.01)
    assert 0.3 < calendar.goodput < 0.6


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"mtbf": "soon"}, "--mtbf.*auto or hours"),
        ({"mtbf": "-3"}, "--mtbf.*auto or hours"),
        ({"mtbf": "nan"}, "--mtbf.*auto or hours"),
        ({"mtbf": "auto", "pue": 0.5}, r"--pue.*1\.\.5"),
        ({"mtbf": "auto", "spares": -1}, "--spares.*0 or more"),
        ({"mtbf": "auto", "checkpoint": "never"}, "--checkpoint.*sync or async"),
        ({"spares": 8}, "--spares.*--mtbf"),
        ({"grid": 0.3}, "--grid.*--mtbf"),
        ({"max_cost": 1e6}, "--max-cost.*--price"),
        ({"mtbf": "auto", "slowdown": float("nan")}, "--slowdown"),
    ],
)
def test_operations_out_of_range_are_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(mw.BadInput, match=rule):
        mw.budget("OLMoE-1B-7B-0924", on="64xH100", tokens="1T", **options)
