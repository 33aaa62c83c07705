"""Tables of measured runs, as CSV files whose columns docs/tables.md describes.

A row that cannot be scored is skipped with its reason.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moewright.calibration.columns import (
    COLUMNS,
    NEEDED_COLUMNS,
    canonical_cell,
    canonical_column,
    fill_from_layout,
)
from moewright.calibration.duplicates import find_contradictions, mark_duplicates
from moewright.calibration.measured_row import MeasuredRow, parse_row
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.printable import escape_controls

_FIRST_LINE = 2  # of the rows; the header is line 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRow:
    """A row that is left out, with the reason."""

    id: str
    cells: Mapping[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementTable:
    """The rows of a table, in the order of the file.

    `order` holds all ids, made unique by their line where the file repeats one; `contradictions`
    describes pairs of rows that state the same job and differ.
    """

    order: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]
    skipped: tuple[SkippedRow, ...]
    contradictions: tuple[str, ...]


def read_table(*paths: Path, user_hardware: Sequence[Hardware] = ()) -> MeasurementTable:
    """Read the rows of tables, one after another; a bad row is skipped, not raised.

    `user_hardware` are parts besides the catalogue's that the hardware column may name.

    Raises:
        BadInput: a file is no such table.
    """
    rows: list[MeasuredRow] = []
    skipped: list[SkippedRow] = []
    order: dict[str, None] = {}
    for number, cells in _read_cells(paths):
        cells["id"] = escape_controls(cells["id"])
        if not cells["id"] or cells["id"] in order:
            cells["id"] = f"{cells['id']}@line{number}"
        order[cells["id"]] = None
        try:
            cells = fill_from_layout(cells)
            rows.append(parse_row(cells, user_hardware))
        except BadInput as error:
            skipped.append(SkippedRow(id=cells["id"], cells=cells, reason=str(error)))
    marked = tuple(mark_duplicates(rows))
    return MeasurementTable(
        order=tuple(order),
        rows=marked,
        skipped=tuple(skipped),
        contradictions=tuple(find_contradictions(marked)),
    )


def _read_cells(paths: Sequence[Path]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the cells of every line of the tables, with its number in its file."""
    for path in paths:
        lines = _read_lines(path)
        titles = {title: canonical_column(title) for title in (lines[0] if lines else ()) if title}
        _require_columns(set(titles.values()), path)
        for number, line in enumerate(lines, _FIRST_LINE):
            yield number, _canonical_cells(line, titles)


def _read_lines(path: Path) -> list[dict[str, str]]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise _table_error(path, "is not a regular file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise _table_error(path, error.strerror or "cannot be read") from None
    except (UnicodeDecodeError, csv.Error):
        raise _table_error(path, "is no CSV text in UTF-8") from None


def _require_columns(columns: Collection[str], path: Path) -> None:
    missing = [column for column in NEEDED_COLUMNS if column not in columns]
    if missing:
        needed = ", ".join(NEEDED_COLUMNS)
        rule = f"needs rows under a header with {needed}; missing: {', '.join(missing)}"
        raise _table_error(path, rule)


def _table_error(path: Path, rule: str) -> BadInput:
    return BadInput(Reason(field="table", value=str(path), rule=rule))


def _canonical_cells(line: Mapping[str, str], titles: Mapping[str, str]) -> dict[str, str]:
    """Return the cells of a line by column, "" for what the line does not state.

    A column that stands under its own name is not overruled by one under another name.
    """
    cells = dict.fromkeys(COLUMNS, "")
    own_names_last = sorted(titles.items(), key=lambda pair: pair[0] == pair[1])
    for title, column in own_names_last:
        cells[column] = canonical_cell(column, line[title] or "") or cells.get(column, "")
    return cells
