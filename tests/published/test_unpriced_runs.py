"""Runs of software that nothing was fitted to, with their first score as the bound.

The first score is that of 2026-11-26, at commit 7f60d376, before anything was changed for them
(docs/log/planner_accuracy.md). Their shapes lie in unpriced_models/, by paths from the root.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from moewright.calibration.cross_validate import calibrate_as_shipped
from moewright.calibration.score import Score, score_table
from moewright.calibration.table import read_table
from moewright.spec.plan import Verdict

DATA = Path(__file__).parent / "data"


@cache
def scored() -> Score:
    return score_table(read_table(DATA / "unpriced_runs.csv"), calibrate_as_shipped)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA.parents[2])


def test_rows_are_read_but_those_without_a_batch() -> None:
    skipped = {row.id: row.skipped for row in scored().rows if row.skipped}
    assert len(scored().rows) == 59
    assert set(skipped.values()) == {"gbs: is not stated"}
    assert len(skipped) == 5


def test_errors_are_no_larger_than_with_kernels_of_their_year() -> None:
    """First: MoE 32.2 and 57.3 %, dense 18.1 and 33.7 % (median, 90th percentile).

    Dense runs are at 8.8 and 19.3 % since attention and odd shards are priced by their stack.
    """
    splits = {(split.by, split.name): split.speeds for split in scored().summary.splits}
    moe, dense = splits["moe", "all"], splits["dense", "all"]
    assert (moe.rows, dense.rows) == (13, 37)
    assert moe.median_error <= 0.33
    assert dense.median_error <= 0.09
    assert dense.p90_error <= 0.2


def test_runs_that_ran_are_not_said_not_to_fit() -> None:
    """At first six were, whose custom remat keeps tensors on the host."""
    refused = {
        row.id for row in scored().rows if row.verdict is Verdict.OOM and not row.measured_oom
    }
    assert not refused
