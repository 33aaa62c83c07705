"""Pages of the course: in the studio, and as Markdown of the documentation with HTML blocks."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.quoting import Html
from moewright.view.course.chapter import (
    Chapter,
    HeadingBlock,
    PictureBlock,
    list_chapters,
    load_chapter,
)
from moewright.view.course.glossary import anchor_of_row, load_glossary
from moewright.view.course.inline import Span, read_inline
from moewright.view.course.lesson import Lesson, open_lesson
from moewright.view.course.lesson_html import (
    PREPARATION,
    LessonWriter,
    ReadingPlace,
    write_figure,
)
from moewright.view.course.mathematics import write_mathematics
from moewright.view.course.page_pictures import PAGE_PICTURES, draw_table


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentQuestion:
    """A question as it is asked, the chapter that answers it, and the answer."""

    text: str
    chapter: str
    answer: tuple[Span, ...]


@cache
def load_questions() -> tuple[StudentQuestion, ...]:
    """Return the questions in their order.

    Raises:
        BadInput: an answer breaks a rule of chapters.
    """
    file = resources.files(__package__).joinpath("questions.toml")
    rows = tomllib.loads(file.read_text("utf-8"))["question"]
    return tuple(
        StudentQuestion(text=row["text"], chapter=row["chapter"], answer=read_inline(row["answer"]))
        for row in rows
    )


def write_questions(place: ReadingPlace) -> Html:
    """Return the questions with their answers, which are computed for each chapter's own job."""
    return Html.concat(_write_question(question, place) for question in load_questions())


def _write_question(question: StudentQuestion, place: ReadingPlace) -> Html:
    chapter = load_chapter(question.chapter)
    writer = LessonWriter(lesson=open_lesson(chapter, {}), place=place)
    root = "/learn/" if place is ReadingPlace.STUDIO else ""
    return Html.write(
        '<details class="asked"><summary>{}</summary><p>{} <a href="{}">{}</a></p></details>',
        *(question.text, writer.write_spans(question.answer)),
        *(f"{root}{chapter.name}", chapter.title),
    )


def write_article(lesson: Lesson) -> Html:
    """Return a chapter in its state, with ways to its neighbours."""
    chapter = lesson.chapter
    names = list_chapters()
    number = names.index(chapter.name) + 1
    writer = LessonWriter(lesson=lesson, place=ReadingPlace.STUDIO)
    return Html.write(
        '<article data-chapter="{}"><p class="quiet">Chapter {} of {}</p><h1>{}</h1>'
        '<p class="leading">{}</p><p class="note">{}</p>'
        '<p class="refused error" role="alert" hidden></p>{}{}</article>',
        *(chapter.name, number, len(names), chapter.title, chapter.question, chapter.audience),
        _write_parts(chapter, writer),
        _write_neighbours(number),
    )


def _write_parts(chapter: Chapter, writer: LessonWriter) -> Html:
    """Return the blocks of a chapter, each heading of the second level with what follows it.

    A part is what a phone folds where the page would be too long.
    """
    parts: list[list[Html]] = [[]]
    for block, written in zip(chapter.blocks, writer.write_blocks(), strict=True):
        if isinstance(block, HeadingBlock) and block.level == 2:
            parts.append([])
        parts[-1].append(written)
    introduction, *rest = (Html.concat(part, "\n") for part in parts)
    return Html.concat(
        (introduction, *(Html.write('<section class="part">{}</section>', part) for part in rest)),
        "\n",
    )


def _write_neighbours(number: int) -> Html:
    names = list_chapters()
    links = []
    if number > 1:
        links.append(_link_chapter(load_chapter(names[number - 2]), "Before: "))
    links.append(Html.write('<a href="/learn">All chapters</a>'))
    if number < len(names):
        links.append(_link_chapter(load_chapter(names[number]), "Next: "))
    return Html.write(
        '<nav class="neighbours no-print" aria-label="chapters">{}</nav>', Html.concat(links, " ")
    )


def _link_chapter(chapter: Chapter, direction: str) -> Html:
    return Html.write('<a href="/learn/{}">{}{}</a>', chapter.name, direction, chapter.title)


def write_contents() -> Html:
    """Return the list of chapters, each with the question that it answers."""
    items = Html.concat(
        Html.write(
            '<li class="panel"><h2><a href="/learn/{}">{}</a></h2><p>{}</p>'
            '<p class="note">{}</p></li>',
            *(chapter.name, chapter.title, chapter.question, chapter.audience),
        )
        for chapter in map(load_chapter, list_chapters())
    )
    return Html.write(
        "<article><h1>Learn how Mixture-of-Experts models are trained</h1>"
        '<p class="leading">Five minutes a chapter, in this order or in your own. Every number and '
        "every picture is the planner's own answer to the job that you set; so are the answers to "
        "the questions.</p>"
        '<ol class="contents">{}</ol>'
        "<p>Chapters end with a command that does the same for real on two cores. Those that train "
        "need a corpus and the rates of this machine, once:</p>"
        '<pre class="command" tabindex="0"><code>{}</code></pre>'
        "<h2>Ten questions that students ask</h2>{}"
        '<p><a href="/learn/glossary">Glossary</a>: every word of the field that the program uses.'
        "</p></article>",
        items,
        PREPARATION,
        write_questions(ReadingPlace.STUDIO),
    )


def write_refusal(reasons: Sequence[Reason]) -> Html:
    """Return why there is no page or no such state."""
    lines = Html.concat(Html.write("<p>{}</p>", str(reason)) for reason in reasons)
    return Html.write(
        '<article class="refusal"><h1>This is not in the course</h1>{}'
        '<p><a href="/learn">All chapters</a></p></article>',
        lines,
    )


def write_glossary() -> Html:
    """Return the glossary, a list of words for each section."""
    sections = []
    for section, entries in groupby(load_glossary(), key=lambda entry: entry.section):
        items = Html.concat(
            Html.write(
                '<dt id="{}">{}</dt><dd>{}{}</dd>',
                *(entry.anchor, ", ".join(entry.words), entry.meaning),
                Html.write(' <span class="quiet">{}</span>', entry.source),
            )
            for entry in entries
        )
        sections.append(
            Html.write('<section class="part"><h2>{}</h2><dl>{}</dl></section>', section, items)
        )
    return Html.write(
        '<article class="glossary"><h1>Glossary</h1>'
        '<label class="no-print">Find a word <input type="search" id="find-word"'
        ' autocomplete="off"></label>'
        '<p class="quiet" role="status" id="words-found"></p>{}</article>',
        Html.concat(sections),
    )


_FENCED = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_BLOCK_FORMULA = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"(?<![\w$\\])\$(?=[^\s$])([^$\n]+?)(?<=\S)\$(?![\w$])")
_PICTURE = re.compile(r"<!-- course: (\w+) (\w+) -->")
_PAGE_PICTURE = re.compile(r"<!-- picture: (\w+): (.+) -->")
_BARS = re.compile(
    r"(?P<table>(?:^\|.*\|\n)+)\n<!-- bars: (?P<amount>.+) by (?P<name>.+) in (?P<group>.+) -->",
    re.MULTILINE,
)
_CHAPTER_LINK = re.compile(r"\(\.\./src/moewright/view/course/chapters/(\w+)\.md(#[^)]*)?\)")


def list_site_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of every page of the course.

    Raises:
        BadInput: a chapter breaks a rule; the build fails with it.
    """
    yield "learn/index.md", _write_contents()
    for name in list_chapters():
        yield f"learn/{name}.md", write_site_chapter(name)


def write_site_chapter(name: str) -> str:
    """Return a chapter as it is drawn for its own job."""
    chapter = load_chapter(name)
    writer = LessonWriter(lesson=open_lesson(chapter, {}), place=ReadingPlace.SITE)
    parts = [
        f"# {chapter.title}",
        _one_block(Html.write('<p class="leading">{}</p>', chapter.question)),
        _one_block(Html.write('<p class="note">{}</p>', chapter.audience)),
    ]
    for block, written in zip(chapter.blocks, writer.write_blocks(), strict=True):
        if isinstance(block, HeadingBlock):
            parts.append(f"{'#' * block.level} {block.text}")
        else:
            parts.append(_one_block(written))
    return "\n\n".join(parts) + "\n"


def _one_block(html: Html) -> str:
    """Return HTML that Markdown takes as one block: without empty lines."""
    return re.sub(r"\n(?=\n)", "\n&#8203;", f"<div>{html}</div>")


def _write_contents() -> str:
    lines = [
        "# Learn how Mixture-of-Experts models are trained\n",
        "Five minutes a chapter, in this order or in your own. Every number and every picture is "
        "the planner's own answer to the job of the chapter, computed when this site was built. "
        "`moewright studio` has the same chapters live, under Learn: there the controls move, and "
        "the numbers and questions with them.\n",
        "| chapter | answers | for whom |",
        "|---|---|---|",
    ]
    for name in list_chapters():
        chapter = load_chapter(name)
        lines.append(f"| [{chapter.title}]({name}.md) | {chapter.question} | {chapter.audience} |")
    lines.append(
        "\nChapters end with a command that does the same for real on two cores. Those that"
    )
    lines.append("train need a corpus and the rates of this machine, once:\n")
    lines += [f"    {line}" for line in PREPARATION.splitlines()]
    lines.append("\n## Ten questions that students ask\n")
    lines.append(f"<div>{write_questions(ReadingPlace.SITE)}</div>")
    return "\n".join(lines) + "\n"


def replace_mathematics(markdown: str) -> str:
    """Return Markdown with the formulas between dollars, code aside, as MathML.

    Raises:
        BadInput: a formula cannot be read.
    """
    parts = _FENCED.split(markdown)
    parts[::2] = map(_replace_formulas, parts[::2])
    return "".join(parts)


def _replace_formulas(text: str) -> str:
    text = _BLOCK_FORMULA.sub(
        lambda match: f'<div class="formula">{write_mathematics(match[1], is_block=True)}</div>',
        text,
    )
    return _FORMULA.sub(lambda match: str(write_mathematics(match[1])), text)


def replace_pictures(markdown: str) -> str:
    """Return Markdown with pictures for comments.

    <!-- course: memory device --> is a picture of a chapter, <!-- picture: mixers: caption --> one
    of pages alone, and <!-- bars: amount by name in group --> draws columns of the table before it.
    Links to the sources of chapters lead to their pages.

    Raises:
        BadInput: a chapter, a picture or a column does not exist.
    """
    markdown = _PAGE_PICTURE.sub(lambda match: _draw_page_picture(match[1], match[2]), markdown)
    markdown = _BARS.sub(_draw_bars_of_table, markdown)
    markdown = _PICTURE.sub(lambda match: _draw_for_page(match[1], match[2]), markdown)
    return _CHAPTER_LINK.sub(lambda match: f"(learn/{match[1]}.md{match[2] or ''})", markdown)


def _draw_page_picture(name: str, caption: str) -> str:
    draw = PAGE_PICTURES.get(name)
    if draw is None:
        near = closest_match(name, PAGE_PICTURES) or ""
        raise BadInput(Reason(field="picture", value=name, rule="no such picture", nearest=near))
    return _one_block(write_figure(draw(), Html.write("{}", caption)))


def _draw_bars_of_table(match: re.Match[str]) -> str:
    drawn = draw_table(match["table"].splitlines(), match["amount"], match["name"], match["group"])
    caption = f"The column {match['amount']} of the table above."
    return f"{match['table']}\n{_one_block(write_figure(drawn, Html.write('{}', caption)))}"


def _draw_for_page(name: str, picture: str) -> str:
    chapter = load_chapter(name)
    writer = LessonWriter(lesson=open_lesson(chapter, {}), place=ReadingPlace.SITE)
    for place, block in enumerate(chapter.blocks):
        if isinstance(block, PictureBlock) and block.name == picture:
            return _one_block(writer.write_block(block, place))
    raise BadInput(
        Reason(field="course", value=f"{name} {picture}", rule="the chapter has no such picture")
    )


def add_anchors(glossary: str) -> str:
    """Return the page of the glossary with the anchor of every word before it."""
    return re.sub(
        r"^\| (?!word |class |`)(?P<words>[^|]+) \|",
        lambda row: f'| <a id="{_anchor(row["words"])}"></a>{row["words"]} |',
        glossary,
        flags=re.MULTILINE,
    )


def _anchor(words: str) -> str:
    plain = re.sub(r"<a id=\"[^\"]*\"></a>|\*\*|`", "", words)
    return anchor_of_row(plain.partition(",")[0])
