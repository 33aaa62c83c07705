"""The inline text of chapters: plain text, code, links, mathematics, terms and computed figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from moewright.spec.errors import BadInput, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainText:
    """Text as it stands."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeText:
    """Text of a program, in backticks."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StyledText:
    """Spans under **strong** or *emphasis*; `tag` is that of HTML."""

    tag: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperlink:
    """Spans that lead somewhere; their digits are those of the source that they cite."""

    target: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MathText:
    """A formula in LaTeX, between dollars."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TermLink:
    """A word of the glossary: [[term]] or [[term|as the sentence needs it]]."""

    term: str
    shown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedFigure:
    """A number that the rules compute: {{expression}}, or {{expression : unit}}."""

    expression: str
    unit: str


Span = PlainText | CodeText | StyledText | Hyperlink | MathText | TermLink | ComputedFigure

_TOKEN = re.compile(
    r"`(?P<code>[^`]+)`"
    r"|\{\{(?P<figure>.+?)\}\}"
    r"|\[\[(?P<term>[^\]]+)\]\]"
    r"|\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)"
    r"|\$(?P<math>[^$]+)\$"
    r"|\*\*(?P<strong>.+?)\*\*"
    r"|\*(?P<emphasis>[^*]+)\*"
)
# A number that stands alone, with a sign, a unit or a bracket beside it; digits of names such as
# 1F1B, ZeRO-1 or bf16 are none.
_NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d[\d,.]*(?:\s?%|\b)(?![\w-])")
_MARKS = re.compile(r"\{\{|\}\}|\[\[|\]\]|\*\*|`|\$")


def read_inline(text: str) -> tuple[Span, ...]:
    """Return the spans of a line of text.

    Raises:
        BadInput: a mark opens and does not close, or a number stands in plain text.
    """
    return tuple(_read_spans(text, may_count=False))


def read_figure(text: str) -> ComputedFigure:
    """Return the figure that the text between {{ and }} asks for."""
    expression, _, unit = text.partition(":")
    return ComputedFigure(expression=expression.strip(), unit=unit.strip())


def _read_spans(text: str, *, may_count: bool) -> Iterator[Span]:
    end = 0
    for token in _TOKEN.finditer(text):
        yield from _read_plain(text[end : token.start()], may_count=may_count)
        end = token.end()
        kind, body = token.lastgroup, token[token.lastgroup or 0]
        match kind:
            case "code":
                yield CodeText(text=body)
            case "figure":
                yield read_figure(body)
            case "term":
                term, _, shown = body.partition("|")
                yield TermLink(term=term.strip(), shown=(shown or term).strip())
            case "target":
                spans = tuple(_read_spans(token["link"], may_count=True))
                yield Hyperlink(target=body, spans=spans)
            case "math":
                yield MathText(text=body)
            case _:
                tag = "strong" if kind == "strong" else "em"
                yield StyledText(tag=tag, spans=tuple(_read_spans(body, may_count=may_count)))
    yield from _read_plain(text[end:], may_count=may_count)


def _read_plain(text: str, *, may_count: bool) -> Iterator[Span]:
    if not text:
        return
    if mark := _MARKS.search(text):
        rule = f"{mark[0]} opens or closes nothing"
        raise BadInput(Reason(field="chapter", value=text.strip(), rule=rule))
    if not may_count and (number := _NUMBER.search(text)):
        rule = f"{number[0].strip()} is written, not computed: use {{{{...}}}}, or cite its source"
        raise BadInput(Reason(field="chapter", value=text.strip(), rule=rule))
    yield PlainText(text=text)
