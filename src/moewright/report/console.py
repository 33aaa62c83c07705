"""A terminal, and what it draws: facts, and tables that fit; piped output has the same text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 120
_WIDEST = 10_000  # no table has as many columns of letters
NAME_WIDTH = 10  # of the name before a fact
_ASCII_BARS = str.maketrans("█░", "#.")


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print without a cut at the right edge; a terminal wraps what is longer."""
        super().print(*objects, **{"crop": False, **options})

    def on_broken_pipe(self) -> None:
        """Raise, and so leave a closed pipe to the caller; rich would exit with code 1."""
        raise BrokenPipeError


class _FittingTable(Table):
    """A table that is a list of its rows where a console is narrower than its words.

    So nothing in it is cut, and a layout can be copied whole.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its rows one below the other."""
        least = self.__rich_measure__(console, options.update(max_width=_WIDEST)).minimum
        if least <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield _keep_whole(Text(str(self.title), style="bold"))
        names = [str(column.header).replace("\n", " ") for column in self.columns]
        indent = max(map(len, names))
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            yield Text("")
            for name, cell in zip(names, cells, strict=True):
                if str(cell):
                    yield _keep_whole(Text.assemble(f"{name:{indent}}  ", cell))
        yield Text("")


def _keep_whole(line: Text) -> Text:
    """Return a line that no console wraps or cuts; a terminal wraps it by itself."""
    line.no_wrap = True
    line.overflow = "ignore"
    return line


def make_console(stream: TextIO) -> Console:
    """Make a console on a stream: a terminal's own width and colours, else plain 120 columns."""
    width = None if stream.isatty() else PIPED_WIDTH
    return _Console(file=stream, width=width, highlight=False, markup=False)


def print_defaults(console: Console, defaults: Sequence[str]) -> None:
    """Print the values that nobody gave, and what was noted while reading, on one line."""
    if defaults:
        console.print(Text("; ".join(defaults)), soft_wrap=True)


def print_fact(console: Console, name: str, text: Text) -> None:
    """Print a text behind its name, wrapped beside it; nothing where there is no text."""
    for place, line in enumerate(text.wrap(console, console.width - NAME_WIDTH)):
        head = Text(f"{'' if place else name:{NAME_WIDTH - 1}} ")
        console.print(head.append_text(line), soft_wrap=True)


def make_table(*columns: str, text_columns: Iterable[str] = (), title: str = "") -> Table:
    """Make an empty table; the `text_columns` hold words and may wrap, the others numbers."""
    table = _FittingTable(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        if column in text_columns:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def spell(console: Console, text: str) -> str:
    """Return a text in letters that a console has: bars are of # where it has ASCII alone."""
    return text.translate(_ASCII_BARS) if console.options.ascii_only else text
