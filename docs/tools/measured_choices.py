"""Write src/moewright/cost/data/measured_choices.csv: the choices that published runs made.

`make evidence` runs it over the tables of tests/published/data, and a test compares the file with
what it would write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.table import read_table
from moewright.cost.evidence import list_choices

ROOT = Path(__file__).parents[2]
TABLES = (ROOT / "tests/published/data/measured_steps.csv",)
FILE = ROOT / "src/moewright/cost/data/measured_choices.csv"


def render_file() -> str:
    """Return the text of the file: a line for each set of choices, the commonest first."""
    counts = Counter(_choices(row) for table in TABLES for row in _timed_rows(table))
    lines = sorted((-count, " ".join(choices)) for choices, count in counts.items())
    return "\n".join(["runs,choices", *(f"{-count},{choices}" for count, choices in lines), ""])


def _timed_rows(table: Path) -> Iterable[MeasuredRow]:
    rows = read_table(table).rows
    return (row for row in rows if row.speed is not None and not row.duplicate_of)


def _choices(row: MeasuredRow) -> tuple[str, ...]:
    return tuple(sorted(list_choices(row.model, row.workload, row.hardware, row.layout)))


if __name__ == "__main__":
    FILE.write_text(render_file())
