"""The course as pages of the documentation: Markdown whose blocks are written as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moewright.spec.errors import BadInput, Reason
from moewright.spec.quoting import Html
from moewright.view.course.chapter import HeadingBlock, PictureBlock, list_chapters, load_chapter
from moewright.view.course.course_pages import PREPARATION
from moewright.view.course.course_questions import write_questions
from moewright.view.course.glossary import anchor_of_row
from moewright.view.course.lesson import open_lesson
from moewright.view.course.lesson_html import LessonWriter, ReadingPlace
from moewright.view.course.mathematics import write_mathematics

_FENCED = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_BLOCK_FORMULA = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"(?<![\w$\\])\$(?=[^\s$\d])([^$\n]+?)(?<=\S)\$(?![\w$])")
_PICTURE = re.compile(r"<!-- course: (\w+) (\w+) -->")
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
    """Return Markdown with pictures of chapters for comments like <!-- course: memory device -->.

    Links to the sources of chapters lead to their pages.

    Raises:
        BadInput: a chapter or a picture does not exist.
    """
    markdown = _PICTURE.sub(lambda match: _draw_for_page(match[1], match[2]), markdown)
    return _CHAPTER_LINK.sub(lambda match: f"(learn/{match[1]}.md{match[2] or ''})", markdown)


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
