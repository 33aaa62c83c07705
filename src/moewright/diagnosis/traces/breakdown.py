"""Where one rank's step goes: work, exposed communication by class, idle time by cause; all by
unions of intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moewright.diagnosis.traces import intervals as sets
from moewright.diagnosis.traces.capture import Capture, GroupedRows, KernelKind
from moewright.diagnosis.traces.comm_classes import ChannelClass, CommClass, classify_channels
from moewright.diagnosis.traces.intervals import Intervals
from moewright.spec.layout import Layout

TOP_KERNELS = 10
_MATRIX_KINDS = (KernelKind.GEMM, KernelKind.GROUPED_GEMM, KernelKind.ATTENTION)
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


class IdleCause(StrEnum):
    """Why a device had nothing to do."""

    DATA = "data loading"
    GC = "garbage collection"
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
    evidence: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKernel:
    name: str
    kind: KernelKind
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
    kind_times: tuple[tuple[KernelKind, float], ...]  # of the compute, each kind's own union
    comm_times: tuple[CommTime, ...]
    matrix_s: float  # matrix products and attention, replays aside
    recompute_s: float
    copies_s: float
    idle_times: tuple[tuple[IdleCause, float], ...]
    known_matrix_s: float  # matrix products whose shapes are known
    known_matrix_flops: float
    kernel_launches: float  # launched
    short_kernel_share: float  # share of the compute kernels below 10 us
    top_kernels: tuple[TopKernel, ...]
    grouped_rows: GroupedRows | None
    notes: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        return sum(comm.exposed_s for comm in self.comm_times)

    @property
    def idle_s(self) -> float:
        return sum(seconds for _, seconds in self.idle_times)


def break_down_step(capture: Capture, layout: Layout | None = None) -> Breakdown:
    """Of the steps that the capture marks; of all that it holds where it marks none."""
    kernels = capture.kernels
    window, steps = _window(capture)
    count = max(1, steps)
    clipped = {
        work: _clip(kernels.intervals(kernels.has_kind(work)), window) for work in KernelKind
    }
    works = tuple(
        work for work in KernelKind if work not in (KernelKind.COMMUNICATION, KernelKind.COPY)
    )
    compute = sets.unite(*(clipped[work] for work in works))
    comm = clipped[KernelKind.COMMUNICATION]
    copies = sets.subtract(clipped[KernelKind.COPY], sets.unite(compute, comm))
    busy = sets.unite(compute, comm, clipped[KernelKind.COPY])
    gaps = sets.subtract(window, busy)
    inside = (kernels.start_s < window[0, 1]) & (kernels.end_s > window[0, 0])
    computing = inside & kernels.has_kind(*works)
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
        kind_times=tuple(
            (work, sets.total_s(clipped[work]) / count) for work in works if len(clipped[work])
        ),
        comm_times=_comms(capture, layout, window, compute, count),
        matrix_s=sets.total_s(
            _clip(
                kernels.intervals(kernels.has_kind(*_MATRIX_KINDS) & ~kernels.is_recompute), window
            )
        )
        / count,
        recompute_s=sets.total_s(
            _clip(kernels.intervals(kernels.has_kind(*works) & kernels.is_recompute), window)
        )
        / count,
        copies_s=sets.total_s(copies) / count,
        idle_times=tuple(
            (cause, seconds / count)
            for cause, seconds in _idle(capture, gaps).items()
            if seconds > 0
        ),
        known_matrix_s=sets.total_s(_clip(kernels.intervals(known), window)) / count,
        known_matrix_flops=float(kernels.flops[known].sum()) / count,
        kernel_launches=float(inside.sum()) / count,
        short_kernel_share=float(short.mean()) if len(short) else 0.0,
        top_kernels=_top(capture, inside, window, count),
        grouped_rows=capture.grouped_rows,
        notes=capture.notes,
    )


def _clip(found: Intervals, window: Intervals) -> Intervals:
    return sets.intersect(sets.merge(found), window)


def _window(capture: Capture) -> tuple[Intervals, int]:
    """What is looked at, and how many steps lie in it.

    Marks are the host's and the device runs behind it: its window starts with the first kernel
    launched inside the first step and ends with the last one launched inside the last, as far as
    launches were recorded.
    """
    kernels = capture.kernels
    first, last = float(kernels.start_s.min()), float(kernels.end_s.max())
    if not capture.steps:
        return sets.single(first, last), 0
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
        return sets.single(start, max(end, finish) if not before.any() else end), len(capture.steps)
    if begin >= last or finish <= first:  # marks of another clock
        return sets.single(first, last), len(capture.steps)
    return sets.single(max(first, begin), min(last, finish)), len(capture.steps)


def _comms(
    capture: Capture, layout: Layout | None, window: Intervals, compute: Intervals, count: int
) -> tuple[CommTime, ...]:
    kernels = capture.kernels
    classed = classify_channels(capture, layout)
    found, taken = [], compute
    for comm in _BLOCKING_FIRST:
        places = [place for place, each in enumerate(classed) if each.comm is comm]
        mine = (
            np.isin(kernels.channel_index, places)
            if places
            else np.zeros(len(kernels.name_index), dtype=bool)
        )
        busy = _clip(kernels.intervals(mine), window)
        if not len(busy):
            continue
        exposed = sets.subtract(busy, taken)
        taken = sets.unite(taken, busy)
        inside = mine & (kernels.start_s < window[0, 1]) & (kernels.end_s > window[0, 0])
        found.append(
            CommTime(
                comm=comm,
                busy_s=sets.total_s(busy) / count,
                exposed_s=sets.total_s(exposed) / count,
                calls=float(inside.sum()) / count,
                bytes=float(kernels.payload_bytes[inside].sum()) / count,
                evidence=_hows(classed, places),
            )
        )
    return tuple(found)


def _hows(classed: Sequence[ChannelClass], places: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(classed[place].evidence for place in places))


def _idle(capture: Capture, gaps: Intervals) -> Mapping[IdleCause, float]:
    """Seconds of the gaps by cause: first what the host was seen doing in them, then when the next
    kernel came."""
    found = dict.fromkeys(IdleCause, 0.0)
    if not len(gaps):
        return found
    loading = sets.intersect(gaps, capture.data_waits)
    rest = sets.subtract(gaps, loading)
    collecting = sets.intersect(rest, capture.gc_pauses)
    rest = sets.subtract(rest, collecting)
    found[IdleCause.DATA], found[IdleCause.GC] = sets.total_s(loading), sets.total_s(collecting)
    kernels = capture.kernels
    nexts = np.searchsorted(kernels.start_s, rest[:, 1] - 1e-9)
    syncs = capture.syncs
    for (start, end), at in zip(rest.tolist(), nexts.tolist(), strict=True):
        launched = float(kernels.launched_s[at]) if at < len(kernels.start_s) else float("nan")
        if launched != launched:
            cause = IdleCause.UNKNOWN
        elif launched < start - _LATE_S or end - start < _TINY_GAP_S:
            cause = IdleCause.DEVICE
        else:
            cause = IdleCause.SYNC if _drained(syncs, start, launched) else IdleCause.LAUNCH
        found[cause] += end - start
    return found


def _drained(syncs: Intervals, start: float, launched: float) -> bool:
    """Whether the host sat in a synchronisation when the gap began, or entered one before it
    launched again."""
    at = int(np.searchsorted(syncs[:, 0], launched, side="right")) - 1
    return at >= 0 and float(syncs[at, 1]) >= start


def _top(
    capture: Capture, inside: np.ndarray, window: Intervals, count: int
) -> tuple[TopKernel, ...]:
    kernels = capture.kernels
    length = np.where(inside, kernels.end_s - kernels.start_s, 0.0)
    spent = np.bincount(kernels.name_index, weights=length, minlength=len(kernels.names))
    found = []
    for index in np.argsort(-spent)[:TOP_KERNELS].tolist():
        mine = inside & (kernels.name_index == index)
        if mine.any():
            seconds = sets.total_s(_clip(kernels.intervals(mine), window)) / count
            work = list(KernelKind)[int(kernels.kind_index[mine][0])]
            found.append(
                TopKernel(
                    name=capture.kernels.names[index],
                    kind=work,
                    seconds=seconds,
                    calls=float(mine.sum()) / count,
                )
            )
    return tuple(sorted(found, key=lambda each: -each.seconds))
