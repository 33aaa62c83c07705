"""The mark of the cases that `make test` leaves to `make test-all`."""

from __future__ import annotations

import pytest


def thorough(*values: object) -> object:
    """Return a case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)
