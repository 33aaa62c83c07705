"""Geometry of the report's charts: axes, ticks, thinned curves, stacked bars and heat levels.

Only numbers and text are made here; the page's templates draw them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log2, log10

Point = tuple[float, float]

# Most points that one curve draws.
MAX_CURVE_POINTS = 2000
# Drawing units of a plot's width and height; the page stretches them.
PLOT_UNITS = 1000
# Heat levels on either side of an even load.
HEAT_LEVELS = 6
# Levels that a factor of two takes: the last ones stand for 2 x and more, and for 1/2 x and less.
HEAT_LEVELS_PER_OCTAVE = 6

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
# Blue-grey, teal and orange: the stops of `ramp_colour`.
_RAMP_STOPS = ((52, 80, 107), (87, 163, 140), (214, 122, 52))
# Steps between ticks that read as round, in units of a power of ten.
_ROUND_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A mark of an axis with its text."""

    at: float  # percent of the axis
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartAxis:
    """The range of values that one side of a chart covers, with its ticks."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    label: str  # with its unit

    def to_percent(self, value: float) -> float:
        """Return where a value lies on the axis, in percent of its length."""
        return 100 * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotCurve:
    """A curve as an SVG path in a square of PLOT_UNITS; `dots` draws its points as well."""

    label: str
    colour: str
    path: str
    dots: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLine:
    """A line across the whole plot with a text beside it."""

    at: float  # percent of the axis that it crosses
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Curves over two axes, with lines across the plot."""

    x: ChartAxis
    y: ChartAxis
    curves: tuple[PlotCurve, ...]
    levels: tuple[ReferenceLine, ...] = ()  # horizontal
    marks: tuple[ReferenceLine, ...] = ()  # vertical


@dataclass(frozen=True, kw_only=True, slots=True)
class BarSegment:
    """One coloured part of a stacked bar."""

    label: str
    text: str  # the value with its unit
    percent: float  # of the axis
    share: float  # of the bar, 0..1
    colour: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A stacked horizontal bar."""

    label: str
    text: str
    percent: float  # of the axis
    segments: tuple[BarSegment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatCell:
    """One cell of a heatmap."""

    level: str  # style class
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatRow:
    """One row of a heatmap, with a figure at its end."""

    label: str
    cells: tuple[HeatCell, ...]
    summary: str


def pick_colour(index: int) -> str:
    """Return the palette's colour for the item at this index; the palette repeats."""
    return PALETTE[index % len(PALETTE)]


def ramp_colour(fraction: float) -> str:
    """Return a colour from blue-grey (0) over teal to orange (1), for an ordered set of curves."""
    position = min(max(fraction, 0.0), 1.0) * (len(_RAMP_STOPS) - 1)
    left = min(int(position), len(_RAMP_STOPS) - 2)
    channels = (
        round(start + (stop - start) * (position - left))
        for start, stop in zip(_RAMP_STOPS[left], _RAMP_STOPS[left + 1], strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def build_axis(
    values: Iterable[float],
    label: str,
    *,
    from_zero: bool = False,
    integer_ticks: bool = False,
    ticks: int = 5,
) -> ChartAxis:
    """Build an axis that covers the values, with about `ticks` round ticks.

    The axis is widened to round ticks, unless `integer_ticks`: then it keeps the range of the
    values (training steps, say) and no tick stands between two integers.
    """
    low, high = _axis_range([value for value in values if isfinite(value)])
    if from_zero:
        low = min(low, 0.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / ticks)
    if integer_ticks:
        step = max(1.0, float(ceil(step)))
    else:
        low = floor(low / step + 1e-9) * step
        high = ceil(high / step - 1e-9) * step
    decimals = _decimals(step)
    first = ceil(low / step - 1e-9)
    last = floor(high / step + 1e-9)
    tick_values = [number * step for number in range(first, last + 1)]
    marks = tuple(
        Tick(at=100 * (value - low) / (high - low), text=f"{value:,.{decimals}f}")
        for value in tick_values
    )
    return ChartAxis(low=low, high=high, ticks=marks, label=label)


def _axis_range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _round_step(raw: float) -> float:
    """Return the smallest round step that is no smaller than `raw`."""
    scale = 10.0 ** floor(log10(raw))
    return next(scale * step for step in _ROUND_STEPS if scale * step >= raw * 0.999)


def _decimals(step: float) -> int:
    """Return the digits after the point that the ticks of a step need."""
    decimals = -floor(log10(step) + 1e-9)
    if f"{step:e}".startswith("2.5"):
        decimals += 1
    return max(0, decimals)


def thin_points(points: Sequence[Point], limit: int = MAX_CURVE_POINTS) -> tuple[Point, ...]:
    """Return at most `limit` points of a curve.

    Of each run of neighbours the lowest and the highest are kept, so that spikes stay visible.
    """
    if len(points) <= limit:
        return tuple(points)
    bins = limit // 2
    edges = [len(points) * number // bins for number in range(bins + 1)]
    kept: list[Point] = []
    for start, stop in pairwise(edges):
        run = points[start:stop]
        extremes = {min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])}
        kept.extend(sorted(extremes))
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
    """Build a curve from its finite points; the others are reported elsewhere on the page."""
    finite = [point for point in points if isfinite(point[1])]
    spots = [
        f"{x.to_percent(px) / 100 * PLOT_UNITS:.4g} "
        f"{PLOT_UNITS - y.to_percent(py) / 100 * PLOT_UNITS:.4g}"
        for px, py in thin_points(finite, limit)
    ]
    return PlotCurve(
        label=label,
        colour=colour,
        path="M" + "L".join(spots) if spots else "",
        dots="".join(f"M{spot}h0" for spot in spots) if dots else "",
    )


def build_bar(
    label: str, parts: Sequence[tuple[str, float, str, str]], text: str, longest: float
) -> Bar:
    """Build a stacked bar from (label, value, shown value, colour) on an axis up to `longest`."""
    total = sum(value for _, value, _, _ in parts)
    segments = tuple(
        BarSegment(
            label=name,
            text=shown,
            percent=100 * value / longest,
            share=value / total,
            colour=colour,
        )
        for name, value, shown, colour in parts
        if value > 0
    )
    percent = 100 * total / longest if longest else 0.0
    return Bar(label=label, text=text, percent=percent, segments=segments)


def heat_level(load: float) -> str:
    """Return the style class of a load over the mean.

    d0 is no token at all, l6..l1 lie below the mean, m0 is even, h1..h6 lie above the mean.
    """
    if load <= 0:
        return "d0"
    level = max(-HEAT_LEVELS, min(HEAT_LEVELS, round(log2(load) * HEAT_LEVELS_PER_OCTAVE)))
    if level > 0:
        return f"h{level}"
    if level < 0:
        return f"l{-level}"
    return "m0"
