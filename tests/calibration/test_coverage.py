"""Intervals: widths from residuals of other groups, and the share of measurements they cover."""

from __future__ import annotations

import pytest

from moewright.calibration.splits import (
    HEAVY_TAILS,
    Residual,
    Widths,
    covered_share,
    widths_without,
)


def test_an_interval_is_symmetric_in_the_logarithm() -> None:
    (low, high), (lower, higher) = Widths(width_80=1.0, width_95=2.0).intervals(10.0, 0.1)
    assert low * high == pytest.approx(100)
    assert lower * higher == pytest.approx(100)
    assert lower < low < 10 < high < higher


def test_widths_come_from_other_groups_alone() -> None:
    """The residuals of the group itself, ten times as large, do not widen its intervals."""
    others = [Residual(group="a", score=index / 100) for index in range(100)]
    own = [Residual(group="b", score=10.0) for _ in range(100)]
    widths = widths_without([*others, *own], "b")
    assert widths.width_80 == pytest.approx(0.8, abs=0.02)
    assert widths.width_95 == pytest.approx(0.95, abs=0.02)
    assert widths_without([*others, *own], "a").width_80 == pytest.approx(10.0)


def test_a_large_group_does_not_decide_alone() -> None:
    large = [Residual(group="a", score=1.0) for _ in range(100)]
    small = [Residual(group="b", score=3.0) for _ in range(25)]
    # Weights 10 and 5: a third of the weight lies at 3, so 80 % reach it.
    assert widths_without([*large, *small], "c").width_80 > 1.5


def test_rows_of_a_kind_decide_among_themselves_where_there_are_enough() -> None:
    complete = [Residual(group="a", score=2.0, kind="complete") for _ in range(30)]
    unstated = [Residual(group="a", score=1.0, kind="unstated") for _ in range(30)]
    natural = [Residual(group="a", score=9.0, kind="natural") for _ in range(5)]
    everything = [*complete, *unstated, *natural]
    assert widths_without(everything, "b", "complete").width_80 == 2.0
    assert widths_without(everything, "b", "unstated").width_80 == 1.0
    assert widths_without(everything, "b", "natural") == widths_without(everything, "b", "other")


def test_few_residuals_say_nothing() -> None:
    assert widths_without([Residual(group="a", score=5.0)], "b") == HEAVY_TAILS


def test_coverage_counts_measurements_inside() -> None:
    assert covered_share([(1.0, (0.0, 2.0)), (3.0, (0.0, 2.0)), (5.0, None)]) == 0.5
    assert covered_share([]) is None
