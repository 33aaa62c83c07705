"""What most tests of several processes train on."""

from __future__ import annotations

import pytest

import tiny_jobs
from moewright.spec.workload import DataSpec


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))
