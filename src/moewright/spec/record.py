"""The base of the records that the Python interface returns: short to print, easy to take apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from operator import attrgetter
from pathlib import PurePath
from typing import Any, TypeVar, cast

from moewright.spec.frames import build_frame, draw_bars
from moewright.spec.quoting import Html

Row = Mapping[str, object]

_MAX_LINES = 25  # of a record in a notebook: one screen
_MAX_CELL = 100  # characters of one cell


class Record:
    """A frozen record that prints as a short table and converts to plain data.

    A dataclass that derives from it is declared with `repr=False`.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return every field as dicts, lists, strings and numbers, as JSON files hold them."""
        return cast(dict[str, Any], to_plain_data(self))

    def to_rows(self) -> list[Row]:
        """Return the rows of the table that stands for the record, a mapping each."""
        return [
            {"field": name, "value": value}
            for name, value in list_changed_fields(self)
            if not isinstance(value, tuple | Mapping) and not is_dataclass(value)
        ]

    def frame_rows(self) -> list[Row]:
        """Return the rows of frames and charts: the table's, or more where it would be too long."""
        return self.to_rows()

    def to_frame(self, library: str = "") -> Any:
        """Return the rows as a frame of pandas or polars; of the one installed when not given.

        Raises:
            BadInput: it is not installed.
        """
        return build_frame(self.frame_rows(), library)

    def plot(self, column: str = "", library: str = "") -> Any:
        """Draw a column of the frame as bars; the first one with numbers when not given.

        Return the axes of matplotlib or the figure of plotly.

        Raises:
            BadInput: neither is installed, or the column has no numbers.
        """
        title = self.title().splitlines()[0]
        return draw_bars(self.frame_rows(), title=title, column=column, library=library)

    def title(self) -> str:
        """Return the line above the table."""
        return type(self).__name__

    def __repr__(self) -> str:
        lines = [*self.title().splitlines(), *format_table(self.to_rows())]
        if len(lines) > _MAX_LINES:
            left_out = len(lines) - _MAX_LINES + 1
            lines = [*lines[: _MAX_LINES - 1], f"... {left_out} more rows in .to_rows()"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return render_html_table(self.title(), self.to_rows())


SPREAD = "spread"
"""The key of a field's metadata that says which values of the record in it are written, and that
they are written among the values of the record that holds it."""


OMIT_EMPTY = "omit_empty"
"""The key of a field's metadata that has it written only where it holds something: files and
fingerprints from before the field stay what they were."""


def spread(*names: str) -> Mapping[str, tuple[str, ...]]:
    """Return the metadata of a field whose record is written as these of its fields, flat."""
    return {SPREAD: names}


_T = TypeVar("_T")


def copy_with(record: _T, **changes: object) -> _T:
    """Return a copy of a record with other values of some fields, as dataclasses.replace does.

    It copies slots, where `replace` calls __init__ with every field: 4 us in place of 17 for a
    Layout, of which a search makes twenty-five thousand. The record has slots alone and no
    __post_init__, which nothing here calls.
    """
    record_type: Any = type(record)
    read, write = _list_slots(record_type)
    copy: _T = object.__new__(record_type)
    for set_value, value in zip(write.values(), read(record), strict=True):
        set_value(copy, value)
    for name, value in changes.items():
        write[name](copy, value)
    return copy


@cache
def _list_slots(
    record_type: type,
) -> tuple[Callable[[object], tuple[object, ...]], dict[str, Callable[[object, object], None]]]:
    """Return what reads all fields of a type at once, and what writes each, frozen or not."""
    names = [field.name for field in fields(record_type)]
    return attrgetter(*names), {name: getattr(record_type, name).__set__ for name in names}


def to_plain_data(value: object) -> object:
    """Return a dataclass as a dict, a sequence as a list, an enum as its value, a path as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain_data(item) for name, item in _list_values(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {to_plain_data(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        return [to_plain_data(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value


def _list_values(record: object) -> Iterator[tuple[str, object]]:
    """Yield the values of a dataclass as they are written."""
    for field in fields(cast(Any, record)):
        value = getattr(record, field.name)
        if SPREAD in field.metadata:
            yield from ((name, getattr(value, name)) for name in field.metadata[SPREAD])
        elif value or OMIT_EMPTY not in field.metadata:
            yield field.name, value


def replace_non_finite(data: Any) -> Any:
    """Return plain data with None in place of every number that is not finite, as JSON needs it."""
    if isinstance(data, float) and not isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: replace_non_finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [replace_non_finite(value) for value in data]
    return data


def format_json(record: object) -> str:
    """Return a record as JSON text; NaN and infinite numbers, which JSON has not, become null."""
    return json.dumps(replace_non_finite(to_plain_data(record)), indent=1, allow_nan=False) + "\n"


def list_changed_fields(record: object) -> list[tuple[str, object]]:
    """Return name and value of each field of a dataclass whose value is not the default."""
    changed = []
    for field in fields(cast(Any, record)):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            changed.append((field.name, value))
    return changed


def format_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a text table: a head of column names, then a line for each row."""
    columns = list_columns(rows)
    if not columns:
        return []
    cells = [columns, *([format_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_number = [all(isinstance(row.get(name, 0), int | float) for row in rows) for name in columns]
    return [_join_cells(line, widths, is_number) for line in cells]


def _join_cells(cells: Iterable[str], widths: Iterable[int], is_number: Iterable[bool]) -> str:
    aligned = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_number, strict=True)
    )
    return "  ".join(aligned).rstrip()


def render_html_table(title: str, rows: Sequence[Row]) -> Html:
    """Return an HTML table with a caption, as notebooks show it."""
    columns = list_columns(rows)
    head = Html.concat(Html.write("<th>{}</th>", name) for name in columns)
    body = Html.concat(
        Html.write("<tr>{}</tr>", Html.concat(_html_cells(row, columns))) for row in rows
    )
    return Html.write("<table><caption>{}</caption><tr>{}</tr>{}</table>", title, head, body)


def _html_cells(row: Row, columns: Iterable[str]) -> Iterator[Html]:
    for name in columns:
        yield Html.write("<td>{}</td>", format_cell(row.get(name, "")))


def list_columns(rows: Iterable[Row]) -> list[str]:
    """Return the names of all columns, in the order in which the rows bring them."""
    return list(dict.fromkeys(name for row in rows for name in row))


def format_cell(value: object) -> str:
    """Return a value as the text of a cell: floats with four digits, a tuple as "a+b".

    A long text is cut where it has words; a layout's, an address or a path is there to be copied.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if abs(value) >= 1e4:
            return f"{value:,.0f}"
        return f"{value:.4g}"
    if isinstance(value, tuple):
        value = "+".join(format_cell(item) for item in value)
    text = str(value)
    if len(text) <= _MAX_CELL or " " not in text:
        return text
    return f"{text[: _MAX_CELL - 3]}..."
