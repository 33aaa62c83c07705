"""Settings of every test.

This file lies here so that pytest puts this folder on the path: tests of several floors share its
sample modules.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from importlib import import_module

import pytest
from hypothesis import HealthCheck, settings

from selection import find_missing, leave_out

# The same tree gives the same examples, so a failure comes from the change. There is no deadline:
# the time of an example depends on what else the machine does.
settings.register_profile(
    "unhurried", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

# The workers of pytest share the cores: a second thread of each would wait for its turn in every
# small operation. The variable must be set before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A name that is written like a hub id is looked up: no test asks the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Without a GPU Triton's kernels run in its interpreter: the variable must be set before Triton is
# first imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

_MODULES_OF_RANKS = ("numpy.ma", "torch._inductor.compile_fx", "torch.utils.tensorboard")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of many alike to `make test-all`, and start with the tests of ranks.

    A fork copies the page table of the worker, which grows with all that tests import and cache.

    Raises:
        UsageError: a test that catches a mutant has another name now, or is left out.
    """
    for item in leave_out(items):
        item.add_marker(pytest.mark.thorough)
    if not any("::" in name for name in config.args):
        for test in find_missing(items):
            raise pytest.UsageError(f"tests/mutants: {test} is no test of `make test`")
    items.sort(key=lambda item: item.get_closest_marker("spawn") is None)


@pytest.hookimpl(tryfirst=True)  # before fixtures that start ranks
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Import what ranks import when they run, before any of them is forked.

    A rank would take up to two seconds for it, and the next one again.
    """
    if item.get_closest_marker("spawn"):
        with warnings.catch_warnings(action="ignore"):  # of torch about its own code
            for name in _MODULES_OF_RANKS:
                import_module(name)


@pytest.fixture(autouse=True)
def _own_objects() -> None:
    """Keep the collector, and each census of tensors, from what other tests and imports made.

    There are millions of such objects in a worker that has run a while, and a census passes over
    all that the collector knows.
    """
    gc.collect()
    gc.freeze()
