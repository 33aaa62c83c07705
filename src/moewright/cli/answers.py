"""Where a verb's answer goes: tables for people, JSON for programs.

`--json PATH` writes a file next to the tables. `--json -` gives standard output to the JSON alone:
the tables, and what else is printed, go to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.spec.record import Record

STANDARD_OUTPUT = Path("-")


def open_console(json: Path | None) -> Console:
    """Open the console for a verb's tables, on standard error where JSON takes standard output."""
    from moewright.report.console import make_console

    if json == STANDARD_OUTPUT:
        return make_console(sys.stderr)
    return make_console(sys.stdout)


@contextmanager
def write_answer(
    record: object,
    json: Path | None,
    *,
    html: Path | None = None,
    views: Callable[[], Iterable[Record]] = tuple,
    written: Sequence[Path | None] = (),
    beside_stdout: bool = False,
) -> Iterator[Console]:
    """Write the files of an answer, then give the console for its tables, and name the files last.

    So a reader of the tables that stops early, such as `head`, costs no file. `record` is the
    answer as JSON, None where there is none; `views` makes the records of the page `html`;
    `written` are files that are there already. `beside_stdout` gives a console on standard error.
    """
    if json is not None and record is not None:
        _write_json(json, record)
    if html is not None:
        _write_page(html, views())
    console = open_console(STANDARD_OUTPUT if beside_stdout else json)
    yield console
    json_file = None if json == STANDARD_OUTPUT or record is None else json
    for path in (*written, json_file, html):
        if path is not None:
            console.print(f"wrote {path}")


def write_told_answer(record: object, json: Path | None) -> None:
    """Write the JSON of an answer that was told while it was made, and name its file."""
    with write_answer(record, json):
        pass


def _write_json(json: Path, record: object) -> None:
    from moewright.codec import write_text
    from moewright.spec.record import format_json

    text = format_json(record)
    if json == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(json, text)


def _write_page(html: Path, records: Iterable[Record]) -> None:
    from moewright.codec import write_text
    from moewright.view.page import render_page

    write_text(html, render_page(tuple(records), html.stem))


@contextmanager
def reserve_stdout(json: Path | None) -> Iterator[None]:
    """Send what is printed meanwhile to standard error where JSON takes standard output.

    What processes print that are started meanwhile goes there as well.
    """
    if json != STANDARD_OUTPUT:
        yield
        return
    # What is buffered came before, and goes where it was meant to.
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_now(line: str, stream: TextIO | None = None) -> None:
    """Print what a verb tells, at once; on a terminal its lines end between words."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        from moewright.report.console import make_console

        make_console(stream).print(line)
    else:
        print(line, file=stream, flush=True)


def print_nothing(line: str) -> None:
    """Drop a line about progress: another rank prints it."""
