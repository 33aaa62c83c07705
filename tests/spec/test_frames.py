"""Records as frames and charts of the libraries that are installed."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import moewright as mw
import sample_run
from moewright.spec import frames
from moewright.spec.errors import BadInput
from moewright.spec.record import Record, Row


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Sample(Record):
    """A record of three rows, one of which lacks a value."""

    def to_rows(self) -> list[Row]:
        return [
            {"name": "a", "step_s": 1.5, "colour": Colour.RED, "parts": (1, 2)},
            {"name": "b", "step_s": None, "colour": Colour.RED},
            {"name": "c", "step_s": 2.5, "colour": Colour.RED, "fits": True},
        ]


@pytest.mark.parametrize("library", frames.FRAMES)
def test_a_frame_has_the_values_of_the_rows(library: str) -> None:
    module = pytest.importorskip(library)
    frame = Sample().to_frame(library)
    assert isinstance(frame, module.DataFrame)
    assert list(frame.columns) == ["name", "step_s", "colour", "parts", "fits"]
    assert list(frame["name"]) == ["a", "b", "c"]
    assert frame["step_s"].sum() == 4.0
    assert next(iter(frame["parts"])) == "1+2"


@pytest.mark.parametrize("seed", range(50))
def test_a_column_has_one_type_and_its_values(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.sample([3, -(1 << 70), 2.5, "fits", True, None], rng.choice((1, 2, 3)))
    values = [rng.choice(kinds) for _ in range(6)]
    column = frames.give_one_type(values)
    assert len({type(value) for value in column if value is not None}) <= 1
    for value, own in zip(values, column, strict=True):
        assert (value is None) == (own is None)
        assert isinstance(own, str) or own == value
        assert not isinstance(own, str) or own == str(value)
        assert not isinstance(own, int) or abs(own) < 1 << 63
    if importlib.util.find_spec("polars"):
        frame = importlib.import_module("polars").DataFrame({"column": column})
        assert frame["column"].to_list() == column


@pytest.mark.parametrize("library", frames.CHARTS)
def test_a_chart_has_a_bar_for_each_row(library: str) -> None:
    pytest.importorskip(library)
    if library == "matplotlib":
        importlib.import_module("matplotlib").use("Agg")
    chart = Sample().plot(library=library)
    bars: Any = chart.patches if library == "matplotlib" else chart.data[0].x
    assert len(bars) == 3


def test_what_is_not_installed_or_has_no_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BadInput, match="nearest legal value: pandas"):
        Sample().to_frame("dask")
    monkeypatch.setattr(frames, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pandas or polars, which is not installed"):
        Sample().to_frame()
    monkeypatch.setattr(frames, "find_spec", lambda name: name)
    with pytest.raises(BadInput, match="nearest legal value: step_s"):
        Sample().plot("colour")


def test_a_run_and_a_watch_of_it_are_frames_of_steps(tmp_path: Path) -> None:
    """Their tables in a notebook are short: what was trained, and the alarms."""
    sample_run.write_run(tmp_path, sample_run.record())
    run = mw.read_run(tmp_path)
    assert [row["step"] for row in run.frame_rows()] == [step.step for step in run.steps]
    assert [row["field"] for row in run.to_rows()][:2] == ["model", "steps"]
    watch = mw.watch(tmp_path)
    assert len(watch.frame_rows()) == len(watch.recent) > 0
    assert frames.build_columns(watch.frame_rows()).keys() == {"step", "step_s", "alarm"}


def test_columns_are_plain_values() -> None:
    columns = frames.build_columns(Sample().to_rows())
    assert columns["colour"] == ["red"] * 3
    assert columns["fits"] == [None, None, True]
