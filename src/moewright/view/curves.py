"""Curves of pages: at most so many points, with their spikes kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]

# Most points that one curve draws.
MAX_CURVE_POINTS = 2000


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
