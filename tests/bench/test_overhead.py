"""The engine beside a plain PyTorch loop over the same modules: same training, and no slower."""

from __future__ import annotations

import pytest
import torch

from benchmarks import overhead
from moewright.spec.hardware import DeviceKind

pytestmark = [pytest.mark.serial, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"WARM_UP": 1, "REPEATS": 3, "PROFILED": 1, "SAVES": 1, "STEPS_A_SAVE": 1}
    for name, count in counts.items():
        monkeypatch.setattr(overhead, name, count)


def test_the_engine_keeps_up_with_a_plain_loop() -> None:
    """The bar of 0.95 is for `make bench` on an idle machine; 0.85 holds on a busy one."""
    result = overhead.measure_overhead(torch.device("cpu"))
    assert result.losses[0] == pytest.approx(result.losses[1], rel=1e-5)
    assert result.ratio > 0.85
    assert 0 < result.engine_outside_s < 2 * result.engine_s + 1


@pytest.mark.thorough  # and so does `make bench`
@pytest.mark.spawn
def test_overlap_is_timed_beside_none() -> None:
    assert 0.2 < overhead.measure_overlap_ratio(DeviceKind.CPU, 2) < 5


@pytest.mark.thorough
@pytest.mark.spawn
def test_saves_are_timed_beside_none() -> None:
    assert -0.9 < overhead.measure_save_cost(DeviceKind.CPU, 2) < 20
