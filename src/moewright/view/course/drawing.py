"""Drawings: SVG that a page's styles colour, for screens and phones, and bars on one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moewright.spec.quoting import Html

WIDE = 680  # points of the column of a lesson
NARROW = 340  # points of a phone, less its margins
_Value = TypeVar("_Value")

_CHARACTER = 6.6  # units of a letter of 12.5, about


@dataclass(frozen=True, kw_only=True, slots=True)
class CoursePicture:
    """A picture in two widths, and the same as a table for those who do not see it.

    `says` is what the picture shows, in a sentence.
    """

    says: str
    wide: Html
    narrow: Html
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Drawing:
    """An SVG under way: shapes are put on it one after the other."""

    def __init__(self, width: float) -> None:
        self.width = width
        self._shapes: list[Html] = []
        self._height = 0.0

    @property
    def is_narrow(self) -> bool:
        """Whether it is drawn for a phone."""
        return self.width < WIDE

    def choose(self, *, narrow: _Value, wide: _Value) -> _Value:
        """Return what stands for a phone, or for a screen."""
        return narrow if self.is_narrow else wide

    def box(
        self,
        x: float,
        y: float,
        size: tuple[float, float],
        colour: str,
        *,
        hint: str = "",
        kind: str = "",
    ) -> None:
        """Put a rectangle; `colour` is one of the palette or "" for the class alone."""
        width, height = size
        fill = Html.mention(' fill="{}"', colour)
        title = Html.mention("<title>{}</title>", hint)
        self._add(
            Html.write(
                '<rect class="box {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'
                ' rx="2"{}>{}</rect>',
                *(kind, x, y, max(width, 0.0), height, fill, title),
            ),
            y + height,
        )

    def boxes(
        self,
        corners: Sequence[tuple[float, float]],
        size: tuple[float, float],
        colour: str,
        kind: str,
    ) -> None:
        """Put rectangles of one size and colour as one shape, so that many move at once."""
        width, height = size
        steps = "".join(
            f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z" for x, y in corners
        )
        self._add(
            Html.write('<path class="box {}" d="{}" fill="{}"/>', kind, steps, colour),
            max(y for _, y in corners) + height,
        )

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> None:
        """Put a line of text whose baseline is at y."""
        self._add(
            Html.write(
                '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>',
                *(kind, x, y, anchor, text),
            ),
            y + 5,
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str = "") -> None:
        """Put a straight line."""
        self._add(
            Html.write(
                '<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>',
                *(kind, *start, *end),
            ),
            max(start[1], end[1]),
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str, colour: str = "") -> None:
        """Put a broken line through points."""
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = Html.mention(' stroke="{}"', colour)
        self._add(
            Html.write('<polyline class="{}" points="{}"{}/>', kind, steps, stroke),
            max(y for _, y in points),
        )

    def keys(self, y: float, names: Sequence[tuple[str, str]]) -> float:
        """Put a key of colours, (colour, name) each, in as many lines as it takes; its end."""
        x = 0.0
        for colour, name in names:
            room = 22 + _CHARACTER * len(name)
            if x and x + room > self.width:
                x = 0.0
                y += 19
            self.box(x, y, (11, 11), colour)
            self.text(x + 16, y + 10, name, "quiet")
            x += room + 8
        return y + 19

    def finish(self, label: str) -> Html:
        """Return the drawing; `label` says what it shows to those who do not see it."""
        return Html.write(
            '<svg class="drawing {}" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">'
            "{}</svg>",
            self.choose(narrow="narrow", wide="wide"),
            self.width,
            self._height + 3,
            label,
            Html.concat(self._shapes),
        )

    def _add(self, shape: Html, bottom: float) -> None:
        self._shapes.append(shape)
        self._height = max(self._height, bottom)


def picture(
    says: str,
    draw: Callable[[Drawing], None],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> CoursePicture:
    """Return a picture that a function draws in both widths, with its table."""
    drawn = []
    for width in (WIDE, NARROW):
        drawing = Drawing(width)
        draw(drawing)
        drawn.append(drawing.finish(says))
    return CoursePicture(
        says=says,
        wide=drawn[0],
        narrow=drawn[1],
        columns=tuple(columns),
        rows=tuple(map(tuple, rows)),
    )


_ROW = 23  # points, for a line of text and a margin


@dataclass(frozen=True, kw_only=True, slots=True)
class BarPart:
    """A part of a bar: its amount, and its text where it is told."""

    name: str
    amount: float
    colour: str
    text: str = ""
    kind: str = ""  # class of the box


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedBar:
    """A bar of parts, with a name before it, a figure behind it and perhaps a title above it."""

    name: str
    parts: tuple[BarPart, ...]
    text: str
    kind: str = ""  # class of the figure's text
    title: str = ""

    @property
    def amount(self) -> float:
        """The sum of the parts."""
        return sum(part.amount for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class BarLimit:
    """A line across all bars, with its name."""

    amount: float
    name: str


def draw_bars(
    drawing: Drawing, y: float, bars: Sequence[StackedBar], limit: BarLimit | None = None
) -> float:
    """Draw bars under each other and return where they end.

    On a phone the name stands above its bar.
    """
    marked = limit.amount if limit else 0.0
    most = max(*(bar.amount for bar in bars), marked) or 1.0
    names = drawing.choose(narrow=0.0, wide=14 + 7.1 * max(len(bar.name) for bar in bars))
    figures = 12 + 7.4 * max(len(bar.text) for bar in bars)
    room = drawing.width - names - figures
    scale = room / most
    top = y
    if limit:
        y += 18
        anchor = "end" if limit.amount * scale > room / 2 else "start"
        drawing.text(names + limit.amount * scale, y - 5, limit.name, "quiet", anchor=anchor)
    for bar in bars:
        if bar.title:
            drawing.text(0, y + 15, bar.title, "strong")
            y += 21
        if drawing.is_narrow:
            drawing.text(0, y + 13, bar.name, "quiet")
            y += 18
        else:
            drawing.text(0, y + 14, bar.name, "quiet")
        x = names
        for part in bar.parts:
            width = part.amount * scale
            hint = f"{part.name}: {part.text}"
            drawing.box(x, y, (width, _ROW - 5), part.colour, hint=hint, kind=part.kind)
            x += width
        wall = names + marked * scale
        if x < wall < x + figures:  # text does not stand across the limit
            x = wall
        drawing.text(x + 6, y + 14, bar.text, bar.kind or "strong")
        y += _ROW
    if limit:
        x = names + limit.amount * scale
        drawing.line((x, top + 16), (x, y), "limit")
    return y
