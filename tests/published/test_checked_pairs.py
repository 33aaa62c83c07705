"""Pairs of published runs of one job through `check`: which layout is faster, and by how much.

A pair is the slowest and the fastest run of a job on the same devices, as others measured them.
The bounds are the first figures, of 2026-11-28: the direction of 33 of 36 pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import log
from pathlib import Path
from statistics import median

import pytest

import moewright as mw
from moewright.calibration.measured_row import MeasuredRow
from moewright.codec import format_layout, write_json
from moewright.intake import catalogue
from published.test_one_path import read_rows, write_job

SEED = "seed000"  # one publisher's table, whose pairs are few and near


def list_pairs() -> Iterator[tuple[MeasuredRow, MeasuredRow]]:
    """Yield the slowest and the fastest run of each job that says one layout of several."""
    jobs = defaultdict(list)
    for row in read_rows("measurements.csv", "blind_runs.csv").rows:
        if row.speed is None or len(row.readings) > 1:
            continue
        if catalogue.model(row.cells["model"]) != row.model:
            continue
        job = (row.cells["model"], row.hardware.name, row.hardware.count, repr(row.workload))
        jobs[job].append((row.speed.tokens_per_s_per_device, row.id, row))
    for runs in jobs.values():
        slowest, fastest = min(runs)[2], max(runs)[2]
        if format_layout(slowest.layout) != format_layout(fastest.layout):
            yield slowest, fastest


def check_pair(pair: tuple[MeasuredRow, MeasuredRow], folder: Path) -> tuple[float, float]:
    """Return the logarithms of the step over that before: measured, and as `check` tells it."""
    plans = []
    for row in pair:
        job = write_job(row, row.workload, folder / f"{row.id}.toml")
        plans.append(folder / f"{row.id}.json")
        write_json(plans[-1], mw.estimate(job, format_layout(row.layout), on=row.hardware))
    changes = mw.check(*plans).jobs[0].changes
    assert changes is not None
    speeds = [row.speed.tokens_per_s_per_device for row in pair if row.speed is not None]
    return log(speeds[0] / speeds[1]), log(changes.step_ratio)


@pytest.mark.slow
def test_pairs_of_one_table_are_told_as_measured(tmp_path: Path) -> None:
    pairs = [pair for pair in list_pairs() if pair[0].id.startswith(SEED)]
    assert len(pairs) == 4
    for pair in pairs:
        measured, told = check_pair(pair, tmp_path)
        assert told < 0
        assert abs(told - measured) < 0.08, pair[0].id


@pytest.mark.thorough
def test_the_faster_run_of_a_published_pair_is_told(tmp_path: Path) -> None:
    told = [check_pair(pair, tmp_path) for pair in list_pairs()]
    assert len(told) == 36
    assert sum(check < 0 for _, check in told) >= 33
    assert median(abs(check - measured) for measured, check in told) < 0.1
