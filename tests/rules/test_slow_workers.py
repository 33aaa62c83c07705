"""The slowest of N workers and links, and delays: distributions beside drawn ones."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from moewright.cost.calendar_time import read_reliability
from moewright.rules.routing import largest_of
from moewright.rules.slow_workers import (
    Siblings,
    delayed_interval,
    find_slowest,
)


@pytest.mark.parametrize(
    ("workers", "exact"), [(1, 0.0), (8, 1.42360), (100, 2.50759), (1000, 3.24144)]
)
def test_the_expected_largest_of_normals_is_that_of_its_tables(workers: int, exact: float) -> None:
    """Harter, "Expected values of normal order statistics", Biometrika 48 (1961)."""
    slowest = find_slowest([Siblings(count=workers, deviation=1.0)])
    assert slowest.mean == pytest.approx(exact, abs=1e-4)


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


@pytest.mark.parametrize(
    ("ranks", "racks", "pods", "deviations"),
    [
        (8, 4, 1, (0.006, 0.0, 0.0)),
        (16, 8, 4, (0.004, 0.02, 0.0)),
        (32, 16, 2, (0.006, 0.004, 0.01)),
        (8, 1, 2, (0.0, 0.01, 0.02)),
    ],
)
def test_the_slowest_of_a_tree_is_that_of_drawn_steps(
    ranks: int, racks: int, pods: int, deviations: tuple[float, float, float]
) -> None:
    """Ranks wait for themselves, for their rack's link and for their pod's."""
    draws, steps = np.random.default_rng(7), 5_000
    own, rack, pod = (
        deviation * draws.standard_normal((steps, *shape))
        for deviation, shape in zip(
            deviations, [(pods, racks, ranks), (pods, racks, 1), (pods, 1, 1)], strict=True
        )
    )
    drawn = (own + rack + pod).max(axis=(1, 2, 3))
    counts = (ranks, racks, pods)
    found = find_slowest(
        [
            Siblings(count=count, deviation=deviation)
            for count, deviation in zip(counts, deviations, strict=True)
        ]
    )
    noise = 4 * drawn.std() / np.sqrt(steps)  # of a mean; a quantile's is at most twice that
    assert found.mean == pytest.approx(drawn.mean(), abs=noise)
    assert found.median == pytest.approx(np.median(drawn), abs=2 * noise)
    assert found.p90 == pytest.approx(np.quantile(drawn, 0.9), abs=2 * noise)


@pytest.mark.parametrize("workers", [1, 64, 98304])
def test_a_tree_of_ranks_alone_has_the_quantiles_of_their_largest(workers: int) -> None:
    found = find_slowest([Siblings(count=workers, deviation=0.01)])
    for share, quantile in ((0.5, found.median), (0.9, found.p90)):
        exact = 0.01 * NormalDist().inv_cdf(share ** (1 / workers))
        assert quantile == pytest.approx(exact, abs=1e-6)
    if workers > 1:
        assert found.mean == pytest.approx(0.01 * largest_of(workers), rel=0.02)
