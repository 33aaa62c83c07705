"""Geometry of the report's charts: ranges, ticks, thinned curves, bars and heat levels. Templates
draw them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log2, log10

Point = tuple[float, float]
MAX_CURVE_POINTS = 2000  # of one curve
PLOT_UNITS = 1000  # drawing units of a plot's width and height; the page stretches them
HEAT_LEVELS = 6  # on either side of an even load
HEAT_LEVELS_PER_OCTAVE = (
    6  # levels a factor of two takes, so that the last ones stand for 2 x and more, 1/2 x and less
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    at: float  # percent of the axis
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartAxis:
    low: float
    high: float
    ticks: tuple[Tick, ...]
    label: str  # with its unit

    def to_percent(self, value: float) -> float:
        return 100 * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotCurve:
    """`path` is an SVG path in the BOX; `dots` draws the points themselves as well."""

    label: str
    colour: str
    path: str
    dots: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLine:
    """A line across the plot at `at` percent, with its text."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    x: ChartAxis
    y: ChartAxis
    curves: tuple[PlotCurve, ...]
    levels: tuple[ReferenceLine, ...] = ()  # horizontal, percent of y
    marks: tuple[ReferenceLine, ...] = ()  # vertical, percent of x


@dataclass(frozen=True, kw_only=True, slots=True)
class BarSegment:
    label: str
    text: str  # the value with its unit
    percent: float  # of the axis
    share: float  # of the bar, 0..1
    colour: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    label: str
    text: str
    percent: float  # of the axis
    segments: tuple[BarSegment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatCell:
    level: str  # style class
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatRow:
    label: str
    cells: tuple[HeatCell, ...]
    summary: str


PALETTE = (
    "#3f6fa6",
    "#e0914a",
    "#5a9e74",
    "#c4605c",
    "#8873b0",
    "#c0a545",
    "#57a3b0",
    "#c583a2",
    "#96705a",
    "#8b9098",
    "#9db565",
    "#34506b",
    "#d9b68c",
    "#6d7f5c",
)


def pick_colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def ramp_colour(fraction: float) -> str:
    """A colour from blue-grey (0) over teal to orange (1), for an ordered family of curves."""
    stops = ((52, 80, 107), (87, 163, 140), (214, 122, 52))
    place = min(max(fraction, 0.0), 1.0) * (len(stops) - 1)
    left = min(int(place), len(stops) - 2)
    mixed = (
        round(a + (b - a) * (place - left))
        for a, b in zip(stops[left], stops[left + 1], strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def build_axis(
    values: Iterable[float],
    label: str,
    *,
    from_zero: bool = False,
    integer_ticks: bool = False,
    ticks: int = 5,
) -> ChartAxis:
    """An axis that covers the values, widened to round ticks (not widened when `whole`: steps keep
    their range)."""
    finite = [value for value in values if isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / ticks
    scale = 10.0 ** floor(log10(raw))
    step = next(scale * nice for nice in (1, 2, 2.5, 5, 10) if scale * nice >= raw * 0.999)
    if integer_ticks:
        step = max(1.0, float(ceil(step)))
    else:
        low, high = floor(low / step + 1e-9) * step, ceil(high / step - 1e-9) * step
    places = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    at = [place * step for place in range(places[0], places[1] + 1)]
    places_after_point = max(0, -floor(log10(step) + 1e-9) + (1 if f"{step:e}"[:3] == "2.5" else 0))
    marks = tuple(
        Tick(at=100 * (value - low) / (high - low), text=f"{value:,.{places_after_point}f}")
        for value in at
    )
    return ChartAxis(low=low, high=high, ticks=marks, label=label)


def thin_points(points: Sequence[Point], limit: int = MAX_CURVE_POINTS) -> tuple[Point, ...]:
    """At most `limit` points: of each run of neighbours the lowest and the highest, so that spikes
    stay visible."""
    if len(points) <= limit:
        return tuple(points)
    bins = limit // 2
    edges = [len(points) * place // bins for place in range(bins + 1)]
    kept: list[Point] = []
    for start, stop in pairwise(edges):
        part = points[start:stop]
        pair = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept.extend(sorted(pair))
    return tuple(kept)


def build_curve(
    label: str,
    colour: str,
    points: Iterable[Point],
    x: ChartAxis,
    y: ChartAxis,
    *,
    dots: bool = False,
    limit: int = MAX_CURVE_POINTS,
) -> PlotCurve:
    """Non-finite points are left out; the reader is told of them elsewhere."""
    finite = [point for point in points if isfinite(point[1])]
    spots = [
        f"{x.to_percent(px) / 100 * PLOT_UNITS:.4g} {PLOT_UNITS - y.to_percent(py) / 100 * PLOT_UNITS:.4g}"
        for px, py in thin_points(finite, limit)
    ]
    path = "M" + "L".join(spots) if spots else ""
    return PlotCurve(
        label=label,
        colour=colour,
        path=path,
        dots="".join(f"M{spot}h0" for spot in spots) if dots else "",
    )


def build_bar(
    label: str, parts: Sequence[tuple[str, float, str, str]], text: str, longest: float
) -> Bar:
    """One stacked bar of (label, value, shown value, colour) on an axis that ends at `longest`."""
    whole = sum(value for _, value, _, _ in parts)
    segments = tuple(
        BarSegment(
            label=name, text=shown, percent=100 * value / longest, share=value / whole, colour=hue
        )
        for name, value, shown, hue in parts
        if value > 0
    )
    return Bar(
        label=label, text=text, percent=100 * whole / longest if longest else 0.0, segments=segments
    )


def heat_level(load: float) -> str:
    """Style class of a normalised load: d0 no tokens, l6..l1 below the mean, m0 even, h1..h6
    above."""
    if load <= 0:
        return "d0"
    level = max(-HEAT_LEVELS, min(HEAT_LEVELS, round(log2(load) * HEAT_LEVELS_PER_OCTAVE)))
    return f"h{level}" if level > 0 else f"l{-level}" if level < 0 else "m0"
