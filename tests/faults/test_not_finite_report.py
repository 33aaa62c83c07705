"""The page of a run that ended because its loss was not finite."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest

from moewright.engine.observe.record import clamp_to_finite
from moewright.view.run_view import build_run_view
from sample_run import record as sample_record


@pytest.mark.parametrize("broken", [slice(-1, None), slice(0, None)])
@pytest.mark.parametrize("loss", [float("nan"), float("inf"), clamp_to_finite(float("nan"))])
def test_a_run_whose_loss_was_not_finite_has_a_page(loss: float, broken: slice) -> None:
    """The last step alone, or all of them."""
    record = sample_record()
    steps = list(record.steps)
    steps[broken] = [replace(step, loss=loss) for step in steps[broken]]
    view = build_run_view(replace(record, steps=tuple(steps)), (), (), None)
    assert "had a loss that is no number" in view.verdict.sentence
    assert all(not isfinite(value) or value < 1e300 for _, value in view.losses)
