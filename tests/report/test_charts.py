import math

import pytest

from moewright.report.charts import BOX, MAX_POINTS, axis, bar, curve, heat_level, ramp, thin


def test_ticks_are_round_and_the_axis_covers_its_values():
    ticks = axis([3.1, 7.86], "loss")
    assert [tick.text for tick in ticks.ticks] == ["3", "4", "5", "6", "7", "8"]
    assert (ticks.low, ticks.high) == (3, 8)
    assert ticks.percent(5.5) == pytest.approx(50)
    fine = axis([1.0, 1.09], "ratio")
    assert [tick.text for tick in fine.ticks] == ["1.00", "1.02", "1.04", "1.06", "1.08", "1.10"]
    quarter = axis([0, 1.2], "s")
    assert [tick.text for tick in quarter.ticks] == ["0.00", "0.25", "0.50", "0.75", "1.00", "1.25"]


def test_step_axes_keep_their_range_and_never_split_a_step():
    steps = axis(range(1, 61), "step", whole=True, ticks=6)
    assert (steps.low, steps.high) == (1, 60)
    assert [tick.text for tick in steps.ticks] == ["10", "20", "30", "40", "50", "60"]
    assert [tick.text for tick in axis([1, 3], "step", whole=True).ticks] == ["1", "2", "3"]


@pytest.mark.parametrize("values", [[], [2.0], [0.0, 0.0], [math.nan, math.inf]])
def test_an_axis_of_nothing_or_one_value_still_has_a_width(values):
    ticks = axis(values, "y")
    assert ticks.high > ticks.low
    assert ticks.ticks


def test_thinning_keeps_ends_order_and_spikes():
    points = [(float(x), 1.0 + 1e-6 * x) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    kept = thin(points)
    assert len(kept) <= MAX_POINTS
    assert (54_321.0, 99.0) in kept
    assert list(kept) == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin(points[:10]) == tuple(points[:10])


def test_curves_leave_out_what_is_no_number():
    x, y = axis([0, 10], "x"), axis([0, 10], "y")
    drawn = curve("c", "#000", [(0, 0), (5, math.nan), (10, 10)], x, y, dots=True)
    assert drawn.path == f"M0 {BOX}L{BOX} 0"
    assert drawn.dots == f"M0 {BOX}h0M{BOX} 0h0"
    assert curve("c", "#000", [(1, math.inf)], x, y).path == ""


def test_bars_share_one_axis():
    drawn = bar(
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
    assert ramp(0) == "#34506b"
    assert ramp(1) == ramp(2) == "#d67a34"
