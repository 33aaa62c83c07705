"""Settings of every test.

This file lies here so that pytest puts this folder on the path: tests of several floors share its
sample modules.
"""

from __future__ import annotations

import gc
import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

from selection import is_in_turn

# The same tree gives the same examples, so a failure comes from the change. There is no deadline:
# the time of an example depends on what else the machine does.
settings.register_profile(
    "unhurried", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

# The workers of pytest share the cores: a second thread of each would wait for its turn in every
# small operation. The variable must be set before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU Triton's kernels run in its interpreter: the variable must be set before Triton is
# first imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the cases whose turn it is not to `make test-all`."""
    for item in items:
        if item.get_closest_marker("turns") and not is_in_turn(item.nodeid):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def _own_objects() -> None:
    """Keep the collector, and each census of tensors, from what other tests and imports made.

    There are millions of such objects in a worker that has run a while, and a census passes over
    all that the collector knows.
    """
    gc.collect()
    gc.freeze()
