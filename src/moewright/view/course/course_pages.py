"""Whole pages of the course: contents, a chapter's article, the glossary, a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from moewright.spec.errors import Reason
from moewright.spec.quoting import Html
from moewright.view.course.chapter import Chapter, list_chapters, load_chapter
from moewright.view.course.course_questions import write_questions
from moewright.view.course.glossary import load_glossary
from moewright.view.course.lesson import Lesson
from moewright.view.course.lesson_html import LessonWriter, ReadingPlace

# What the commands of chapters find on the disk.
PREPARATION = """moewright data build --out runs/quickstart_data
moewright bench machine --nproc 2 --out runs/machine.toml"""


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
        Html.concat(writer.write_blocks(), "\n"),
        _write_neighbours(number),
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
        sections.append(Html.write("<h2>{}</h2><dl>{}</dl>", section, items))
    return Html.write(
        '<article class="glossary"><h1>Glossary</h1>{}</article>', Html.concat(sections)
    )
