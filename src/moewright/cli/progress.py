"""How a verb that works long shows how far it is, and how it is stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from moewright.cli.exit_codes import STOPPED

if TYPE_CHECKING:
    from rich.progress import Progress

    from moewright.engine.observe.display import RunDisplay


@contextmanager
def show_bytes() -> Iterator[Progress]:
    """Yield a display of bars of bytes; it draws nothing where standard error is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


@contextmanager
def show_share(what: str) -> Iterator[Callable[[float], None]]:
    """Show on a terminal's standard error which share of long work is done; yield what tells it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    is_shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


@contextmanager
def show_elapsed(what: str) -> Iterator[None]:
    """Show on a terminal's standard error that long work goes on, and for how long it has."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    is_shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        progress.add_task(what, total=None)
        yield


def open_display(*, is_quiet: bool = False, is_kept: bool = True) -> RunDisplay:
    """Open the display for standard output as it is; a panel may stay when its run has ended."""
    from moewright.engine.observe.display import StepLines

    if is_quiet or not _draws(sys.stdout.isatty()):
        return StepLines(prints_steps=not is_quiet)
    from moewright.report.run_panel import RunPanel

    return RunPanel(sys.stdout, is_kept=is_kept)


def _draws(is_terminal: bool) -> bool:
    """Tell whether standard output is a terminal on which text can be drawn over."""
    from rich.console import Console

    return is_terminal and not Console().is_dumb_terminal


def answer_stops(run: Callable[[], int]) -> int:
    """Return the exit code of a job, which SIGTERM makes STOPPED also where no rank runs.

    While ranks run, the launcher takes the signal; between two starts of them, and when they have
    saved, it ends this program. Once a job was stopped so, more signals change nothing any more.
    Other verbs keep the signal's own action, which ends them in a long call of a library too.
    """
    before = signal.signal(signal.SIGTERM, _stop)
    code = 0
    try:
        code = run()
    finally:
        if code != STOPPED:
            signal.signal(signal.SIGTERM, before)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    # At once: an exception could be caught on its way.
    os._exit(STOPPED)
