"""Settings of every test.

This file lies here so that pytest puts this folder on the path: tests of several floors share its
sample modules.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Iterator
from importlib import import_module

import pytest
from hypothesis import HealthCheck, settings

from selection import cpu_seconds, find_missing, find_slow, leave_out, write_durations

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

_CPU_S: dict[str, float] = {}  # of each test, in the process that has the reports
_BEGIN_S = pytest.StashKey[float]()
_MODULES_OF_RANKS = ("numpy.ma", "torch._inductor.compile_fx", "torch.utils.tensorboard")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of many alike to `make test-all`, and long tests to `make test-slow`.

    The tests of ranks come first.

    A fork copies the page table of the worker, which grows with all that tests import and cache.

    Raises:
        UsageError: a test that catches a mutant has another name now, or is left out.
    """
    for item in leave_out(items):
        item.add_marker(pytest.mark.thorough)
    for item in find_slow(items):
        item.add_marker(pytest.mark.slow)
    if not any("::" in name for name in config.args):
        for test in find_missing(items):
            raise pytest.UsageError(f"tests/mutants: {test} is a test that CI does not run")
    items.sort(key=lambda item: item.get_closest_marker("spawn") is None)


@pytest.hookimpl(tryfirst=True)  # before fixtures that start ranks
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Import what ranks import when they run, before any of them is forked.

    A rank would take up to two seconds for it, and the next one again.
    """
    item.stash[_BEGIN_S] = cpu_seconds()
    if item.get_closest_marker("spawn"):
        with warnings.catch_warnings(action="ignore"):  # of torch about its own code
            for name in _MODULES_OF_RANKS:
                import_module(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Send the CPU seconds of a test with its last report."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", cpu_seconds() - item.stash[_BEGIN_S]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make durations`."""
    parser.addoption("--write-durations", action="store_true", help="of long tests, see selection")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the CPU seconds of a test that has no mark of its length, and may run in a worker."""
    if report.when == "teardown" and not {"core", "slow"} & report.keywords.keys():
        _CPU_S[report.nodeid] = dict(report.user_properties)["cpu_s"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write how long the long tests took, if that is asked for."""
    if session.config.getoption("write_durations") and not hasattr(session.config, "workerinput"):
        write_durations(_CPU_S)


@pytest.fixture(autouse=True)
def _own_objects() -> None:
    """Keep the collector, and each census of tensors, from what other tests and imports made.

    There are millions of such objects in a worker that has run a while, and a census passes over
    all that the collector knows.
    """
    gc.collect()
    gc.freeze()
