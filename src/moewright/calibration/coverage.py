"""Intervals of predictions: how wide they have to be, and how many measurements they cover.

A prediction has a standard deviation of its logarithm. Left-out residuals over these tell how many
deviations hold 80 and 95 % of the measurements; they have heavier tails than a normal variable.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from moewright.cost.uncertainty import tail_width

Interval = tuple[float, float]
_FEWEST = 20  # residuals of other groups below which the widths of a Student's t are taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """How many standard deviations on either side hold 80 and 95 % of the measurements."""

    width_80: float
    width_95: float

    def intervals(self, value: float, log_sd: float) -> tuple[Interval, Interval]:
        """Return the 80 and the 95 % interval of a value."""
        narrow, wide = (exp(width * log_sd) for width in (self.width_80, self.width_95))
        return (value / narrow, value * narrow), (value / wide, value * wide)


HEAVY_TAILS = Widths(width_80=tail_width(0.8), width_95=tail_width(0.95))


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """A residual over its standard deviation, of a row of a group of rows left out together.

    `kind` tells rows apart whose deviations are of other things, such as complete statements and
    those that leave switches open.
    """

    group: Hashable
    score: float
    kind: Hashable = None


def widths_without(residuals: Sequence[Residual], group: Hashable, kind: Hashable = None) -> Widths:
    """Return the widths that the residuals of all other groups ask for.

    They are those of the same kind where there are enough of them. Groups weigh as the square root
    of their rows, since rows of one share their error.
    """
    others = [residual for residual in residuals if residual.group != group]
    alike = [residual for residual in others if residual.kind == kind]
    if len(alike) >= _FEWEST:
        others = alike
    if len(others) < _FEWEST:
        return HEAVY_TAILS
    counts: dict[Hashable, int] = {}
    for residual in others:
        counts[residual.group] = counts.get(residual.group, 0) + 1
    sizes = np.array([abs(residual.score) for residual in others])
    weights = np.array([counts[residual.group] ** -0.5 for residual in others])
    order = np.argsort(sizes)
    reached = np.cumsum(weights[order]) / weights.sum()
    width_80, width_95 = (float(np.interp(share, reached, sizes[order])) for share in (0.8, 0.95))
    return Widths(width_80=width_80, width_95=width_95)


def covered_share(pairs: Sequence[tuple[float, Interval | None]]) -> float | None:
    """Return the share of measurements inside their intervals; None where there are none."""
    inside = [bounds[0] <= value <= bounds[1] for value, bounds in pairs if bounds is not None]
    return float(np.mean(inside)) if inside else None
