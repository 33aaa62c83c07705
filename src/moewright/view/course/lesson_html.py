"""Lessons as HTML: live in the studio, still in the documentation and on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.quoting import Html
from moewright.spec.units import mention
from moewright.view.course import (
    grid_pictures,
    pipeline_pictures,
    route_pictures,
    step_pictures,
)
from moewright.view.course.chapter import (
    Block,
    ChapterControl,
    CodeBlock,
    ControlsBlock,
    FormulaBlock,
    HeadingBlock,
    ListBlock,
    ParagraphBlock,
    PictureBlock,
    QuestionBlock,
    RunBlock,
    SandboxBlock,
    TableBlock,
)
from moewright.view.course.drawing import CoursePicture
from moewright.view.course.figures import compute_figure
from moewright.view.course.glossary import find_term
from moewright.view.course.inline import (
    CodeText,
    ComputedFigure,
    Hyperlink,
    MathText,
    PlainText,
    Span,
    StyledText,
    TermLink,
)
from moewright.view.course.lesson import Lesson
from moewright.view.course.mathematics import write_mathematics

_STUDIO = "http://127.0.0.1:8765"
# What the commands of chapters find on the disk.
PREPARATION = """moewright data build --out runs/quickstart_data
moewright bench machine --nproc 2 --out runs/machine.toml"""


class ReadingPlace(StrEnum):
    """Where a lesson is read."""

    STUDIO = "studio"  # its controls move
    SITE = "site"  # as it was built, with links into a studio on the reader's machine


@dataclass(frozen=True, kw_only=True, slots=True)
class LessonWriter:
    """Writes the blocks of one lesson for one place."""

    lesson: Lesson
    place: ReadingPlace

    def write_blocks(self) -> list[Html]:
        """Return every block, in order; controls have none in a place where they do not move."""
        numbers = iter(range(1, len(self.lesson.chapter.blocks) + 1))
        return [self.write_block(block, next(numbers)) for block in self.lesson.chapter.blocks]

    def write_block(self, block: Block, number: int) -> Html:
        """Return one block; `number` tells its fields from those of others."""
        match block:
            case HeadingBlock():
                return write_heading(block)
            case ParagraphBlock():
                return Html.write("<p>{}</p>", self.write_spans(block.spans))
            case ListBlock():
                items = Html.concat(
                    Html.write("<li>{}</li>", self.write_spans(item)) for item in block.items
                )
                if block.is_numbered:
                    return Html.write("<ol>{}</ol>", items)
                return Html.write("<ul>{}</ul>", items)
            case TableBlock():
                return self._write_table(block)
            case CodeBlock():
                return Html.write('<pre tabindex="0"><code>{}</code></pre>', block.text)
            case FormulaBlock():
                formula = write_mathematics(block.text, is_block=True)
                return Html.write('<div class="formula" tabindex="0">{}</div>', formula)
            case ControlsBlock():
                return self._write_controls(block)
            case PictureBlock():
                return self._write_picture(block)
            case QuestionBlock():
                return self._write_question(block, number)
            case SandboxBlock():
                return self._write_sandbox(block)
            case RunBlock():
                return _write_run(block)

    def write_spans(self, spans: Iterable[Span]) -> Html:
        """Return spans in a line."""
        return Html.concat(map(self._write_span, spans))

    def _write_span(self, span: Span) -> Html:
        match span:
            case PlainText():
                return Html.write("{}", span.text)
            case CodeText():
                return Html.write("<code>{}</code>", span.text)
            case StyledText(tag="strong"):
                return Html.write("<strong>{}</strong>", self.write_spans(span.spans))
            case StyledText():
                return Html.write("<em>{}</em>", self.write_spans(span.spans))
            case Hyperlink():
                return Html.write('<a href="{}">{}</a>', span.target, self.write_spans(span.spans))
            case MathText():
                return write_mathematics(span.text)
            case TermLink():
                return self._write_term(span)
            case ComputedFigure():
                value = compute_figure(self.lesson, span)
                return Html.write(
                    '<span class="figure" data-live title="{}">{}</span>', span.expression, value
                )

    def _write_term(self, span: TermLink) -> Html:
        entry = find_term(span.term)
        page = "/learn/glossary" if self.place is ReadingPlace.STUDIO else "../../glossary/"
        return Html.write(
            '<a class="term" href="{}" title="{}">{}</a>',
            *(f"{page}#{entry.anchor}", entry.meaning, span.shown),
        )

    def _write_table(self, block: TableBlock) -> Html:
        head = Html.concat(
            Html.write('<th scope="col">{}</th>', self.write_spans(cell)) for cell in block.columns
        )
        rows = (
            Html.concat(Html.write("<td>{}</td>", self.write_spans(cell)) for cell in row)
            for row in block.rows
        )
        body = Html.concat(Html.write("<tr>{}</tr>", row) for row in rows)
        return Html.write(
            '<div class="scroll" tabindex="0"><table><thead><tr>{}</tr></thead>'
            "<tbody>{}</tbody></table></div>",
            head,
            body,
        )

    def _write_controls(self, block: ControlsBlock) -> Html:
        controls = [self.lesson.chapter.control(key) for key in block.keys]
        if self.place is ReadingPlace.SITE:
            now = Html.concat(
                (
                    Html.write(
                        "{} <b>{}</b>", control.label, self.lesson.chosen_step(control).label
                    )
                    for control in controls
                ),
                ", ",
            )
            return Html.write(
                '<p class="note">Drawn for: {}. <a href="{}">Turn them in your studio</a>.</p>',
                now,
                f"{_STUDIO}/learn/{self.lesson.chapter.name}",
            )
        return Html.write(
            '<div class="knobs panel" role="group" aria-label="what you may turn">{}</div>',
            Html.concat(map(self._write_control, controls)),
        )

    def _write_control(self, control: ChapterControl) -> Html:
        chosen = self.lesson.chosen_step(control)
        chips = Html.concat(
            Html.write(
                '<label class="knob"><input type="radio" name="{}" value="{}"{}>'
                "<span>{}</span></label>",
                control.key,
                step.label,
                Html.mention(" checked", step == chosen),
                step.label,
            )
            for step in control.steps
        )
        return Html.write(
            '<fieldset><legend>{}</legend><div class="chips">{}</div></fieldset>',
            control.label,
            chips,
        )

    def _write_picture(self, block: PictureBlock) -> Html:
        drawn = draw_picture(self.lesson, block.name)
        return write_figure(drawn, self.write_spans(block.caption))

    def _write_question(self, block: QuestionBlock, number: int) -> Html:
        title = "Exercise" if block.is_exercise else "Question"
        prompt = self.write_spans(block.prompt)
        hint = Html.write(
            "<details><summary>Hint</summary><p>{}</p></details>", self.write_spans(block.hint)
        )
        answer, unit, value = self._answer(block)
        reason = self.write_spans(block.reason)
        if self.place is ReadingPlace.SITE:
            return Html.write(
                '<div class="question panel"><h4>{}</h4><p>{}</p>{}'
                "<details><summary>Answer</summary><p><b>{}.</b> {}</p></details></div>",
                *(title, prompt, hint, answer, reason),
            )
        return Html.write(
            '<form class="question panel" data-live="question" data-answer="{}">'
            "<fieldset><legend><b>{}.</b> {}</legend>{}</fieldset>"
            '<div class="row"><button type="submit" class="primary">Check</button>{}</div>'
            '<p class="said" role="status"></p>'
            '<div class="because" hidden><p><b>{}.</b> {}</p></div></form>',
            *(value, title, prompt, _write_fields(block, number, unit), hint, answer, reason),
        )

    def _answer(self, block: QuestionBlock) -> tuple[str, str, str]:
        """Return the right answer as text, its unit, and what a field has to hold."""
        if block.answer is None:
            numbers = [
                (compute_figure(self.lesson, figure).number, label)
                for label, figure in block.choices
            ]
            label = max(numbers)[1]
            return label, "", label
        text = str(compute_figure(self.lesson, block.answer))
        number = text.rstrip("%").partition(" ")[0].replace(",", "")
        scale = number.lstrip("-0123456789.")
        unit = "%" if text.endswith("%") else text.partition(" ")[2] or scale
        return text, unit, number.removesuffix(scale)

    def _write_sandbox(self, block: SandboxBlock) -> Html:
        root = _STUDIO if self.place is ReadingPlace.SITE else ""
        return Html.write(
            '<p class="sandbox"><a class="button" data-live="link" href="{}">{}</a></p>',
            f"{root}/{block.page}?{self.lesson.address}",
            self.write_spans(block.spans),
        )


def write_heading(block: HeadingBlock) -> Html:
    """Return a heading with an anchor."""
    anchor = "-".join("".join(c if c.isalnum() else " " for c in block.text.lower()).split())
    if block.level == 2:
        return Html.write('<h2 id="{}">{}</h2>', anchor, block.text)
    return Html.write('<h3 id="{}">{}</h3>', anchor, block.text)


def _write_fields(block: QuestionBlock, number: int, unit: str) -> Html:
    if block.answer is not None:
        return Html.write(
            '<label class="answer">Your answer{} <input type="text" inputmode="decimal"'
            ' name="answer" autocomplete="off"></label>',
            mention(", in {}", unit),
        )
    return Html.concat(
        Html.write(
            '<label class="choice"><input type="radio" name="answer-{}" value="{}"> {}</label>',
            *(number, label, label),
        )
        for label, _ in block.choices
    )


def write_figure(drawn: CoursePicture, caption: Html) -> Html:
    """Return a picture in both widths, its sentence for those who do not see it, and its table."""
    return Html.write(
        '<figure class="picture panel"><div data-live="picture">{}{}</div>'
        '<p class="visually-hidden" role="status" data-live>{}</p>'
        "<figcaption>{}</figcaption>"
        '<details class="numbers table-box"><summary>The same as a table</summary>'
        "<div data-live>{}</div></details></figure>",
        drawn.wide,
        drawn.narrow,
        drawn.says,
        caption,
        _write_plain_table(drawn.columns, drawn.rows, drawn.says),
    )


def _write_plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Html:
    head = Html.concat(Html.write('<th scope="col">{}</th>', name) for name in columns)
    lines = (
        Html.concat(
            Html.write('<td data-label="{}">{}</td>', column, cell)
            for column, cell in zip(columns, row, strict=True)
        )
        for row in rows
    )
    body = Html.concat(Html.write("<tr>{}</tr>", line) for line in lines)
    return Html.write(
        '<table><caption class="visually-hidden">{}</caption>'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table>",
        *(caption, head, body),
    )


def _write_run(block: RunBlock) -> Html:
    before = Html.write("")
    if "moewright train" in block.command:
        before = Html.write(
            '<details class="before"><summary>Once, before the first chapter that trains</summary>'
            "<p>A corpus of small programs and the rates of this machine, in a clone of moewright "
            'that has its <code>engine</code> extra:</p><pre class="command" tabindex="0">'
            "<code>{}</code></pre></details>",
            PREPARATION,
        )
    output = Html.write("")
    if block.output:
        output = Html.write(
            '<p class="note">It printed, on two cores that others used too:</p>'
            '<pre class="output" tabindex="0">{}</pre>',
            block.output,
        )
    return Html.write(
        '<div class="run">{}<pre class="command" tabindex="0"><code>{}</code></pre>{}</div>',
        *(before, block.command, output),
    )


PICTURES: Mapping[str, Callable[[Lesson], CoursePicture]] = MappingProxyType(
    {
        "device": pipeline_pictures.draw_device,
        "kept": pipeline_pictures.draw_kept,
        "recompute": pipeline_pictures.draw_recompute,
        "dense_shards": grid_pictures.draw_dense_shards,
        "dense_groups": grid_pictures.draw_dense_groups,
        "expert_shards": grid_pictures.draw_expert_shards,
        "all_groups": grid_pictures.draw_all_groups,
        "timetable": pipeline_pictures.draw_timetable,
        "router": route_pictures.draw_router,
        "dispatch": route_pictures.draw_dispatch,
        "combine": route_pictures.draw_combine,
        "expert_loads": route_pictures.draw_expert_loads,
        "load_cost": route_pictures.draw_load_cost,
        "step": step_pictures.draw_step,
        "walls": step_pictures.draw_walls,
        "roofline": step_pictures.draw_roofline,
        "schedules": pipeline_pictures.draw_schedules,
    }
)


def draw_picture(lesson: Lesson, name: str) -> CoursePicture:
    """Return a picture of a lesson.

    Raises:
        BadInput: there is none of the name, or the job is not legal.
    """
    draw = PICTURES.get(name)
    if draw is None:
        near = closest_match(name, PICTURES) or ""
        field = f"chapter {lesson.chapter.name}"
        raise BadInput(Reason(field=field, value=name, rule="no such picture", nearest=near))
    return draw(lesson)
