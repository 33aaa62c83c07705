"""One tree of an answer, drawn on a terminal, as Markdown and as data for pages."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.diagnosis.priced_fixes import ALREADY_ON
from moewright.report.console import make_console
from moewright.report.document import (
    Document,
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Phrase,
    Table,
    TableRow,
    Tone,
    build_table,
    join_runs,
    numbers,
    render_markdown,
    tabulate,
    words,
)
from moewright.report.document_text import print_document, print_sections
from moewright.report.finding_sections import list_finding_sections
from moewright.spec.finding import Cause, Finding, Fix, Wall

# Each text is used once in a tree, so that a drawing says which of them it has.
EXTENTS = st.sampled_from(Extent)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    fresh = (f"w{number}." for number in count())

    def build_line() -> Phrase | str:
        tone, face = draw(st.sampled_from(Tone)), draw(st.sampled_from(Face))
        return draw(st.sampled_from((next(fresh), Phrase(text=next(fresh), tone=tone, face=face))))

    def build_section(depth: int) -> DocumentSection:
        rows = tuple(
            TableRow(
                cells=(build_line(), build_line()),
                extent=draw(EXTENTS),
                is_total=draw(st.booleans()),
            )
            for _ in range(draw(st.integers(0, 2)))
        )
        table = Table(columns=(*words(next(fresh)), *numbers(next(fresh))), rows=rows)
        parts = draw(st.integers(0, 1)) if depth else 0
        return DocumentSection(
            title=build_line(),
            lines=tuple(build_line() for _ in range(draw(st.integers(0, 1)))),
            facts=tuple((next(fresh), build_line()) for _ in range(draw(st.integers(0, 1)))),
            table=table if rows else None,
            items=ItemList(items=(build_line(),), is_numbered=draw(st.booleans())),
            notes=(build_line(),),
            sections=tuple(build_section(depth - 1) for _ in range(parts)),
            extent=draw(EXTENTS),
        )

    return Document(
        subject=next(fresh), heading=next(fresh), sections=(build_section(1), build_section(0))
    )


def list_texts(sections: tuple[DocumentSection, ...], shown: tuple[Extent, ...]) -> Iterator[str]:
    """Yield every text that an answer of these extents has."""
    for section in sections:
        if section.extent not in shown:
            continue
        yield from map(join_runs, (section.title, *section.lines, *section.notes))
        for name, value in section.facts:
            yield from (name, join_runs(value))
        if section.table is not None:
            rows = [row for row in section.table.rows if row.extent in shown]
            if rows:
                yield from (column.name for column in section.table.columns)
            yield from (join_runs(cell) for row in rows for cell in row.cells)
        if section.items is not None:
            yield from map(join_runs, section.items.items)
        yield from list_texts(section.sections, shown)


def print_text(document: Document, *, verbose: bool) -> str:
    out = io.StringIO()
    print_document(make_console(out), document, verbose=verbose)
    return out.getvalue()


@settings(max_examples=25, deadline=None)
@given(documents())
def test_every_drawing_has_the_texts_of_its_extent_and_no_others(document: Document) -> None:
    whole = set(list_texts(document.sections, tuple(Extent)))
    for text, extents in (
        (print_text(document, verbose=False), (Extent.SHORT,)),
        (print_text(document, verbose=True), (Extent.SHORT, Extent.LONG)),
        (render_markdown(document), tuple(Extent)),
        (json.dumps(document.to_dict()), tuple(Extent)),
    ):
        wanted = set(list_texts(document.sections, extents))
        for name in whole:
            assert text.count(name) == (name in wanted), (name, text)
        assert document.heading in text
        assert document.subject in text


def test_a_bar_or_a_backtick_in_code_ends_neither_cell_nor_code() -> None:
    layout = Phrase(text="layout='Et*3|t*3L'", face=Face.CODE)
    row = (layout, Phrase(text="a`b\\|c", face=Face.CODE))
    section = DocumentSection(table=build_table(words("a", "b"), [row]))
    *_, last = render_markdown(Document(heading="x", sections=(section,))).splitlines()
    assert last == "`layout='Et*3\\|t*3L'` | `` a`b\\|c ``"


def test_strong_text_is_strong_in_markdown_where_spaces_stand_at_its_ends() -> None:
    line = (Phrase(text=" over: ", face=Face.STRONG), "4 of 3")
    section = DocumentSection(lines=(line,))
    document = Document(subject="a", heading="b", sections=(section,))
    assert " **over:** 4 of 3" in render_markdown(document)


def test_a_short_answer_says_in_brief_what_it_leaves_out() -> None:
    table = build_table(words("name"), [["first"], ["second"]], short=1)
    section = DocumentSection(title="long title", brief="1 of 2", table=table)
    document = Document(heading="x", sections=(section,), hint="the rest: -v")
    short, long = (print_text(document, verbose=verbose) for verbose in (False, True))
    assert ("1 of 2" in short, "second" in short, "-v" in short) == (True, False, True)
    assert ("long title" in long, "second" in long, "-v" in long) == (True, True, False)


def test_rows_of_records_become_columns_of_words_and_numbers() -> None:
    table = tabulate([{"name": "a", "step, s": 0.123456}, {"name": "b", "peak": 12345678}])
    assert [(column.name, column.has_words) for column in table.columns] == [
        ("name", True),
        ("step, s", False),
        ("peak", False),
    ]
    assert table.rows[0].cells == ("a", "0.1235", "")
    assert table.rows[1].cells == ("b", "", "12,345,678")


def test_fixes_that_cannot_be_made_are_no_numbered_advice() -> None:
    finding = Finding(
        wall=Wall.COMPUTE,
        cause=Cause.EP,
        title="compute takes the step",
        share=0.9,
        evidence=("forward 1 s",),
        fixes=(
            Fix(text="a larger micro-batch", excluded="mbs=4 does not divide"),
            Fix(text="a wider ep", excluded=ALREADY_ON),
            Fix(text="fewer layers"),
        ),
    )
    sections = tuple(list_finding_sections([finding]))
    lines = print_lines(sections, verbose=True)
    assert [line for line in lines if line.lstrip().startswith("1.")] == ["  1. fewer layers"]
    assert not any(line.lstrip().startswith("2.") for line in lines)
    assert any("not here: a larger micro-batch (mbs=4" in line for line in lines)
    assert not any("not here" in line for line in print_lines(sections, verbose=False))


def print_lines(sections: Sequence[DocumentSection], *, verbose: bool) -> list[str]:
    stream = io.StringIO()
    print_sections(make_console(stream), sections, verbose=verbose)
    return stream.getvalue().splitlines()
