"""Bars of bytes on a terminal's standard error, for verbs that read or write large files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


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
