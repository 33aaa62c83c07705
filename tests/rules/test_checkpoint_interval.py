"""Intervals of checkpoints: the least of the expected time, Young's limit, Daly's higher order."""

from __future__ import annotations

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.rules.goodput import (
    expected_work_ratio,
    first_order_interval_s,
    optimum_interval_s,
)

HOUR_S = 3600.0
MTBF_S = st.floats(1.0, 1e8)
SAVE_SHARES = st.floats(1e-8, 10.0)  # of the mean time between failures


@given(mtbf_s=MTBF_S, share=SAVE_SHARES, factor=st.floats(1.001, 3.0))
def test_no_other_interval_loses_less(mtbf_s: float, share: float, factor: float) -> None:
    save_s = share * mtbf_s
    best_s = optimum_interval_s(mtbf_s, save_s)
    assert 0 < best_s < mtbf_s
    least = expected_work_ratio(best_s, mtbf_s, save_s, 60.0)
    for other_s in (best_s * factor, best_s / factor):
        assert least <= expected_work_ratio(other_s, mtbf_s, save_s, 60.0) * (1 + 1e-9)


@given(mtbf_s=MTBF_S)
def test_cheap_saves_are_at_youngs_interval(mtbf_s: float) -> None:
    save_s = 1e-7 * mtbf_s
    # The next term of the series is -2/3 of the cost.
    young_s = first_order_interval_s(mtbf_s, save_s)
    assert optimum_interval_s(mtbf_s, save_s) == pytest.approx(young_s, rel=2e-4)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3])
def test_daly_s_higher_order_is_near_the_optimum(share: float) -> None:
    """Eq. 37 of the paper, good to a few per cent where a save takes less than half the mean."""
    mtbf_s = 8 * HOUR_S
    save_s = share * mtbf_s
    root = sqrt(share / 2)
    daly_s = sqrt(2 * save_s * mtbf_s) * (1 + root / 3 + share / 18) - save_s
    assert optimum_interval_s(mtbf_s, save_s) == pytest.approx(daly_s, rel=0.01)


def test_a_save_that_costs_more_than_a_life_is_made_once_in_a_life() -> None:
    assert optimum_interval_s(HOUR_S, 1000 * HOUR_S) == pytest.approx(HOUR_S)


def test_free_saves_are_made_all_the_time_and_a_job_without_failures_needs_none() -> None:
    assert optimum_interval_s(HOUR_S, 0.0) == 0.0
    assert optimum_interval_s(inf, 10.0) == inf
    assert expected_work_ratio(100.0, inf, 10.0, 60.0) == pytest.approx(1.1)
