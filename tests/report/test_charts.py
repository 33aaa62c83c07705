import math

import pytest

from moewright.report.charts import (
    MAX_CURVE_POINTS,
    PLOT_UNITS,
    build_axis,
    build_bar,
    build_curve,
    heat_level,
    ramp_colour,
    thin_points,
)


def test_ticks_are_round_and_the_axis_covers_its_values():
    ticks = build_axis([3.1, 7.86], "loss")
    assert [tick.text for tick in ticks.ticks] == ["3", "4", "5", "6", "7", "8"]
    assert (ticks.low, ticks.high) == (3, 8)
    assert ticks.to_percent(5.5) == pytest.approx(50)
    fine = build_axis([1.0, 1.09], "ratio")
    assert [tick.text for tick in fine.ticks] == ["1.00", "1.02", "1.04", "1.06", "1.08", "1.10"]
    quarter = build_axis([0, 1.2], "s")
    assert [tick.text for tick in quarter.ticks] == ["0.00", "0.25", "0.50", "0.75", "1.00", "1.25"]


def test_step_axes_keep_their_range_and_never_split_a_step():
    steps = build_axis(range(1, 61), "step", integer_ticks=True, ticks=6)
    assert (steps.low, steps.high) == (1, 60)
    assert [tick.text for tick in steps.ticks] == ["10", "20", "30", "40", "50", "60"]
    assert [tick.text for tick in build_axis([1, 3], "step", integer_ticks=True).ticks] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize("values", [[], [2.0], [0.0, 0.0], [math.nan, math.inf]])
def test_an_axis_of_nothing_or_one_value_still_has_a_width(values):
    ticks = build_axis(values, "y")
    assert ticks.high > ticks.low
    assert ticks.ticks


def test_thinning_keeps_ends_order_and_spikes():
    points = [(float(x), 1.0 + 1e-6 * x) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    kept = thin_points(points)
    assert len(kept) <= MAX_CURVE_POINTS
    assert (54_321.0, 99.0) in kept
    assert list(kept) == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin_points(points[:10]) == tuple(points[:10])


def test_curves_leave_out_what_is_no_number():
    x = build_axis([0, 10], "x")
    y = build_axis([0, 10], "y")
    drawn = build_curve("c", "#000", [(0, 0), (5, math.nan), (10, 10)], x, y, dots=True)
    assert drawn.path == f"M0 {PLOT_UNITS}L{PLOT_UNITS} 0"
    assert drawn.dots == f"M0 {PLOT_UNITS}h0M{PLOT_UNITS} 0h0"
    assert build_curve("c", "#000", [(1, math.inf)], x, y).path == ""


def test_bars_share_one_axis():
    drawn = build_bar(
        "counted",
        [("a", 3, "3 B", "#111"), ("b", 1, "1 B", "#222"), ("none", 0, "", "#333")],
        "4 B",
        8,
    )
    assert drawn.percent == 50
    assert [(part.label, part.percent, part.share) for part in drawn.segments] == [
        ("a", 37.5, 0.75),
        ("b", 12.5, 0.25),
    ]


def test_heat_levels_are_symmetric_in_the_logarithm_and_dead_is_its_own():
    assert [heat_level(load) for load in (0, 0.1, 0.5, 0.89, 1, 1.12, 2, 9)] == [
        "d0", "l6", "l6", "l1", "m0", "h1", "h6", "h6",
    ]  # fmt: skip
    assert ramp_colour(0) == "#34506b"
    assert ramp_colour(1) == ramp_colour(2) == "#d67a34"
