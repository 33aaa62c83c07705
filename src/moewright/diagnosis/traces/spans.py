"""Sets of time intervals: float arrays [n, 2] of starts and ends in seconds, sorted and apart.

Kernels overlap, so seconds are lengths of unions; durations are never added up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]

NONE: Spans = np.empty((0, 2))


def union(spans: Spans) -> Spans:
    """Any [n, 2] intervals, as a set. Empty and reversed ones are left out."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NONE
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] > reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[first, 0], reach[last]), axis=1)


def joined(*sets: Spans) -> Spans:
    """What is in any of the sets."""
    return union(np.concatenate(sets)) if sets else NONE


def both(one: Spans, other: Spans) -> Spans:
    """What is in both sets."""
    if not len(one) or not len(other):
        return NONE
    times = np.concatenate((one[:, 0], other[:, 0], one[:, 1], other[:, 1]))
    moves = np.repeat((1, -1), len(one) + len(other))
    order = np.lexsort((moves, times))
    inside = np.cumsum(moves[order])[:-1] == 2
    times = times[order]
    return union(np.stack((times[:-1][inside], times[1:][inside]), axis=1))


def without(one: Spans, other: Spans) -> Spans:
    """What is in the first set and not in the second."""
    if not len(one) or not len(other):
        return one
    low, high = min(one[0, 0], other[0, 0]) - 1, max(one[-1, 1], other[-1, 1]) + 1
    gaps = np.stack(
        (np.concatenate(([low], other[:, 1])), np.concatenate((other[:, 0], [high]))), axis=1
    )
    return both(one, union(gaps))


def total_s(spans: Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def of(start: float, end: float) -> Spans:
    """One interval."""
    return np.array([[start, end]], dtype=np.float64)
