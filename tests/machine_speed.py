"""Bars in milliseconds on a machine of any speed.

A bar is one of two idle cores as fast as the one on which `_REFERENCE_S` was taken. A slower
machine, or one with other work, has longer: as much as a fixed piece of work takes longer on both
of its cores.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import pytest

# A series of measurements is repeated when something else took the machine meanwhile.
_SERIES = 3
_REFERENCE_S = 0.25
_REFERENCE_ROUNDS = 20_000_000


def _work() -> None:
    for _ in range(_REFERENCE_ROUNDS):
        pass


def measure_slowness() -> float:
    """Return how many times longer than on the reference two processes work at once; at least 1."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_work) for _ in range(2)]
    start_s = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(1.0, (time.perf_counter() - start_s) / _REFERENCE_S)


def assert_within(most_ms: float, measure: Callable[[], float]) -> None:
    """Assert that one of a few series of measurements is within a bar on this machine."""
    series = []
    for _ in range(_SERIES):
        slowness = measure_slowness()
        waited_ms = measure()
        slowness = max(slowness, measure_slowness())
        series.append((waited_ms, slowness))
        if waited_ms < most_ms * slowness:
            return
    pytest.fail(f"more than {most_ms} ms; milliseconds and slowness of each series: {series}")
