"""Sets of time intervals: float arrays [n, 2] of starts and ends in seconds, sorted and disjoint.

Kernels overlap, so seconds are lengths of unions; durations are never added up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]

NO_INTERVALS: Intervals = np.empty((0, 2))


def merge(intervals: Intervals) -> Intervals:
    """Return any [n, 2] intervals as a set; empty and reversed ones are left out."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return NO_INTERVALS
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    starts_new = np.concatenate(([True], intervals[1:, 0] > reach[:-1]))
    first = np.flatnonzero(starts_new)
    last = np.concatenate((first[1:] - 1, [len(intervals) - 1]))
    return np.stack((intervals[first, 0], reach[last]), axis=1)


def unite(*sets: Intervals) -> Intervals:
    """Return what is in any of the sets."""
    return merge(np.concatenate(sets)) if sets else NO_INTERVALS


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """Return what is in both sets."""
    if not len(first) or not len(second):
        return NO_INTERVALS
    times = np.concatenate((first[:, 0], second[:, 0], first[:, 1], second[:, 1]))
    moves = np.repeat((1, -1), len(first) + len(second))
    order = np.lexsort((moves, times))
    in_both = np.cumsum(moves[order])[:-1] == 2
    times = times[order]
    return merge(np.stack((times[:-1][in_both], times[1:][in_both]), axis=1))


def subtract(first: Intervals, second: Intervals) -> Intervals:
    """Return what is in the first set and not in the second."""
    if not len(first) or not len(second):
        return first
    low = min(first[0, 0], second[0, 0]) - 1
    high = max(first[-1, 1], second[-1, 1]) + 1
    gap_starts = np.concatenate(([low], second[:, 1]))
    gap_ends = np.concatenate((second[:, 0], [high]))
    return intersect(first, merge(np.stack((gap_starts, gap_ends), axis=1)))


def total_s(intervals: Intervals) -> float:
    """Return the seconds that a set covers."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def single(start: float, end: float) -> Intervals:
    """Return the set of one interval."""
    return np.array([[start, end]], dtype=np.float64)
