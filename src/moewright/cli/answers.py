"""Where a verb's answer goes: tables for people, JSON for programs.

`--json PATH` writes a file next to the tables. `--json -` gives standard output to the JSON alone:
the tables, and what else is printed, go to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

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


def write_answer(console: Console, json: Path | None, record: object) -> None:
    """Write a record as JSON where the user wants it; the console names a file that was written."""
    from moewright.codec import write_text
    from moewright.spec.record import format_json

    if json is None:
        return
    text = format_json(record)
    if json == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    write_text(json, text)
    console.print(f"wrote {json}", soft_wrap=True)


def write_html(console: Console, html: Path | None, records: Iterable[Record]) -> None:
    """Write records as one page where the user wants it; the console names the file."""
    if html is None:
        return
    from moewright.codec import write_text
    from moewright.view.page import render_page

    write_text(html, render_page(tuple(records), html.stem))
    console.print(f"wrote {html}", soft_wrap=True)


@contextmanager
def reserve_stdout(json: Path | None) -> Iterator[None]:
    """Send what is printed meanwhile to standard error where JSON takes standard output.

    What processes print that are started meanwhile goes there as well.
    """
    if json != STANDARD_OUTPUT:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_now(line: str) -> None:
    """Print a line about progress at once."""
    print(line, flush=True)


def print_nothing(line: str) -> None:
    """Drop a line about progress: another rank prints it."""
