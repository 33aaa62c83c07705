"""Measured loads of experts from files and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewright.intake.job_workload import read_expert_load
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
        ("load.txt", "1,2\n", "must be a .json or .csv file"),
    ],
)
def test_what_is_no_load_is_refused(tmp_path: Path, name: str, text: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        read_expert_load(written(tmp_path, name, text))
