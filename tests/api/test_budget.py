"""Budgets: steps, days and device-hours of a number of tokens."""

from __future__ import annotations

from math import ceil

import pytest

import moewright as mw
from moewright.api.budget_document import build_budget_document
from moewright.api.budgets import Budget, compute_budget
from moewright.spec.options import WorkloadOptions


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
    answer = compute_budget(model, on, options, tokens="1B", price=None, counts=(8,))
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
        compute_budget("OLMoE-1B-7B-0924", "8xH200", options, tokens="1B", price=None)


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
