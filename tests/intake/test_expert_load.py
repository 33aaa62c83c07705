"""Measured loads of experts from files and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewright.intake.job_workload import read_expert_load, read_logged_skew
from moewright.spec.errors import BadInput


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("load.json", "[[1, 0, 3], [2, 2, 0]]"),
        ("load.csv", "1,0,3\n2,2,0\n"),
        ("long.csv", "layer,expert,tokens\n0,0,1\n0,2,3\n4,1,2\n4,0,2\n"),
    ],
)
def test_layers_of_counts_in_three_spellings(tmp_path: Path, name: str, text: str) -> None:
    assert read_expert_load(written(tmp_path, name, text)) == ((1, 0, 3), (2, 2, 0))


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("load.json", "[[1, 2.5]]", "must be a count"),
        ("load.json", "[[1, true]]", "must be a count"),
        ("load.json", '{"layers": []}', "must be a list of layers"),
        ("load.csv", "1,-2\n", "must be a count"),
        ("long.csv", "layer,expert,tokens\n1,2\n", "needs layer, expert, tokens"),
        ("load.yaml", "1,2\n", "must be balanced, a factor, a .json, .csv or .log file"),
    ],
)
def test_what_is_no_load_is_refused(tmp_path: Path, name: str, text: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        read_expert_load(written(tmp_path, name, text))


def test_a_log_says_how_far_experts_lie_apart_once_it_has_settled(tmp_path: Path) -> None:
    lines = [
        f" iteration {n}/ 9 | lm loss: 1.1E+01 | load_balancing_loss: {loss} | grad norm: 1.0 |"
        for n, loss in enumerate(("4.000000E+00", "2.0E+00", "1.250000E+00", "1.25"), 1)
    ]
    path = written(tmp_path, "run.log", "\n".join(lines))
    assert read_logged_skew(path) == pytest.approx(0.5)
    with pytest.raises(BadInput, match="logs no load_balancing_loss"):
        read_logged_skew(written(tmp_path, "other.log", "lm loss: 2"))
