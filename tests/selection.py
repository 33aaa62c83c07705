"""Which cases `make test` runs: those that are more of the same are left to `make test-all`."""

from __future__ import annotations

import pytest


def thorough(*values: object) -> object:
    """Return a case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)
