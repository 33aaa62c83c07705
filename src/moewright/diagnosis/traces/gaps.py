"""Gaps between a device's activities: their length and cause, and what the host did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.intervals import Intervals, intersect, single, subtract, total_s

WORST_GAPS = 5  # the rest is in the sum
_TINY_GAP_S = 2e-6  # between kernels that follow each other: no cause is looked for
# Where a launch had returned at least this long before its gap began, the host was not late.
_LATE_S = 5e-6
# After a synchronisation the host launches into an empty queue: this much of what follows is due
# to it, and longer gaps are what the host did then.
_REFILL_S = 5e-5
# A gap of one piece that is longer than any launch: the host did something else.
_LONG_GAP_S = 5e-4
_FILLING_SHARE = 0.5  # of a gap, which what is named as its filler covers


class IdleCause(StrEnum):
    """Why a device had nothing to do."""

    DATA = "data loading"
    GC = "garbage collection"
    SYNC = "synchronisation"  # the host waited for the device, which drained, before it went on
    LAUNCH = "launch-bound"  # the host was late with the next kernel
    HOST = "host work"  # the host did something else for long
    DEVICE = "device"  # launched in time; the device waited for an event or another stream
    UNKNOWN = "unknown"  # the trace holds no launches


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A time without any activity of the device, on the capture's clock.

    `cause` is that of most of it; `filler` names the operation, range or frame of the host that
    covers most of it, "" where none does, and `next_kernel` the kernel that ended it.
    """

    start_s: float
    seconds: float
    cause: IdleCause
    filler: str
    next_kernel: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTime:
    """Seconds without any activity, by cause, and the longest gaps, longest first."""

    seconds: tuple[tuple[IdleCause, float], ...]
    worst: tuple[Gap, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _NextKernel:
    """The kernel that ends a gap, and when its launch began and returned; NaN: not recorded."""

    name: str
    launched_s: float
    launch_end_s: float


def explain_gaps(capture: Capture, gaps: Intervals) -> IdleTime:
    """Return the causes of gaps.

    What the host was seen doing in a gap decides first (loading data, collecting garbage); for the
    rest, when the next kernel was launched.
    """
    seconds = dict.fromkeys(IdleCause, 0.0)
    explained: list[Gap] = []
    loading = intersect(gaps, capture.data_waits)
    collecting = intersect(subtract(gaps, loading), capture.gc_pauses)
    unexplained = subtract(subtract(gaps, loading), collecting)
    for cause, spans in ((IdleCause.DATA, loading), (IdleCause.GC, collecting)):
        seconds[cause] = total_s(spans)
        explained += [_gap(start, end, cause) for start, end in spans.tolist()]
    kernels = capture.kernels
    next_indices = np.searchsorted(kernels.start_s, unexplained[:, 1] - 1e-9)
    for (start, end), index in zip(unexplained.tolist(), next_indices.tolist(), strict=True):
        follower = _NextKernel(name="", launched_s=float("nan"), launch_end_s=float("nan"))
        if index < len(kernels.start_s):
            follower = _NextKernel(
                name=kernels.names[int(kernels.name_index[index])],
                launched_s=float(kernels.launched_s[index]),
                launch_end_s=float(kernels.launch_end_s[index]),
            )
        parts = _causes_of_gap(capture.syncs, start, end, follower)
        for cause, part_s in parts.items():
            seconds[cause] += part_s
        main = max(parts, key=lambda cause: parts[cause])
        explained.append(replace(_gap(start, end, main), next_kernel=follower.name))
    longest = sorted(explained, key=lambda gap: -gap.seconds)[:WORST_GAPS]
    return IdleTime(
        seconds=tuple((cause, total) for cause, total in seconds.items() if total > 0),
        worst=tuple(_name_filler(capture, gap) for gap in longest),
    )


def _gap(start: float, end: float, cause: IdleCause) -> Gap:
    return Gap(start_s=start, seconds=end - start, cause=cause, filler="", next_kernel="")


def _causes_of_gap(
    syncs: Intervals, start: float, end: float, follower: _NextKernel
) -> dict[IdleCause, float]:
    """Return the seconds of a gap by cause.

    Of a synchronisation only what lies in the gap counts, and the refill of the queue after it.
    """
    length_s = end - start
    if np.isnan(follower.launched_s):
        return {IdleCause.UNKNOWN: length_s}
    returned_s = np.fmax(follower.launch_end_s, follower.launched_s)
    if returned_s < start - _LATE_S or length_s < _TINY_GAP_S:
        return {IdleCause.DEVICE: length_s}
    inside_s = total_s(intersect(_near(syncs, start, end), single(start, end)))
    sync_s = min(length_s, inside_s + _REFILL_S) if inside_s else 0.0
    rest_s = length_s - sync_s
    rest = IdleCause.HOST if rest_s > _LONG_GAP_S else IdleCause.LAUNCH
    return {IdleCause.SYNC: sync_s, rest: rest_s}


def _near(intervals: Intervals, start: float, end: float) -> Intervals:
    """Return the intervals of a set that touch a time."""
    first = int(np.searchsorted(intervals[:, 1], start))
    last = int(np.searchsorted(intervals[:, 0], end))
    return intervals[first:last]


def _name_filler(capture: Capture, gap: Gap) -> Gap:
    if capture.host_ranges is None or gap.cause is IdleCause.DEVICE:
        return gap
    end = gap.start_s + gap.seconds
    filler = capture.host_ranges.innermost(gap.start_s, end, least_share=_FILLING_SHARE)
    return replace(gap, filler=filler)
