"""Steps on levels of switches wait for the slowest of their ranks and links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import moewright as mw
from moewright.cost import step_spread
from moewright.cost.calendar_time import read_reliability
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.op_time import DeviceRates
from moewright.report.estimate_document import describe_spread
from moewright.rules.slow_workers import Array
from moewright.spec.plan import Plan, TimePart


def estimate(network: str, devices: int = 64, layout: str = "ep64,mbs1") -> Plan:
    machine = mw.hardware(f"{devices}xH100", network=network)
    return mw.estimate("Qwen3-30B-A3B", layout, on=machine)


def draw_steps(plan: Plan, unit: int, steps: int) -> Array:
    """Return steps of ranks that differ, whose transfers go over links of units that differ.

    Both deviations are drawn anew for each step, as those of many jobs.
    """
    facts, draws = read_reliability(), np.random.default_rng(11)
    seconds = {share.part: share.seconds for share in plan.estimate.shares}
    moving_s = seconds.pop(TimePart.EP_COMM) + seconds.pop(TimePart.DP_COMM)

    def draw(spread: tuple[float, float], count: int) -> Array:
        return 1 + sum(deviation * draws.standard_normal((steps, count)) for deviation in spread)

    devices = plan.layout.world_size
    own = sum(seconds.values()) * draw(facts.worker_spread, devices)
    links = moving_s * draw(facts.link_spread, devices // unit)
    drawn: Array = (own.reshape(steps, -1, unit) + links[:, :, None]).max(axis=(1, 2))
    return drawn


def test_the_spread_of_a_plan_is_that_of_drawn_steps() -> None:
    plan = estimate("tree:16:4")
    spread = plan.estimate.spread
    assert spread is not None
    assert "1 in 10 over" in describe_spread(plan.estimate)
    drawn = draw_steps(plan, 16, 20_000)
    # The slowest of four links is in the rates of fitted runs, which had more.
    assert spread.mean_s == plan.estimate.step_s
    scale = plan.estimate.step_s / drawn.mean()
    noise = 1e-3  # four deviations of quantiles of so many steps
    assert spread.median_s == pytest.approx(scale * np.median(drawn), rel=noise)
    assert spread.p90_s == pytest.approx(scale * np.quantile(drawn, 0.9), rel=noise)


def test_without_spread_a_step_is_what_it_was_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(read_reliability(), worker_spread=(0.0, 0.0), link_spread=(0.0, 0.0))
    monkeypatch.setattr(step_spread, "read_reliability", lambda: facts)
    plan = estimate("tree:16:4")
    collectives = CollectiveModel(plan.hardware, DeviceRates(plan.hardware).constants)
    even = step_spread.estimate_spread(
        plan.hardware.fabric, collectives, plan.layout, plan.estimate
    )
    assert even is not None
    assert {even.mean_s, even.median_s, even.p90_s} == {plan.estimate.step_s}


def test_a_network_without_levels_has_no_links_to_wait_for() -> None:
    assert estimate("").estimate.spread is None
    assert "spread" not in estimate("").to_dict()["estimate"]


def test_more_ports_than_fitted_runs_had_have_a_slower_slowest() -> None:
    """With 4,096 of them a step waits longer than the rates of 256 say, and never for less."""
    for devices, least, most in ((64, 0.0, 0.0), (4096, 0.001, 0.03)):
        plan = estimate("tree:16", devices, layout="ep8,mbs1")
        spread = plan.estimate.spread
        assert spread is not None
        assert least <= spread.mean_s / plan.estimate.step_s - 1 <= most
        assert spread.median_s < spread.mean_s < spread.p90_s
