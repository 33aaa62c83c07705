"""Where one rank's step goes: compute, exposed communication by class, and idle time by cause.

All seconds are lengths of unions of intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.traces.capture import (
    Capture,
    GroupedRows,
    KernelKind,
    KernelTable,
    TrainerMark,
)
from moewright.diagnosis.traces.comm_classes import ChannelClass, CommClass, classify_channels
from moewright.diagnosis.traces.gaps import WORST_GAPS, Gap, IdleCause, explain_gaps
from moewright.diagnosis.traces.intervals import (
    Intervals,
    intersect,
    merge,
    single,
    subtract,
    total_s,
    unite,
)
from moewright.spec.layout import Layout

TOP_KERNELS = 10  # the tail of a trace is thousands of names
_MATRIX_KINDS = (KernelKind.GEMM, KernelKind.GROUPED_GEMM, KernelKind.ATTENTION)
COMPUTE_KINDS = tuple(
    kind for kind in KernelKind if kind not in (KernelKind.COMMUNICATION, KernelKind.COPY)
)
_SHORT_KERNEL_S = 1e-5  # about what its launch takes on the host
_CLOCK_S = 1e-9  # what a trace's clock resolves: shorter gaps are rounding

# Where two classes are exposed at once, the one that holds back the current layer, and so comes
# first here, gets the time.
BLOCKING_FIRST = (
    CommClass.TP,
    CommClass.CP,
    CommClass.EP,
    CommClass.PP,
    CommClass.EXCHANGE,
    CommClass.DP,
    CommClass.OTHER,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommTime:
    """Seconds a step of one class of communication.

    `busy_s` is the length of its union, `exposed_s` what no other work hides.
    """

    comm: CommClass
    busy_s: float
    exposed_s: float
    calls: float
    bytes: float  # handed in; 0: not recorded
    evidence: tuple[str, ...]
    longest: tuple[tuple[float, float], ...]  # exposed spans: start on the tool's clock, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTime:
    """Seconds a step of copies of one name, such as "Memcpy HtoD (Pageable -> Device)"."""

    name: str
    busy_s: float
    exposed_s: float  # nothing else runs
    calls: float
    bytes: float  # 0: not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKernel:
    """A kernel that takes much of a step."""

    name: str
    kind: KernelKind
    seconds: float  # of its union, a step
    calls: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Seconds a step of one rank.

    The step is the sum of compute, exposed communication, exposed copies and idle time.
    """

    source: str
    rank: int
    device: str
    memory_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    steps: int  # 0: the trace marks none, and "a step" is all of it
    step_s: float
    first_s: float  # of the tool's clock at its first event
    compute_s: float
    kind_times: tuple[tuple[KernelKind, float], ...]  # of the compute, each kind's own union
    comm_times: tuple[CommTime, ...]
    matrix_s: float  # matrix products and attention, recompute aside
    recompute_s: float
    copies_s: float
    copy_times: tuple[CopyTime, ...]
    idle_times: tuple[tuple[IdleCause, float], ...]
    worst_gaps: tuple[Gap, ...]
    known_matrix_s: float  # matrix products whose shapes are known
    known_matrix_flops: float
    kernel_launches: float
    short_kernel_share: float  # of the compute kernels, below 10 us
    top_kernels: tuple[TopKernel, ...]
    grouped_rows: GroupedRows | None
    trainer_marks: tuple[TrainerMark, ...]
    notes: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        return sum(comm.exposed_s for comm in self.comm_times)

    @property
    def idle_s(self) -> float:
        return sum(seconds for _, seconds in self.idle_times)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The part of a capture that is broken down, and how many steps lie in it (0: not marked)."""

    interval: Intervals
    steps: int

    @property
    def divisor(self) -> int:
        """Return by how many steps totals are divided."""
        return max(1, self.steps)

    def clip(self, intervals: Intervals) -> Intervals:
        return intersect(merge(intervals), self.interval)

    def mean_s(self, intervals: Intervals) -> float:
        """Return the seconds a step that intervals cover inside the window."""
        return total_s(self.clip(intervals)) / self.divisor

    def overlaps(self, kernels: KernelTable) -> NDArray[np.bool_]:
        """Return the mask of the activities that touch the window."""
        start, end = self.interval[0]
        mask: NDArray[np.bool_] = (kernels.start_s < end) & (kernels.end_s > start)
        return mask


def break_down_step(capture: Capture, layout: Layout | None = None) -> Breakdown:
    """Break down the steps that the capture marks; the whole capture where it marks none."""
    kernels = capture.kernels
    window = find_window(capture)
    clipped = {kind: window.clip(kernels.intervals(kernels.has_kind(kind))) for kind in KernelKind}
    compute = unite(*(clipped[kind] for kind in COMPUTE_KINDS))
    comm = clipped[KernelKind.COMMUNICATION]
    copies = clipped[KernelKind.COPY]
    exposed_copies = subtract(copies, unite(compute, comm))
    gaps = subtract(window.interval, unite(compute, comm, copies))
    gaps = gaps[gaps[:, 1] - gaps[:, 0] > _CLOCK_S]
    idle = explain_gaps(capture, gaps)
    overlapping = window.overlaps(kernels)
    is_compute = kernels.has_kind(*COMPUTE_KINDS)
    is_matrix = kernels.has_kind(*_MATRIX_KINDS)
    has_known_flops = overlapping & (kernels.flops > 0)
    lengths_s = (kernels.end_s - kernels.start_s)[overlapping & is_compute]
    short = lengths_s < _SHORT_KERNEL_S
    return Breakdown(
        source=capture.path.name,
        rank=capture.rank,
        device=capture.device,
        memory_bytes=capture.memory_bytes,
        allocated_bytes=capture.allocated_bytes,
        reserved_bytes=capture.reserved_bytes,
        steps=window.steps,
        step_s=total_s(window.interval) / window.divisor,
        first_s=capture.first_s,
        compute_s=total_s(compute) / window.divisor,
        kind_times=tuple(
            (kind, total_s(clipped[kind]) / window.divisor)
            for kind in COMPUTE_KINDS
            if len(clipped[kind])
        ),
        comm_times=_comm_times(capture, layout, window, compute),
        matrix_s=window.mean_s(kernels.intervals(is_matrix & ~kernels.is_recompute)),
        recompute_s=window.mean_s(kernels.intervals(is_compute & kernels.is_recompute)),
        copies_s=total_s(exposed_copies) / window.divisor,
        copy_times=_copy_times(capture, window, exposed_copies),
        idle_times=tuple((cause, seconds / window.divisor) for cause, seconds in idle.seconds),
        worst_gaps=idle.worst,
        known_matrix_s=window.mean_s(kernels.intervals(has_known_flops)),
        known_matrix_flops=float(kernels.flops[has_known_flops].sum()) / window.divisor,
        kernel_launches=float(overlapping.sum()) / window.divisor,
        short_kernel_share=float(short.mean()) if len(short) else 0.0,
        top_kernels=_top_kernels(capture, window),
        grouped_rows=capture.grouped_rows,
        trainer_marks=capture.trainer_marks,
        notes=capture.notes,
    )


def find_window(capture: Capture) -> StepWindow:
    """Return the part of the capture that is broken down.

    Steps are marked on the host, and the device runs behind it: the device's window starts with the
    first kernel launched inside the first step, and ends with the last kernel launched inside the
    last step, as far as launches were recorded.
    """
    kernels = capture.kernels
    first = float(kernels.start_s.min())
    last = float(kernels.end_s.max())
    steps = len(capture.steps)
    if not steps:
        return StepWindow(interval=single(first, last), steps=0)
    begin = capture.steps[0][0]
    finish = capture.steps[-1][1]
    launched = kernels.launched_s
    in_steps = (launched >= begin) & (launched <= finish)
    if not in_steps.any():
        is_other_clock = begin >= last or finish <= first
        if is_other_clock:
            return StepWindow(interval=single(first, last), steps=steps)
        return StepWindow(interval=single(max(first, begin), min(last, finish)), steps=steps)
    first_start = float(kernels.start_s[in_steps].min())
    last_end = float(kernels.end_s[in_steps].max())
    from_step_before = (launched < begin) & (kernels.end_s > begin)
    if not from_step_before.any():
        return StepWindow(
            interval=single(min(begin, first_start), max(last_end, finish)), steps=steps
        )
    # Work of the step before runs on: the device's step starts after it.
    drained = max(begin, float(kernels.end_s[from_step_before].max()))
    return StepWindow(interval=single(min(drained, first_start), last_end), steps=steps)


def _comm_times(
    capture: Capture, layout: Layout | None, window: StepWindow, compute: Intervals
) -> tuple[CommTime, ...]:
    kernels = capture.kernels
    classes = classify_channels(capture, layout)
    overlapping = window.overlaps(kernels)
    times = []
    hidden = compute
    for comm in BLOCKING_FIRST:
        channels = [index for index, channel in enumerate(classes) if channel.comm is comm]
        is_class = np.isin(kernels.channel_index, channels)
        busy = window.clip(kernels.intervals(is_class))
        if not len(busy):
            continue
        exposed = subtract(busy, hidden)
        hidden = unite(hidden, busy)
        counted = is_class & overlapping
        times.append(
            CommTime(
                comm=comm,
                busy_s=total_s(busy) / window.divisor,
                exposed_s=total_s(exposed) / window.divisor,
                calls=float(counted.sum()) / window.divisor,
                bytes=float(kernels.payload_bytes[counted].sum()) / window.divisor,
                evidence=_evidence(classes, channels),
                longest=_longest(exposed),
            )
        )
    return tuple(times)


def _longest(spans: Intervals) -> tuple[tuple[float, float], ...]:
    """Return the starts and lengths of the longest spans, longest first."""
    lengths_s = spans[:, 1] - spans[:, 0]
    chosen = np.argsort(-lengths_s, kind="stable")[:WORST_GAPS]
    return tuple((float(spans[index, 0]), float(lengths_s[index])) for index in chosen)


def _copy_times(
    capture: Capture, window: StepWindow, exposed_copies: Intervals
) -> tuple[CopyTime, ...]:
    """Return the copies by name, those with the most exposed time first."""
    kernels = capture.kernels
    is_copy = kernels.has_kind(KernelKind.COPY) & window.overlaps(kernels)
    times = []
    for index in np.unique(kernels.name_index[is_copy]).tolist():
        has_name = is_copy & (kernels.name_index == index)
        busy = window.clip(kernels.intervals(has_name))
        times.append(
            CopyTime(
                name=kernels.names[index],
                busy_s=total_s(busy) / window.divisor,
                exposed_s=total_s(intersect(busy, exposed_copies)) / window.divisor,
                calls=float(has_name.sum()) / window.divisor,
                bytes=float(kernels.payload_bytes[has_name].sum()) / window.divisor,
            )
        )
    return tuple(sorted(times, key=lambda time: -time.exposed_s))


def _evidence(classes: Sequence[ChannelClass], indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(classes[index].evidence for index in indices))


def _top_kernels(capture: Capture, window: StepWindow) -> tuple[TopKernel, ...]:
    kernels = capture.kernels
    overlapping = window.overlaps(kernels)
    lengths_s = np.where(overlapping, kernels.end_s - kernels.start_s, 0.0)
    seconds_of_name = np.bincount(
        kernels.name_index, weights=lengths_s, minlength=len(kernels.names)
    )
    top = []
    for index in np.argsort(-seconds_of_name)[:TOP_KERNELS].tolist():
        has_name = overlapping & (kernels.name_index == index)
        if has_name.any():
            kernel = TopKernel(
                name=kernels.names[index],
                kind=list(KernelKind)[int(kernels.kind_index[has_name][0])],
                seconds=window.mean_s(kernels.intervals(has_name)),
                calls=float(has_name.sum()) / window.divisor,
            )
            top.append(kernel)
    return tuple(sorted(top, key=lambda kernel: -kernel.seconds))
