"""Ten questions that students ask, each answered from one chapter with its figures."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from moewright.spec.quoting import Html
from moewright.view.course.chapter import load_chapter
from moewright.view.course.inline import Span, read_inline
from moewright.view.course.lesson import open_lesson
from moewright.view.course.lesson_html import LessonWriter, ReadingPlace


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
