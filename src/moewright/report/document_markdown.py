"""A document as Markdown, which shows all that it holds."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.report.document import (
    Document,
    DocumentSection,
    Face,
    ItemList,
    Line,
    Phrase,
    Table,
    list_runs,
)
from moewright.spec.quoting import Markdown

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
            return Markdown.write("**{}**", phrase.text)
        case Face.CODE:
            return Markdown.code(phrase.text)
        case Face.PLAIN | Face.BADGE:
            return Markdown.write("{}", phrase.text)
