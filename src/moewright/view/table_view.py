"""Tables as pages show them, of answers that have no picture of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moewright.diagnosis.compare_ledgers import LedgerComparison, Section
from moewright.spec.record import Record, Row, list_columns, to_plain_data


@dataclass(frozen=True, kw_only=True, slots=True)
class TableData:
    """A table with its heading; a cell is text, a number or None."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TableView(Record):
    """An answer as a heading, lines and tables."""

    heading: str
    lines: tuple[str, ...]
    tables: tuple[TableData, ...]

    def title(self) -> str:
        """Return the heading."""
        return self.heading


def build_table(heading: str, rows: Sequence[Row]) -> TableData:
    """Build a table of rows, with a column for every name that one of them has."""
    columns = tuple(list_columns(rows))
    return TableData(
        heading=heading,
        columns=columns,
        rows=tuple(tuple(to_plain_data(row.get(name)) for name in columns) for row in rows),
    )


def view_comparison_lines(comparison: LedgerComparison, heading: str) -> TableView:
    """Return the lines of a rank's two ledgers as tables, a section each."""
    tables = []
    for section in Section:
        rows: list[Row] = [
            {
                "quantity": line.label,
                "predicted": line.predicted,
                "counted": line.counted,
                "agreement": line.status.value,
            }
            for line in comparison.lines_in(section)
        ]
        if rows:
            tables.append(build_table(section.value, rows))
    equal = sum(line.keeps_rule for line in comparison.lines)
    line = f"{equal} of {len(comparison.lines)} lines keep what is promised of them."
    return TableView(heading=heading, lines=(line, *comparison.notes), tables=tuple(tables))
