"""Forecasts of expert loads beside histories that are drawn, and placements that they pay for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moewright as mw
import sample_run
from moewright.cli.main import main
from moewright.diagnosis.load_forecast import (
    SURE,
    forecast_history,
    forecast_line,
    forecast_run,
)
from moewright.rules.expert_placement import rank_load_factor
from moewright.spec.errors import BadInput
from moewright.spec.run import RunRecord

EXPERTS, EP = 16, 4
AHEAD = 100


def draw_history(seed: int, records: int, *, drift: float, noise: float = 0.05) -> np.ndarray:
    """Return counts [records, experts] whose logarithms drift by lines, with noise."""
    rng = np.random.default_rng(seed)
    start, slope = rng.normal(0, 0.3, EXPERTS), rng.normal(0, drift, EXPERTS)
    times = np.arange(records)[:, None] / records
    logs = start + slope * times + rng.normal(0, noise, (records, EXPERTS))
    return 1e6 * np.exp(logs)


def test_drifting_shares_are_forecast_better_than_by_the_latest() -> None:
    errors, naive = [], []
    for seed in range(20):
        history = draw_history(seed, 400, drift=1.0)
        seen, ahead = history[:300], history[300 + AHEAD - 20 :].mean(axis=0)
        truth = ahead / ahead.sum()
        latest = seen[-20:].mean(axis=0)
        errors.append(np.abs(forecast_line(seen, AHEAD) - truth).sum())
        naive.append(np.abs(latest / latest.sum() - truth).sum())
    assert np.mean(errors) < 0.4 * np.mean(naive)


def test_noise_alone_is_no_trend() -> None:
    for seed in range(20):
        history = draw_history(seed, 100, drift=0.0)
        mean = history.mean(axis=0)
        told = forecast_history(history, 1000, EP).shares
        assert np.abs(told - mean / mean.sum()).sum() < 0.05


def test_eight_of_ten_outcomes_lie_within_the_interval() -> None:
    """Random walks, which a line does not tell, among lines that it does."""
    inside = []
    for seed in range(60):
        history = draw_history(seed, 300, drift=0.5)
        if seed % 2:
            rng = np.random.default_rng(seed)
            history = history * np.exp(np.cumsum(rng.normal(0, 0.01, (300, EXPERTS)), axis=0))
        seen = history[:240]
        told = forecast_history(seen, 60, EP)
        came = rank_load_factor(tuple(map(int, history[-1])), EP)
        inside.append(abs(np.log(told.factor / came)) <= SURE * told.error)
    assert 0.65 <= np.mean(inside) <= 0.95


def test_loads_that_are_pulled_back_are_not_followed() -> None:
    """Of a bias that pulls shares back to even ones only the beginning looks like a line."""
    rng = np.random.default_rng(5)
    decay = np.exp(-np.arange(240) / 40)[:, None]
    logs = decay * rng.normal(0, 0.5, EXPERTS) + rng.normal(0, 0.05, (240, EXPERTS))
    history = 1e6 * np.exp(logs)
    told = forecast_history(history[:160], 80, EP)
    came = rank_load_factor(tuple(map(int, history[-1])), EP)
    assert abs(np.log(told.factor / came)) < max(0.05, SURE * told.error)


def single_factors(history: np.ndarray) -> list[float]:
    return [rank_load_factor(tuple(map(int, row)), EP) for row in history]


def test_a_forecast_is_nearer_than_the_latest_and_the_mean() -> None:
    """Of drifts, noise, and loads that swing around a level: no rival is good at all of them."""
    errors: dict[str, list[float]] = {"told": [], "latest": [], "mean": []}
    for seed in range(24):
        history = draw_history(seed, 400, drift=(0.0, 0.3, 1.0)[seed % 3])
        if seed % 3 == 0:
            rng = np.random.default_rng(seed)
            swing = np.sin(np.arange(400)[:, None] / 25 + rng.uniform(0, 6, EXPERTS))
            history = history * np.exp(0.1 * swing)
        factors = single_factors(history)
        came = float(np.median(factors[300 + AHEAD - 10 :]))
        told = forecast_history(history[:300], AHEAD, EP).factor
        rivals = (told, factors[299], float(np.mean(factors[:300])))
        for name, value in zip(errors, rivals, strict=True):
            errors[name].append(abs(np.log(value / came)))
    assert np.mean(errors["told"]) < 0.7 * np.mean(errors["latest"])
    assert np.mean(errors["told"]) < 0.5 * np.mean(errors["mean"])


def hot_run(*, steps: int = 60) -> RunRecord:
    """Return a made-up run whose first experts get most tokens, more and more."""
    record = sample_run.record()
    rng = np.random.default_rng(3)
    logged = []
    for place, step in enumerate(record.steps[:steps]):
        loads = []
        for load in step.loads:
            weights = np.exp(
                -np.arange(sample_run.EXPERTS) / 8 * (1 + place / 60)
                + rng.normal(0, 0.02, sample_run.EXPERTS)
            )
            counts = tuple(map(int, 4096 * weights / weights.sum()))
            loads.append(replace(load, counts=counts))
        logged.append(replace(step, loads=tuple(loads)))
    return replace(record, steps=tuple(logged))


def test_a_placement_for_hot_experts_pays() -> None:
    told = forecast_run(hot_run(), 200)
    layer = told.layers[0]
    assert layer.hottest_rank == 0
    assert layer.low <= layer.expected <= layer.high
    assert layer.expected > layer.now > layer.balanced >= 1.0
    assert layer.balanced < 1.05
    best = told.offers[0]
    assert best.gain_s > 0
    assert best.moved_experts > 0
    assert best.pays_after == pytest.approx(best.move_s / best.gain_s)


def test_runs_without_statistics_are_refused() -> None:
    with pytest.raises(BadInput, match="has the loads of 5 steps, a forecast needs 12"):
        forecast_run(hot_run(steps=5), 100)
    record = hot_run()
    layout = replace(record.plan.layout, ep=1)
    with pytest.raises(BadInput, match="has all experts on every rank"):
        forecast_run(replace(record, plan=replace(record.plan, layout=layout)), 100)


def test_the_command_line_says_what_pays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = hot_run()
    sample_run.write_run(tmp_path / "run", record)
    answer = tmp_path / "answer.json"
    assert main(["forecast", str(tmp_path / "run"), "--horizon", "200", "--json", str(answer)]) == 0
    out = capsys.readouterr().out
    assert "expert_placement=balanced" in out
    assert "pays after" in out
    data = json.loads(answer.read_text())
    assert data["layers"][0]["expected"] > 1.2
    assert mw.forecast_loads(tmp_path / "run", 200).layers[0].counts == tuple(
        data["layers"][0]["counts"]
    )
    assert main(["forecast", str(tmp_path / "run"), "--horizon", "0"]) == 2
    assert main(["forecast", str(tmp_path / "none")]) == 2
