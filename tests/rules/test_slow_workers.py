"""The slowest of N workers and delays: closed forms beside drawn ones."""

from __future__ import annotations

import numpy as np
import pytest

from moewright.cost.calendar_time import read_reliability
from moewright.rules.slow_workers import delayed_interval, expected_slowest, slowest_share


@pytest.mark.parametrize("workers", [1, 8, 64, 1024])
def test_the_slowest_share_is_that_of_drawn_steps(workers: int) -> None:
    """Workers differ for a whole job, and each from step to step: jobs of four steps."""
    between, within = 0.004, 0.006
    jobs = max(500, 40_000 // workers)
    draws = np.random.default_rng(3)
    kept = between * draws.standard_normal((jobs, 1, workers))
    step = (kept + within * draws.standard_normal((jobs, 4, workers))).max(axis=2).mean()
    share = slowest_share(workers, between, within)
    assert 1 + share == pytest.approx(1 + step, rel=0.01)
    # The share itself is as near as the draws and Blom's formula allow.
    assert share == pytest.approx(step, rel=0.02, abs=2e-4)


@pytest.mark.parametrize(
    ("workers", "exact"), [(1, 0.0), (8, 1.42360), (100, 2.50759), (1000, 3.24144)]
)
def test_the_expected_largest_of_normals_is_that_of_its_tables(workers: int, exact: float) -> None:
    """Harter, "Expected values of normal order statistics", Biometrika 48 (1961)."""
    assert expected_slowest(workers) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("deviation", "delay"), [(0.12, 0.117), (0.02, 0.3), (0.3, 0.05)])
def test_the_interval_of_delayed_days_is_that_of_drawn_ones(deviation: float, delay: float) -> None:
    draws = np.random.default_rng(5)
    size = 400_000
    drawn = np.exp(deviation * draws.standard_normal(size)) * (1 + draws.exponential(delay, size))
    low, high = delayed_interval(deviation, delay, 0.8)
    assert low == pytest.approx(np.quantile(drawn, 0.1), rel=0.01)
    assert high == pytest.approx(np.quantile(drawn, 0.9), rel=0.01)


def test_without_delays_the_interval_is_that_of_the_prediction() -> None:
    low, high = delayed_interval(0.1, 0.0, 0.8)
    assert low == pytest.approx(1 / high)
    assert high == pytest.approx(np.exp(0.1 * 1.28155), rel=1e-5)


def test_the_exponential_has_the_published_shares_of_delayed_jobs() -> None:
    """Of ByteDance's jobs 42.5 % are 10 % slower, a tenth waste 21.3 % (arXiv 2505.05713)."""
    mean = read_reliability().mean_delay.value
    assert np.exp(-0.10 / mean) == pytest.approx(0.425, abs=0.01)
    assert np.exp(-(1 / (1 - 0.213) - 1) / mean) == pytest.approx(0.10, abs=0.01)
