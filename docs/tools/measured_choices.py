"""Write src/moewright/cost/data/measured_choices.csv: the choices that published runs made.

`make evidence` runs it over the tables of tests/published/data, and a test compares the file with
what it would write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from moewright.calibration.measured_row import MeasuredRow, RowStatement
from moewright.calibration.table import read_table
from moewright.cost.evidence import list_choices

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/published/data"
TABLES = tuple(
    DATA / f"{name}.csv" for name in ("measured_steps", "measurements", "measurements_more")
)
FILE = ROOT / "src/moewright/cost/data/measured_choices.csv"


def render_file() -> str:
    """Return the text of the file: a line for each set of choices, the commonest first."""
    rows = {row.id: row for table in TABLES for row in _timed_rows(table)}
    counts = Counter(_choices(row) for row in rows.values())
    lines = sorted((-count, " ".join(choices)) for choices, count in counts.items())
    return "\n".join(["runs,choices", *(f"{-count},{choices}" for count, choices in lines), ""])


def _timed_rows(table: Path) -> Iterable[MeasuredRow]:
    """Return the timed rows whose sources state their switches."""
    return (
        row
        for row in read_table(table).rows
        if row.speed and not row.duplicate_of and row.kind is not RowStatement.UNSTATED
    )


def _choices(row: MeasuredRow) -> tuple[str, ...]:
    return tuple(sorted(list_choices(row.job, row.hardware)))


if __name__ == "__main__":
    FILE.write_text(render_file())
