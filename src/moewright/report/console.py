"""A terminal, and what it draws: facts, and tables that fit; piped output has the same text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from moewright.spec.units import plural

PIPED_WIDTH = 120  # a file has no width; tables wrap beyond it
_WIDEST = 10_000  # no table has as many columns of letters
_APART = (0, 1)  # spaces above and beside a cell
_CLOSE = (0, 1, 0, 0)
_SCREEN_LINES = 40  # of a short answer: what a tall terminal shows without scrolling
NAME_WIDTH = 10  # of the name before a fact
_INDENT = re.compile(r" *(?:- |\d+\. |[a-z]+ {2,})?")
_WORD = re.compile(r"\S+")
_ASCII_BARS = str.maketrans("█░■□", "#.#o")


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print without a cut: a terminal's lines end between words, and piped ones are whole."""
        lines = [self._break(item) if isinstance(item, str | Text) else item for item in objects]
        is_prose = all(isinstance(line, Text) for line in lines)
        super().print(*lines, **{"crop": False, "soft_wrap": is_prose, **options})

    def _break(self, prose: str | Text) -> Text:
        """Return prose in lines that fit a terminal; as it is where it is kept whole."""
        text = Text(prose) if isinstance(prose, str) else prose
        if text.no_wrap or not self.is_terminal:
            return text
        lines = text.split(allow_blank=True)
        return Text("\n").join(part for line in lines for part in wrap_words(line, self.width))

    def on_broken_pipe(self) -> None:
        """Raise, and so leave a closed pipe to the caller; rich would exit with code 1."""
        raise BrokenPipeError


class _FittingTable(Table):
    """A table whose columns move together, or else become words, where a console is narrow.

    So nothing in it is cut, and a layout can be copied whole.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or for each row its first cell and what the columns say of it."""
        for padding in (_APART, _CLOSE):
            self.padding = padding
            least = self.__rich_measure__(console, options.update(max_width=_WIDEST)).minimum
            if least <= options.max_width:
                parts = iter(super().__rich_console__(console, options))
                edge = next(parts, None)
                # The upper edge of the box is a line of spaces, which the header needs not.
                if isinstance(edge, Segment) and not edge.text.strip():
                    next(parts, None)
                elif edge is not None:
                    yield edge
                yield from parts
                return
        if self.title:
            yield keep_whole(Text(str(self.title), style="bold"))
        names = [str(column.header).replace("\n", " ") for column in self.columns]
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        if names[0]:
            yield keep_whole(Text(names[0], style="bold"))
        indent = min(max(len(str(row[0])) for row in rows), options.max_width // 3) + 2
        for first, *cells in rows:
            facts = [
                Text.assemble(f"{name} ", cell)
                for name, cell in zip(names[1:], cells, strict=True)
                if str(cell)
            ]
            head = Text.assemble(first)
            lines = _fill(facts, options.max_width - indent)
            if len(head) < indent and lines:
                head.append(" " * (indent - len(head))).append_text(lines.pop(0))
            yield keep_whole(head)
            for line in lines:
                yield keep_whole(Text(" " * indent).append_text(line))
        yield Text("")


def _fill(facts: Iterable[Text], width: int) -> list[Text]:
    """Join facts by commas to lines of at most a width; one that is longer has its own lines."""
    lines: list[Text] = []
    for fact in facts:
        if lines and lines[-1].cell_len + fact.cell_len + 3 <= width:
            lines[-1].append(", ").append_text(fact)
            continue
        if lines:
            lines[-1].append(",")
        lines.extend(wrap_words(fact, width - 1))
    return lines


def wrap_words(line: Text, width: int) -> list[Text]:
    """Return a line in parts of at most a width, broken between words alone.

    So a word that is longer than that is still copied whole. What follows stands below the first
    word, behind the spaces, dash, number or name (with two spaces) that the line begins with.
    """
    head = _INDENT.match(line.plain)
    assert head is not None  # it may be empty
    indent = head.end()
    starts: list[int] = []
    room = width
    for word in _WORD.finditer(line.plain, indent):
        begin = starts[-1] if starts else 0
        if word.start() > max(begin, indent) and cell_len(line.plain[begin : word.end()]) > room:
            starts.append(word.start())
            room = max(1, width - indent)
    first, *rest = line.divide(starts)
    parts = [first, *(Text(" " * indent).append_text(part) for part in rest)]
    for part in parts:
        part.rstrip()
    return parts


def keep_whole(line: Text) -> Text:
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
        console.print(Text("; ".join(defaults)))


def print_on_a_screen(
    console: Console, reasons: Sequence[str], draw: Callable[[Sequence[str]], None]
) -> None:
    """Print what `draw` prints, with as many of its reasons as a screen has room for."""
    for kept in range(len(reasons), -1, -1):
        shown = list(reasons[:kept])
        if kept < len(reasons):
            shown.append(f"{plural(len(reasons) - kept, 'reason')} more with -v")
        with console.capture() as drawn:
            draw(shown)
        lines = Text.from_ansi(drawn.get()).plain.splitlines()
        if sum(max(1, -(-len(line) // console.width)) for line in lines) <= _SCREEN_LINES:
            break
    console.file.write(drawn.get())


def print_fact(console: Console, name: str, text: Text) -> None:
    """Print a text behind its name, wrapped beside it; nothing where there is no text."""
    for place, line in enumerate(wrap_words(text, console.width - NAME_WIDTH)):
        head = Text(f"{'' if place else name:{NAME_WIDTH - 1}} ")
        console.print(head.append_text(line))


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
    """Return a text in letters that a console has: bars and squares are of # in ASCII alone."""
    return text.translate(_ASCII_BARS) if console.options.ascii_only else text
