"""Sets of time intervals: float arrays [n, 2] of starts and ends in seconds, sorted and apart.

Kernels overlap, so seconds are lengths of unions; durations are never added up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]

NO_INTERVALS: Intervals = np.empty((0, 2))


def merge(intervals: Intervals) -> Intervals:
    """Any [n, 2] intervals, as a set. Empty and reversed ones are left out."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return NO_INTERVALS
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.concatenate(([True], intervals[1:, 0] > reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(intervals) - 1]))
    return np.stack((intervals[first, 0], reach[last]), axis=1)


def unite(*sets: Intervals) -> Intervals:
    """What is in any of the sets."""
    return merge(np.concatenate(sets)) if sets else NO_INTERVALS


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """What is in both sets."""
    if not len(first) or not len(second):
        return NO_INTERVALS
    times = np.concatenate((first[:, 0], second[:, 0], first[:, 1], second[:, 1]))
    moves = np.repeat((1, -1), len(first) + len(second))
    order = np.lexsort((moves, times))
    inside = np.cumsum(moves[order])[:-1] == 2
    times = times[order]
    return merge(np.stack((times[:-1][inside], times[1:][inside]), axis=1))


def subtract(first: Intervals, second: Intervals) -> Intervals:
    """What is in the first set and not in the second."""
    if not len(first) or not len(second):
        return first
    low, high = min(first[0, 0], second[0, 0]) - 1, max(first[-1, 1], second[-1, 1]) + 1
    gaps = np.stack(
        (np.concatenate(([low], second[:, 1])), np.concatenate((second[:, 0], [high]))), axis=1
    )
    return intersect(first, merge(gaps))


def total_s(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def single(start: float, end: float) -> Intervals:
    """One interval."""
    return np.array([[start, end]], dtype=np.float64)
