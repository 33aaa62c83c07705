"""Rows of records as frames of pandas or polars, and as charts of matplotlib or plotly.

None of these libraries is a requirement: what is installed is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from moewright.spec.errors import BadInput, Reason

FRAMES = ("pandas", "polars")
CHARTS = ("matplotlib", "plotly")
_PLAIN = (bool, int, float, str)
_INT_LIMIT = 1 << 63  # integers of a frame have 64 bits


def choose_library(library: str, legal: Sequence[str], field: str) -> str:
    """Return the library that was asked for; the first that is installed where none was.

    Raises:
        BadInput: it is none of the legal ones, or it is not installed.
    """
    if library and library not in legal:
        rule = f"must be one of {', '.join(legal)}"
        raise BadInput(Reason(field=field, value=library, rule=rule, nearest=legal[0]))
    for name in (library,) if library else legal:
        if find_spec(name) is not None:
            return name
    rule = f"needs {library or ' or '.join(legal)}, which is not installed"
    raise BadInput(Reason(field=field, rule=rule, nearest=f"pip install {library or legal[0]}"))


def build_columns(rows: Iterable[Mapping[str, object]]) -> dict[str, list[Any]]:
    """Return the columns of rows by name; a row without a value has None."""
    listed = list(rows)
    names = dict.fromkeys(name for row in listed for name in row)
    return {name: [_to_cell(row.get(name)) for row in listed] for name in names}


def _to_cell(value: object) -> object:
    if isinstance(value, Enum):
        return _to_cell(value.value)
    if isinstance(value, tuple | list | frozenset):
        return "+".join(str(_to_cell(item)) for item in value)
    if value is None or isinstance(value, _PLAIN):
        return value
    return str(value)


def build_frame(rows: Iterable[Mapping[str, object]], library: str = "") -> Any:
    """Return the rows as a pandas.DataFrame or a polars.DataFrame.

    A column of polars has one type: with numbers and text in it, it is text.

    Raises:
        BadInput: the library is not installed.
    """
    chosen = choose_library(library, FRAMES, "to_frame")
    columns = build_columns(rows)
    if chosen == "polars":
        columns = {name: give_one_type(values) for name, values in columns.items()}
    return import_module(chosen).DataFrame(columns)


def give_one_type(values: Sequence[Any]) -> list[Any]:
    """Return the values of a column in one type: their own, floats of numbers, or text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} and all(abs(value) < _INT_LIMIT for value in values if value is not None):
        return list(values)
    if kinds and kinds <= {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)


def draw_bars(
    rows: Iterable[Mapping[str, object]], *, title: str, column: str = "", library: str = ""
) -> Any:
    """Draw a column of the rows as bars, with the first column of text as their labels.

    Return the matplotlib.axes.Axes, or the plotly Figure.

    Raises:
        BadInput: the library is not installed, or no such column has numbers.
    """
    chosen = choose_library(library, CHARTS, "plot")
    columns = build_columns(rows)
    numeric = [name for name, values in columns.items() if _is_numeric(values)]
    if column not in numeric and (column or not numeric):
        rule = "must be a column with numbers"
        nearest = ", ".join(numeric) or "a record with a table of numbers"
        raise BadInput(Reason(field="plot", value=column, rule=rule, nearest=nearest))
    column = column or numeric[0]
    texts = [name for name in columns if name not in numeric]
    values = columns[column]
    labels = [str(number) for number in range(1, len(values) + 1)]
    if texts:
        labels = [str(label) for label in columns[texts[0]]]
    if chosen == "plotly":
        express = import_module("plotly.express")
        return express.bar(x=values, y=labels, orientation="h", title=title).update_layout(
            xaxis_title=column, yaxis_title="", yaxis_autorange="reversed"
        )
    axes = import_module("matplotlib.pyplot").subplots()[1]
    axes.barh(range(len(values)), [value or 0 for value in values])
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(column)
    axes.set_title(title)
    return axes


def _is_numeric(values: Sequence[object]) -> bool:
    numbers = [value for value in values if value is not None]
    return bool(numbers) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in numbers
    )
