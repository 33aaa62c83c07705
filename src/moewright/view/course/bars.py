"""Bars: amounts under each other, and stacks of parts, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moewright.view.course.drawing import Drawing

_ROW = 23


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
    """A bar of parts, with a name before it and a figure behind it."""

    name: str
    parts: tuple[BarPart, ...]
    text: str
    kind: str = ""  # class of the figure's text

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
    most = max([bar.amount for bar in bars] + [limit.amount if limit else 0.0]) or 1.0
    names = 0 if drawing.is_narrow else 14 + 7.1 * max(len(bar.name) for bar in bars)
    figures = 12 + 7.4 * max(len(bar.text) for bar in bars)
    room = drawing.width - names - figures
    scale = room / most
    top = y
    if limit:
        y += 18
        anchor = "end" if limit.amount * scale > room / 2 else "start"
        drawing.text(names + limit.amount * scale, y - 5, limit.name, "quiet", anchor=anchor)
    for bar in bars:
        if drawing.is_narrow:
            drawing.text(0, y + 13, bar.name, "quiet")
            y += 18
        else:
            drawing.text(0, y + 14, bar.name, "quiet")
        x = float(names)
        for part in bar.parts:
            width = part.amount * scale
            hint = f"{part.name}: {part.text}"
            drawing.box(x, y, (width, _ROW - 5), part.colour, hint=hint, kind=part.kind)
            x += width
        wall = names + limit.amount * scale if limit else 0.0
        if x < wall < x + figures:  # text does not stand across the limit
            x = wall
        drawing.text(x + 6, y + 14, bar.text, bar.kind or "strong")
        y += _ROW
    if limit:
        x = names + limit.amount * scale
        drawing.line((x, top + 16), (x, y), "limit")
    return y
