"""The tables of options and models that come with the package."""

from __future__ import annotations

import csv
from importlib import resources


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of the package's data, such as releases.csv."""
    file = resources.files("moewright.intake.megatron").joinpath(f"data/{name}")
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
