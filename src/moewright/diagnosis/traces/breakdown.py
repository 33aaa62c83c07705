"""Where one rank's step goes: work, exposed communication by class, idle time by cause; all by
unions of intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moewright.diagnosis.traces import spans as sets
from moewright.diagnosis.traces.capture import Capture, Routed, Work
from moewright.diagnosis.traces.classes import Classed, CommClass, classify
from moewright.diagnosis.traces.spans import Spans
from moewright.spec.layout import Layout

TOP = 10
_MATRIX = (Work.GEMM, Work.GROUPED_GEMM, Work.ATTENTION)
_TINY_GAP_S = 2e-6  # between kernels that follow each other: no cause is looked for
_LATE_S = 5e-6  # a kernel launched less than this before its gap began was waited for by the device

# Where two classes are exposed at once, the one that holds back the layer at hand is charged.
_BLOCKING_FIRST = (
    CommClass.TP,
    CommClass.CP,
    CommClass.EP,
    CommClass.PP,
    CommClass.DP,
    CommClass.OTHER,
)


class Idle(StrEnum):
    """Why a device had nothing to do."""

    DATA = "data loading"
    COLLECTING = "garbage collection"
    SYNC = "synchronisation"  # the host had waited for the device, which drained, before it went on
    LAUNCH = "launch-bound"  # the host was late with the next kernel
    DEVICE = "device"  # launched in time; the device waited for an event or another stream
    UNKNOWN = "unknown"  # the trace holds no launches


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTime:
    """Seconds a step of one class. `busy_s` is its union, `exposed_s` what no other work hides."""

    comm: CommClass
    busy_s: float
    exposed_s: float
    calls: float
    bytes: float  # handed in; 0: not recorded
    how: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKernel:
    name: str
    work: Work
    seconds: float  # of its union, a step
    calls: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Seconds a step. compute + exposed communication + exposed copies + idle = step."""

    source: str
    rank: int
    device: str
    memory_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    steps: int  # 0: the trace marks none, and "a step" is all of it
    step_s: float
    compute_s: float
    works: tuple[tuple[Work, float], ...]  # of the compute, each kind's own union
    comms: tuple[CommTime, ...]
    matrix_s: float  # matrix products and attention, replays aside
    replayed_s: float
    copies_s: float
    idle: tuple[tuple[Idle, float], ...]
    product_s: float  # matrix products whose shapes are known
    product_flops: float
    kernels: float  # launched
    short_kernels: float  # share of the compute kernels below 10 us
    top: tuple[TopKernel, ...]
    routed: Routed | None
    notes: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        return sum(comm.exposed_s for comm in self.comms)

    @property
    def idle_s(self) -> float:
        return sum(seconds for _, seconds in self.idle)


def breakdown(capture: Capture, layout: Layout | None = None) -> Breakdown:
    """Of the steps that the capture marks; of all that it holds where it marks none."""
    kernels = capture.kernels
    window, steps = _window(capture)
    count = max(1, steps)
    clipped = {work: _clip(kernels.spans(kernels.does(work)), window) for work in Work}
    works = tuple(work for work in Work if work not in (Work.COMMUNICATION, Work.COPY))
    compute = sets.joined(*(clipped[work] for work in works))
    comm = clipped[Work.COMMUNICATION]
    copies = sets.without(clipped[Work.COPY], sets.joined(compute, comm))
    busy = sets.joined(compute, comm, clipped[Work.COPY])
    gaps = sets.without(window, busy)
    inside = (kernels.start_s < window[0, 1]) & (kernels.end_s > window[0, 0])
    computing = inside & kernels.does(*works)
    short = (kernels.end_s - kernels.start_s)[computing] < 1e-5
    known = inside & (kernels.flops > 0)
    return Breakdown(
        source=capture.source,
        rank=capture.rank,
        device=capture.device,
        memory_bytes=capture.memory_bytes,
        allocated_bytes=capture.allocated_bytes,
        reserved_bytes=capture.reserved_bytes,
        steps=steps,
        step_s=sets.total_s(window) / count,
        compute_s=sets.total_s(compute) / count,
        works=tuple(
            (work, sets.total_s(clipped[work]) / count) for work in works if len(clipped[work])
        ),
        comms=_comms(capture, layout, window, compute, count),
        matrix_s=sets.total_s(
            _clip(kernels.spans(kernels.does(*_MATRIX) & ~kernels.replayed), window)
        )
        / count,
        replayed_s=sets.total_s(
            _clip(kernels.spans(kernels.does(*works) & kernels.replayed), window)
        )
        / count,
        copies_s=sets.total_s(copies) / count,
        idle=tuple(
            (cause, seconds / count)
            for cause, seconds in _idle(capture, gaps).items()
            if seconds > 0
        ),
        product_s=sets.total_s(_clip(kernels.spans(known), window)) / count,
        product_flops=float(kernels.flops[known].sum()) / count,
        kernels=float(inside.sum()) / count,
        short_kernels=float(short.mean()) if len(short) else 0.0,
        top=_top(capture, inside, window, count),
        routed=capture.routed,
        notes=capture.notes,
    )


def _clip(found: Spans, window: Spans) -> Spans:
    return sets.both(sets.union(found), window)


def _window(capture: Capture) -> tuple[Spans, int]:
    """What is looked at, and how many steps lie in it.

    Marks are the host's and the device runs behind it: its window starts with the first kernel
    launched inside the first step and ends with the last one launched inside the last, as far as
    launches were recorded.
    """
    kernels = capture.kernels
    first, last = float(kernels.start_s.min()), float(kernels.end_s.max())
    if not capture.steps:
        return sets.of(first, last), 0
    begin, finish = capture.steps[0][0], capture.steps[-1][1]
    launched = kernels.launched_s
    ours = (launched >= begin) & (launched <= finish)
    if ours.any():
        start, end = (
            min(begin, float(kernels.start_s[ours].min())),
            float(kernels.end_s[ours].max()),
        )
        before = (launched < begin) & (kernels.end_s > begin)
        if before.any():  # work of the step before runs on: the device's step starts after it
            start = min(
                max(begin, float(kernels.end_s[before].max())), float(kernels.start_s[ours].min())
            )
        return sets.of(start, max(end, finish) if not before.any() else end), len(capture.steps)
    if begin >= last or finish <= first:  # marks of another clock
        return sets.of(first, last), len(capture.steps)
    return sets.of(max(first, begin), min(last, finish)), len(capture.steps)


def _comms(
    capture: Capture, layout: Layout | None, window: Spans, compute: Spans, count: int
) -> tuple[CommTime, ...]:
    kernels = capture.kernels
    classed = classify(capture, layout)
    found, taken = [], compute
    for comm in _BLOCKING_FIRST:
        places = [place for place, each in enumerate(classed) if each.comm is comm]
        mine = (
            np.isin(kernels.channel, places) if places else np.zeros(len(kernels.name), dtype=bool)
        )
        busy = _clip(kernels.spans(mine), window)
        if not len(busy):
            continue
        exposed = sets.without(busy, taken)
        taken = sets.joined(taken, busy)
        inside = mine & (kernels.start_s < window[0, 1]) & (kernels.end_s > window[0, 0])
        found.append(
            CommTime(
                comm=comm,
                busy_s=sets.total_s(busy) / count,
                exposed_s=sets.total_s(exposed) / count,
                calls=float(inside.sum()) / count,
                bytes=float(kernels.bytes[inside].sum()) / count,
                how=_hows(classed, places),
            )
        )
    return tuple(found)


def _hows(classed: Sequence[Classed], places: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(classed[place].how for place in places))


def _idle(capture: Capture, gaps: Spans) -> Mapping[Idle, float]:
    """Seconds of the gaps by cause: first what the host was seen doing in them, then when the next
    kernel came."""
    found = dict.fromkeys(Idle, 0.0)
    if not len(gaps):
        return found
    loading = sets.both(gaps, capture.loading)
    rest = sets.without(gaps, loading)
    collecting = sets.both(rest, capture.collecting)
    rest = sets.without(rest, collecting)
    found[Idle.DATA], found[Idle.COLLECTING] = sets.total_s(loading), sets.total_s(collecting)
    kernels = capture.kernels
    nexts = np.searchsorted(kernels.start_s, rest[:, 1] - 1e-9)
    syncs = capture.syncs
    for (start, end), at in zip(rest.tolist(), nexts.tolist(), strict=True):
        launched = float(kernels.launched_s[at]) if at < len(kernels.start_s) else float("nan")
        if launched != launched:
            cause = Idle.UNKNOWN
        elif launched < start - _LATE_S or end - start < _TINY_GAP_S:
            cause = Idle.DEVICE
        else:
            cause = Idle.SYNC if _drained(syncs, start, launched) else Idle.LAUNCH
        found[cause] += end - start
    return found


def _drained(syncs: Spans, start: float, launched: float) -> bool:
    """Whether the host sat in a synchronisation when the gap began, or entered one before it
    launched again."""
    at = int(np.searchsorted(syncs[:, 0], launched, side="right")) - 1
    return at >= 0 and float(syncs[at, 1]) >= start


def _top(capture: Capture, inside: np.ndarray, window: Spans, count: int) -> tuple[TopKernel, ...]:
    kernels = capture.kernels
    length = np.where(inside, kernels.end_s - kernels.start_s, 0.0)
    spent = np.bincount(kernels.name, weights=length, minlength=len(kernels.names))
    found = []
    for index in np.argsort(-spent)[:TOP].tolist():
        mine = inside & (kernels.name == index)
        if mine.any():
            seconds = sets.total_s(_clip(kernels.spans(mine), window)) / count
            work = list(Work)[int(kernels.work[mine][0])]
            found.append(
                TopKernel(
                    name=capture.kernels.names[index],
                    work=work,
                    seconds=seconds,
                    calls=float(mine.sum()) / count,
                )
            )
    return tuple(sorted(found, key=lambda each: -each.seconds))
