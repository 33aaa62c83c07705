"""Tables replayed as choices: the pick of a ranking, its regret and how far it is off."""

from __future__ import annotations

from math import exp
from pathlib import Path

import numpy as np
import pytest

from moewright.calibration.splits import SpeedPair, score_choices
from moewright.calibration.table import read_table

TABLE = Path(__file__).parents[1] / "published" / "data" / "measured_steps.csv"


@pytest.fixture(scope="module")
def pairs() -> list[SpeedPair]:
    """Read the rows of one job: Qwen3-235B on 256 H800."""
    rows = [
        row
        for row in read_table(TABLE).rows
        if row.id.startswith("seed000") and row.speed and row.workload.global_batch == 2048
    ]
    speeds = [row.speed.tokens_per_s_per_device for row in rows if row.speed]
    return [
        SpeedPair(row=row, measured=speed, predicted=speed)
        for row, speed in zip(rows, speeds, strict=True)
    ]


def test_a_perfect_prediction_regrets_nothing(pairs: list[SpeedPair]) -> None:
    summary = score_choices(pairs)
    assert summary is not None
    (job,) = summary.jobs
    assert job.layouts >= 5
    assert summary.regret_by_prediction == summary.error_by_prediction == 0


def test_the_pick_of_an_inverted_prediction_is_the_slowest(pairs: list[SpeedPair]) -> None:
    inverted = [
        SpeedPair(row=pair.row, measured=pair.measured, predicted=1e6 / pair.measured)
        for pair in pairs
    ]
    summary = score_choices(inverted)
    assert summary is not None
    measured = [pair.measured for pair in pairs]
    pick = summary.jobs[0].by_prediction
    assert pick.regret == pytest.approx(1 - min(measured) / max(measured))
    assert pick.error == pytest.approx(1e6 / min(measured) ** 2 - 1)


def test_a_pick_is_off_by_more_than_its_job_where_the_ranking_errs(pairs: list[SpeedPair]) -> None:
    noise = np.random.default_rng(5).normal(0.0, 0.3, len(pairs))
    erring = [
        SpeedPair(row=pair.row, measured=pair.measured, predicted=pair.measured * exp(error))
        for pair, error in zip(pairs, noise, strict=True)
    ]
    summary = score_choices(erring)
    assert summary is not None
    of_moe, of_all = summary.biases
    assert (of_moe.name, of_all.name) == ("moe", "all")
    (job,) = summary.jobs
    assert of_moe.jobs == of_all.jobs == 1
    assert of_moe.error == pytest.approx(job.by_prediction.error)
    assert of_moe.error > of_moe.job_error + 0.1
    assert of_moe.expected >= 0


def test_few_layouts_are_no_choice(pairs: list[SpeedPair]) -> None:
    assert score_choices(pairs[:2]) is None
