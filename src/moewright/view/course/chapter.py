"""Chapters: Markdown files with directives, read into blocks.

The Markdown is a part of CommonMark: paragraphs, `##` headings, lists, tables and fenced code. A
block that begins with ::: is a directive; it ends with ::: alone on a line. What is neither is
refused, so that a slip of the pen is no text of a page.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.view.course.inline import ComputedFigure, Span, read_figure, read_inline

DIRECTIVES = ("controls", "picture", "question", "exercise", "sandbox", "run")
_ORDER = ("route", "memory", "shards", "experts", "pipelines", "step", "imbalance", "walls")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlStep:
    """A value that a control may take, and the settings that it stands for."""

    label: str
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChapterControl:
    """What a reader may turn; the step of the chapter's own job is the first choice."""

    key: str
    label: str
    steps: tuple[ControlStep, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadingBlock:
    """A heading of the second or third level."""

    level: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParagraphBlock:
    """A paragraph."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListBlock:
    """Items, numbered or not."""

    is_numbered: bool
    items: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableBlock:
    """A table; `columns` are its head."""

    columns: tuple[tuple[Span, ...], ...]
    rows: tuple[tuple[tuple[Span, ...], ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeBlock:
    """Lines of a program or a terminal."""

    language: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FormulaBlock:
    """A formula on a line of its own."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlsBlock:
    """Where the controls of these keys stand."""

    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureBlock:
    """A picture by its name, with what to look at."""

    name: str
    caption: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionBlock:
    """A question whose answer is computed from the page's state.

    `answer` is a number; where there are `choices`, each a label and a figure, the largest is
    right. An exercise is a question about a table or a picture of a source.
    """

    is_exercise: bool
    prompt: tuple[Span, ...]
    answer: ComputedFigure | None
    choices: tuple[tuple[str, ComputedFigure], ...]
    hint: tuple[Span, ...]
    reason: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxBlock:
    """A link into the studio's page of that name, with the state of the chapter."""

    page: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBlock:
    """A command that does it for real, and what it printed."""

    command: str
    output: str


Block = (
    HeadingBlock
    | ParagraphBlock
    | ListBlock
    | TableBlock
    | CodeBlock
    | FormulaBlock
    | ControlsBlock
    | PictureBlock
    | QuestionBlock
    | SandboxBlock
    | RunBlock
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """A chapter: its job, what may be turned, and its blocks."""

    name: str
    title: str
    question: str  # that the chapter answers
    audience: str
    settings: Mapping[str, str]
    controls: tuple[ChapterControl, ...]
    blocks: tuple[Block, ...]

    def control(self, key: str) -> ChapterControl:
        """Return a control by its key.

        Raises:
            BadInput: there is none of the key.
        """
        for control in self.controls:
            if control.key == key:
                return control
        names = [control.key for control in self.controls]
        rule = f"{self.name} has the controls {', '.join(names)}"
        near = closest_match(key, names) or ""
        raise BadInput(Reason(field=key, rule=rule, nearest=near))


def list_chapters() -> tuple[str, ...]:
    """Return the names of all chapters in the order in which they are read."""
    folder = resources.files(__package__).joinpath("chapters")
    files = {item.name.removesuffix(".md") for item in folder.iterdir()}
    return tuple(name for name in _ORDER if name in files)


@cache
def load_chapter(name: str) -> Chapter:
    """Return a chapter of the course.

    Raises:
        BadInput: there is none of the name, or its text breaks a rule.
    """
    names = list_chapters()
    if name not in names:
        rule = f"the chapters are {', '.join(names)}"
        near = closest_match(name, names) or ""
        raise BadInput(Reason(field="chapter", value=name, rule=rule, nearest=near))
    file = resources.files(__package__).joinpath("chapters").joinpath(f"{name}.md")
    return read_chapter(name, file.read_text("utf-8"))


def read_chapter(name: str, text: str) -> Chapter:
    """Read the text of a chapter: TOML between lines of +++, then Markdown with directives.

    Raises:
        BadInput: a rule is broken; the reason has the line.
    """
    try:
        _, head, body = re.split(r"^\+\+\+$\n", text, maxsplit=2, flags=re.MULTILINE)
        facts: dict[str, Any] = tomllib.loads(head)
        chapter = Chapter(
            name=name,
            title=facts["title"],
            question=facts["question"],
            audience=facts["audience"],
            settings={key: str(value) for key, value in facts["settings"].items()},
            controls=tuple(map(_read_control, facts.get("control", ()))),
            blocks=tuple(_read_blocks(body.splitlines())),
        )
    except BadInput as error:
        raise BadInput(*(_in_chapter(name, reason) for reason in error.reasons)) from None
    except (ValueError, KeyError) as error:
        raise BadInput(Reason(field=f"chapter {name}", rule=f"head: {error!s}")) from error
    for block in chapter.blocks:
        if isinstance(block, ControlsBlock):
            for key in block.keys:
                chapter.control(key)
    return chapter


def _in_chapter(name: str, reason: Reason) -> Reason:
    return Reason(field=f"chapter {name}", value=reason.value, rule=reason.rule)


def _read_control(facts: Mapping[str, Any]) -> ChapterControl:
    key = facts["key"]
    steps = []
    for step in facts["steps"]:
        if isinstance(step, Mapping):
            settings = {name: str(value) for name, value in step.items() if name != "label"}
            steps.append(ControlStep(label=step["label"], settings=settings))
        else:
            label = f"{step:,}" if isinstance(step, int) else str(step)
            steps.append(ControlStep(label=label, settings={key: str(step)}))
    return ChapterControl(key=key, label=facts["label"], steps=tuple(steps))


def _read_blocks(lines: Sequence[str]) -> Iterator[Block]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
            continue
        if line.startswith(("```", ":::", "$$")):
            fence = line[:3] if line[0] != "$" else "$$"
            end = _find_end(lines, at, fence)
            yield _read_fenced(fence, line.removeprefix(fence).strip(), lines[at + 1 : end])
            at = end + 1
            continue
        end = at
        while end < len(lines) and lines[end].strip():
            end += 1
        yield _read_text(lines[at:end])
        at = end


def _find_end(lines: Sequence[str], start: int, fence: str) -> int:
    for at in range(start + 1, len(lines)):
        if lines[at].strip() == fence:
            return at
    raise BadInput(Reason(field="chapter", value=lines[start], rule=f"no {fence} ends this block"))


def _read_fenced(fence: str, head: str, body: Sequence[str]) -> Block:
    if fence == "```":
        return CodeBlock(language=head, text="\n".join(body))
    if fence == "$$":
        return FormulaBlock(text=" ".join(body))
    name, *words = head.split()
    text = "\n".join(body)
    match name:
        case "controls":
            return ControlsBlock(keys=tuple(words))
        case "picture":
            return PictureBlock(name=words[0], caption=read_inline(" ".join(body)))
        case "question" | "exercise":
            return _read_question(body, is_exercise=name == "exercise")
        case "sandbox":
            return SandboxBlock(page=next(iter(words), ""), spans=read_inline(" ".join(body)))
        case "run":
            command, _, output = text.partition("\n---\n")
            return RunBlock(command=command.strip(), output=output.strip("\n"))
    rule = f"there is no directive {name}"
    near = closest_match(name, DIRECTIVES) or DIRECTIVES[0]
    raise BadInput(Reason(field="chapter", value=head, rule=rule, nearest=near))


def _read_question(lines: Sequence[str], *, is_exercise: bool) -> QuestionBlock:
    """Read a question: its prompt, then `answer:`, `choice:`, `hint:` and `because:`."""
    parts: dict[str, list[str]] = {"prompt": [""]}
    key = "prompt"
    for line in lines:
        head = re.match(r"(answer|choice|hint|because):\s*", line)
        if head:
            key = head[1]
            parts.setdefault(key, []).append(line[head.end() :])
        elif line.strip():
            parts[key][-1] = f"{parts[key][-1]} {line.strip()}".strip()
    missing = [name for name in ("hint", "because") if name not in parts]
    if missing or ("answer" in parts) == ("choice" in parts):
        rule = "a question has hint:, because:, and answer: or some choice:"
        raise BadInput(Reason(field="chapter", value=parts["prompt"][0], rule=rule))
    choices = (text.partition("=") for text in parts.get("choice", ()))
    return QuestionBlock(
        is_exercise=is_exercise,
        prompt=read_inline(parts["prompt"][0]),
        answer=read_figure(parts["answer"][0]) if "answer" in parts else None,
        choices=tuple((label.strip(), read_figure(figure)) for label, _, figure in choices),
        hint=read_inline(parts["hint"][0]),
        reason=read_inline(parts["because"][0]),
    )


def _read_text(lines: Sequence[str]) -> Block:
    first = lines[0]
    if heading := re.fullmatch(r"(##+) (.+)", first):
        if len(lines) > 1 or len(heading[1]) > 3:
            rule = "a heading is one line of the second or third level"
            raise BadInput(Reason(field="chapter", value=first, rule=rule))
        read_inline(heading[2])
        return HeadingBlock(level=len(heading[1]), text=heading[2])
    if first.startswith("|"):
        rows = [_read_row(line) for line in lines if not re.fullmatch(r"[|:\- ]+", line)]
        return TableBlock(columns=rows[0], rows=tuple(rows[1:]))
    if item := re.match(r"(- |\d+\. )", first):
        is_numbered = item[1] != "- "
        texts: list[str] = []
        for line in lines:
            mark = re.match(r"(- |\d+\. )", line)
            if mark:
                texts.append(line[mark.end() :])
            else:
                texts[-1] = f"{texts[-1]} {line.strip()}"
        return ListBlock(is_numbered=is_numbered, items=tuple(map(read_inline, texts)))
    if first.startswith(("#", ">", "<", "    ")):
        rule = "is neither a paragraph, heading, list, table, code nor directive"
        raise BadInput(Reason(field="chapter", value=first, rule=rule))
    return ParagraphBlock(spans=read_inline(" ".join(map(str.strip, lines))))


def _read_row(line: str) -> tuple[tuple[Span, ...], ...]:
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return tuple(read_inline(cell.strip().replace("\\|", "|")) for cell in cells)
