"""A document on a terminal; output that is piped has the same text."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from moewright.report.console import NAME_WIDTH, keep_whole, make_table, print_fact, spell
from moewright.report.document import (
    Document,
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Line,
    Phrase,
    Table,
    Tone,
    join_runs,
    list_runs,
)

_COLOURS = {Tone.GOOD: "green", Tone.DOUBTFUL: "yellow", Tone.BAD: "red", Tone.PLAIN: ""}
_FACES = {Face.PLAIN: "", Face.STRONG: "bold", Face.CODE: "", Face.BADGE: ""}
# Of a short answer: most notes, and letters of each.
_MOST_NOTES = 3
_LONGEST_NOTE = 240
_SHORT = (Extent.SHORT,)
_LONG = (Extent.SHORT, Extent.LONG)


def print_document(console: Console, document: Document, *, verbose: bool = False) -> None:
    """Print an answer; a short one leaves details out, and says where they are."""
    for line in (document.subject, document.heading):
        if line:
            console.print(Text(line, style="bold"))
    print_sections(console, document.sections, verbose=verbose)
    if document.hint and not verbose:
        console.print(Text(document.hint))


def print_sections(
    console: Console, sections: Iterable[DocumentSection], *, verbose: bool = False
) -> None:
    """Print sections one below the other."""
    shown = _LONG if verbose else _SHORT
    for section in sections:
        if section.extent in shown:
            _print_section(console, section, shown)


def _print_section(console: Console, section: DocumentSection, shown: Collection[Extent]) -> None:
    is_short = shown == _SHORT
    if section.brief and is_short:
        console.print(Text(section.brief))
    elif section.title:
        title = _draw_line(console, section.title)
        title.style = f"bold {_COLOURS[section.tone]}".strip()
        console.print(title)
    for line in section.lines:
        console.print(_draw_line(console, line))
    for name, value in section.facts:
        _print_fact(console, name, value)
    if section.table is not None:
        _print_table(console, section.table, shown)
    if section.items is not None:
        _print_items(console, section.items, is_short=is_short)
    for note in section.notes[:_MOST_NOTES] if is_short else section.notes:
        text = join_runs(note)
        if is_short and len(text) > _LONGEST_NOTE:
            text = f"{text[:_LONGEST_NOTE]}..."
        console.print(Text(text))
    print_sections(console, section.sections, verbose=not is_short)


def _print_fact(console: Console, name: str, value: Line) -> None:
    """Print a value behind its name, wrapped beside it; what is code is whole, to be copied."""
    text = _draw_line(console, value)
    if isinstance(value, Phrase) and value.face is Face.CODE:
        text = Text(f"{name:{NAME_WIDTH - 1}} ").append_text(text)
        console.print(keep_whole(text))
    else:
        print_fact(console, name, text)


def _print_items(console: Console, items: ItemList, *, is_short: bool) -> None:
    shown = items.items[: items.short] if items.short and is_short else items.items
    for number, item in enumerate(shown, 1):
        mark = f"  {number}. " if items.is_numbered else "- "
        console.print(Text(mark).append_text(_draw_line(console, item)))


def _print_table(console: Console, table: Table, shown: Collection[Extent]) -> None:
    """Print the rows that this answer has, if any."""
    present = [row for row in table.rows if row.extent in shown]
    if not present:
        return
    rows = [row for row in present if not row.is_total]
    totals = [row for row in present if row.is_total]
    if table.rest is not None and Extent.LONG not in shown:
        rows.append(table.rest)
    drawn = make_table()
    for column in table.columns:
        if column.has_words:
            # A word that is longer than its column is broken, and not cut.
            drawn.add_column(column.name, overflow="fold")
        else:
            # A number in two lines would be read as two.
            drawn.add_column(column.name, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(*(_draw_line(console, cell) for cell in row.cells))
    for row in totals:
        drawn.add_section()
        drawn.add_row(*(_draw_line(console, cell) for cell in row.cells), style="bold")
    console.print(drawn)


def _draw_line(console: Console, line: Line) -> Text:
    text = Text()
    for phrase in list_runs(line):
        text.append_text(draw_phrase(replace(phrase, text=spell(console, phrase.text))))
    return text


def draw_phrase(phrase: Phrase) -> Text:
    """Return a phrase in the colour of its tone."""
    return Text(phrase.text, style=f"{_FACES[phrase.face]} {_COLOURS[phrase.tone]}".strip())
