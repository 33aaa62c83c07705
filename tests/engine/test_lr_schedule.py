"""The learning rate of each step."""

from __future__ import annotations

import pytest

from moewright.engine.optim.update_rules import learning_rate
from moewright.spec.workload import LrDecay, OptimizerSpec

PEAK, FLOOR = 1.0, 0.1


def rates(steps: int, **fields: object) -> list[float]:
    spec = OptimizerSpec(lr=PEAK, min_lr_fraction=FLOOR, **fields)  # type: ignore[arg-type]
    return [learning_rate(spec, steps=steps, step=step) for step in range(1, steps + 1)]


def test_wsd_rises_stays_and_falls_in_a_line() -> None:
    """By hand: two steps of warm-up, four at the peak, four down to the floor."""
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert rates(10, warmup_steps=2, lr_decay=LrDecay.WSD, wsd_decay_steps=4) == pytest.approx(
        expected
    )


def test_wsd_falls_in_the_last_tenth_and_stays_at_the_floor() -> None:
    result = rates(60, lr_decay=LrDecay.WSD, decay_steps=50)
    assert result[:45] == [PEAK] * 45
    assert result[45:50] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    assert result[50:] == pytest.approx([FLOOR] * 10)


def test_a_line_falls_from_the_end_of_the_warm_up() -> None:
    """By hand: a step of warm-up, four down to the floor, and what is left at the floor."""
    result = rates(7, warmup_steps=1, decay_steps=5, lr_decay=LrDecay.LINEAR)
    assert result == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1])


def test_a_cosine_falls_from_the_end_of_the_warm_up() -> None:
    result = rates(9, warmup_steps=1)
    assert result[0] == PEAK
    assert result[4] == pytest.approx((PEAK + FLOOR) / 2)
    assert result[8] == pytest.approx(FLOOR)
