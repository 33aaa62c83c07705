"""An answer as a tree of titles, lines, facts and tables, which every output draws.

A verb builds its answer once. A terminal (`document_text`), Markdown (`render_markdown`) and pages
(`view/assets/document.js`) draw the same tree, so that none of them can leave out, round or name a
figure as the others do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moewright.spec.quoting import Markdown
from moewright.spec.record import Record, Row, format_cell, list_columns


class Tone(StrEnum):
    """The tone of a figure: good news, bad news, doubtful ones, or none of them."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"
    PLAIN = "plain"

    @classmethod
    def judge(cls, *, holds: bool) -> Tone:
        """Return the tone of what holds, or does not."""
        return cls.GOOD if holds else cls.BAD

    def where(self, applies: bool) -> Tone:
        """Return the tone where it applies; elsewhere a figure is plain."""
        return self if applies else Tone.PLAIN


class Face(StrEnum):
    """How text is set."""

    PLAIN = "plain"
    STRONG = "strong"
    CODE = "code"  # layouts, paths, commands
    BADGE = "badge"  # a verdict, which pages put on a ground of its colour


@dataclass(frozen=True, kw_only=True, slots=True)
class Phrase:
    """Text with its tone and its face."""

    text: str
    tone: Tone = Tone.PLAIN
    face: Face = Face.PLAIN


Line = str | Phrase | tuple[str | Phrase, ...]


class Extent(StrEnum):
    """The shortest answer that has a part: a terminal's, that with -v, or a page."""

    SHORT = "short"
    LONG = "long"
    WHOLE = "whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """The cells of a row, one for each column; those that sum others up stand below a rule."""

    cells: tuple[Line, ...]
    extent: Extent = Extent.SHORT
    is_total: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of words, which wrap, or of numbers, which end at the right."""

    name: str
    has_words: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns, and rows with a cell for each of them.

    A short answer that leaves rows out shows `rest` in their place, where there is one.
    """

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    rest: TableRow | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemList:
    """Lines one below the other; a short answer shows the first `short` of them, 0: all."""

    items: tuple[Line, ...]
    is_numbered: bool = False
    short: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSection:
    """A title with lines, facts, a table, items, notes and further sections below it.

    They stand in this order. `brief` is said in place of the title where an answer is short. `tone`
    is that of the title.
    """

    title: Line = ""
    brief: str = ""
    tone: Tone = Tone.PLAIN
    lines: tuple[Line, ...] = ()
    facts: tuple[tuple[str, Line], ...] = ()
    table: Table | None = None
    items: ItemList | None = None
    notes: tuple[Line, ...] = ()
    sections: tuple[DocumentSection, ...] = ()
    extent: Extent = Extent.SHORT


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Document(Record):
    """An answer: what it is about, its heading, and its sections.

    `hint` says where the rest of a short answer is found.
    """

    heading: str
    sections: tuple[DocumentSection, ...]
    subject: str = ""
    hint: str = ""

    def title(self) -> str:
        """Return the heading."""
        return self.heading or self.subject

    def to_rows(self) -> list[Row]:
        """Return the rows of the first table."""
        tables = (section.table for section in self.sections if section.table is not None)
        return [
            {
                column.name: join_runs(cell)
                for column, cell in zip(table.columns, row.cells, strict=True)
            }
            for table in list(tables)[:1]
            for row in table.rows
        ]


def words(*names: str) -> Iterator[Column]:
    """Yield columns of words."""
    return (Column(name=name, has_words=True) for name in names)


def numbers(*names: str) -> Iterator[Column]:
    """Yield columns of numbers."""
    return (Column(name=name) for name in names)


def build_table(
    columns: Iterable[Column],
    rows: Iterable[Iterable[Line]],
    *,
    short: int | None = None,
    rest: Iterable[Line] = (),
    total: Iterable[Line] = (),
) -> Table:
    """Build a table, of which short answers show the first `short` rows; None: all of them.

    `rest` sums up the rows that they leave out, and `total` all rows.
    """
    kept = [TableRow(cells=tuple(cells)) for cells in rows]
    left_out = None
    if short is not None and len(kept) > short:
        kept[short:] = [replace(row, extent=Extent.LONG) for row in kept[short:]]
        if cells := tuple(rest):
            left_out = TableRow(cells=cells)
    if cells := tuple(total):
        kept.append(TableRow(cells=cells, is_total=True))
    return Table(columns=tuple(columns), rows=tuple(kept), rest=left_out)


def tabulate(rows: Sequence[Row]) -> Table:
    """Build a table of rows, with a column for every name that one of them has."""
    names = list_columns(rows)
    columns = [Column(name=name, has_words=_has_words(rows, name)) for name in names]
    return build_table(
        columns, ([format_cell(row.get(name, "")) for name in names] for row in rows)
    )


def _has_words(rows: Iterable[Row], name: str) -> bool:
    return any(isinstance(row.get(name), str) for row in rows)


def draw_bar(share: float, width: int) -> str:
    """Return a bar of `width` letters, a share of them full."""
    # A share can be above 1, as of memory that is too small.
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


def list_runs(line: Line) -> tuple[Phrase, ...]:
    """Return the phrases of a line."""
    runs = line if isinstance(line, tuple) else (line,)
    return tuple(Phrase(text=run) if isinstance(run, str) else run for run in runs)


def join_runs(line: Line) -> str:
    """Return a line as plain text."""
    return "".join(phrase.text for phrase in list_runs(line))


_HASH = Markdown.write("#")


def render_markdown(document: Document) -> Markdown:
    """Return headings, paragraphs and tables, with an empty line between them."""
    blocks = [Markdown.write("# {}", document.title())]
    if document.subject and document.heading:
        blocks.append(Markdown.write("{}", document.subject))
    for section in document.sections:
        blocks += _render_section(section, level=2)
    return Markdown.concat([Markdown.concat(blocks, "\n\n"), Markdown.write("")], "\n")


def _render_section(section: DocumentSection, *, level: int) -> Iterator[Markdown]:
    if section.title:
        yield Markdown.write("{} {}", Markdown.concat([_HASH] * level), _render_line(section.title))
    yield from _render_paragraph(section.lines)
    if section.facts:
        head = [Markdown.row(("what", "value")), Markdown.row(("--", "--"))]
        rows = (Markdown.row((name, _render_line(value))) for name, value in section.facts)
        yield Markdown.concat([*head, *rows], "\n")
    if section.table is not None and section.table.rows:
        yield _render_table(section.table)
    if section.items is not None:
        yield _render_items(section.items)
    yield from _render_paragraph(section.notes)
    for part in section.sections:
        yield from _render_section(part, level=level + 1)


def _render_paragraph(lines: tuple[Line, ...]) -> Iterator[Markdown]:
    if lines:
        yield Markdown.concat(map(_render_line, lines), "\n")


def _render_table(table: Table) -> Markdown:
    lines = [
        Markdown.row(column.name for column in table.columns),
        Markdown.row("--" for _ in table.columns),
        *(Markdown.row(map(_render_line, row.cells)) for row in table.rows),
    ]
    return Markdown.concat(lines, "\n")


def _render_items(items: ItemList) -> Markdown:
    marks = ("1. {}" if items.is_numbered else "- {}" for _ in items.items)
    return Markdown.concat(
        (
            Markdown.write(mark, _render_line(item))
            for mark, item in zip(marks, items.items, strict=True)
        ),
        "\n",
    )


def _render_line(line: Line) -> Markdown:
    return Markdown.concat(map(_render_phrase, list_runs(line)))


def _render_phrase(phrase: Phrase) -> Markdown:
    match phrase.face:
        case Face.STRONG:
            # Marks beside a space would open or close nothing.
            inner = phrase.text.strip()
            if not inner:
                return Markdown.write("{}", phrase.text)
            before, _, after = phrase.text.partition(inner)
            return Markdown.write("{}**{}**{}", before, inner, after)
        case Face.CODE:
            return Markdown.code(phrase.text)
        case Face.PLAIN | Face.BADGE:
            return Markdown.write("{}", phrase.text)
