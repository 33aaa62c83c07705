"""Budgets: steps, days and device-hours of a number of tokens."""

from __future__ import annotations

from math import ceil

import pytest

import moewright as mw
from moewright.api.budgets import Budget


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


def test_more_devices_take_fewer_days(answer: Budget) -> None:
    days = [line.days for line in answer.lines]
    assert [line.devices for line in answer.lines] == sorted(line.devices for line in answer.lines)
    assert days == sorted(days, reverse=True)


@pytest.mark.parametrize(
    ("tokens", "price", "field"),
    [("0", None, "--tokens"), ("many", None, "--tokens"), ("1T", -1.0, "--price")],
)
def test_bad_budgets_are_refused(tokens: str, price: float | None, field: str) -> None:
    with pytest.raises(mw.BadInput, match=field):
        mw.budget("OLMoE-1B-7B-0924", on="8xH200", tokens=tokens, price=price)
