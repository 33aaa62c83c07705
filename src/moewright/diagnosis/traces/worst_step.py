"""The longest step of a capture, taken apart over time: what its device did when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.traces.breakdown import (
    BLOCKING_FIRST,
    COMPUTE_KINDS,
    break_down_step,
    find_window,
)
from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.diagnosis.traces.comm_classes import classify_channels
from moewright.diagnosis.traces.intervals import (
    Intervals,
    intersect,
    merge,
    single,
    subtract,
    unite,
)
from moewright.spec.layout import Layout
from moewright.spec.units import mention

# When each part of a traced step runs: the intervals behind a breakdown, to be looked at.

COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpans:
    """The intervals of one part of a rank's steps, on the tool's clock; each has its own label."""

    part: str
    spans: Intervals
    labels: tuple[str, ...]


def find_step_spans(capture: Capture, layout: Layout | None = None) -> tuple[StepSpans, ...]:
    """Return the longest gaps, exposed communication by class, exposed copies and compute."""
    exposed = dict(find_exposed_parts(capture, layout))
    compute = exposed.pop(COMPUTE)
    parts = (
        _longest_gaps(capture, layout),
        *(_label(part, spans) for part, spans in exposed.items()),
        _label(COMPUTE, compute),
    )
    return tuple(part for part in parts if len(part.spans))


def find_exposed_parts(
    capture: Capture, layout: Layout | None = None
) -> Iterator[tuple[str, Intervals]]:
    """Yield compute, the exposed spans of each class of communication, and copies not hidden.

    No two of them overlap; what they leave of the window is idle.
    """
    kernels = capture.kernels
    window = find_window(capture)
    hidden = window.clip(kernels.intervals(kernels.has_kind(*COMPUTE_KINDS)))
    yield COMPUTE, hidden
    classes = classify_channels(capture, layout)
    for comm in BLOCKING_FIRST:
        channels = [index for index, told in enumerate(classes) if told.comm is comm]
        busy = window.clip(kernels.intervals(np.isin(kernels.channel_index, channels)))
        yield f"exposed {comm}", subtract(busy, hidden)
        hidden = unite(hidden, busy)
    copies = window.clip(kernels.intervals(kernels.has_kind(KernelKind.COPY)))
    yield "copies not hidden", subtract(copies, hidden)


def _label(part: str, spans: Intervals) -> StepSpans:
    return StepSpans(part=part, spans=spans, labels=(part,) * len(spans))


def _longest_gaps(capture: Capture, layout: Layout | None) -> StepSpans:
    gaps = sorted(break_down_step(capture, layout).worst_gaps, key=lambda gap: gap.start_s)
    spans = [(gap.start_s, gap.start_s + gap.seconds) for gap in gaps]
    return StepSpans(
        part="longest gaps",
        spans=np.array(spans, dtype=np.float64).reshape(-1, 2),
        labels=tuple(f"idle: {gap.cause}{mention(', filled by {}', gap.filler)}" for gap in gaps),
    )


IDLE = "idle"
_FINENESS = 2000  # of a step's length: what lies closer together is told as one span


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLane:
    """The spans of one part of a step: seconds from the step's start, and lengths."""

    part: str
    spans: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstStep:
    """The longest step of any rank, on its device.

    `start_s` counts from where a viewer of the trace begins; `number` counts marked steps from 1,
    0 where none is marked. The lanes together cover the step once.
    """

    rank: int
    number: int
    start_s: float
    length_s: float
    lanes: tuple[StepLane, ...]


def find_worst_step(captures: Sequence[Capture], layout: Layout | None = None) -> WorstStep:
    """Return the longest step of several ranks' captures, with its lanes."""
    steps = [(capture, _device_steps(capture)) for capture in captures]
    capture, edges = max(steps, key=lambda pair: float(np.diff(pair[1]).max()))
    lengths_s = np.diff(edges)
    index = int(lengths_s.argmax())
    start, end = float(edges[index]), float(edges[index + 1])
    window = single(start, end)
    rest = window
    lanes = []
    for name, spans in find_exposed_parts(capture, layout):
        inside = intersect(merge(spans), window)
        rest = subtract(rest, inside)
        lanes.append((name, inside))
    lanes.append((IDLE, rest))
    return WorstStep(
        rank=capture.rank,
        number=index + 1 if capture.steps else 0,
        start_s=start - capture.first_s,
        length_s=end - start,
        lanes=tuple(
            StepLane(part=name, spans=_thin(spans, start, (end - start) / _FINENESS))
            for name, spans in lanes
            if len(spans)
        ),
    )


def _device_steps(capture: Capture) -> NDArray[np.float64]:
    """Return where the device's steps begin, and where the last ends.

    A step begins with the first kernel that it launched, as far as launches are recorded.
    """
    first, last = find_window(capture).interval[0].tolist()
    if len(capture.steps) < 2:
        return np.array([first, last])
    begins, ends = np.array(capture.steps).T
    kernels = capture.kernels
    step = np.searchsorted(begins, kernels.launched_s, side="right") - 1
    # What starts before its launch took the launch of another kernel.
    is_launched = (step >= 0) & (kernels.launched_s <= kernels.start_s)
    is_launched &= kernels.launched_s < ends[np.maximum(step, 0)]
    starts = np.full(len(begins), np.inf)
    np.minimum.at(starts, step[is_launched], kernels.start_s[is_launched])
    starts = np.where(np.isfinite(starts), starts, begins)
    edges = np.concatenate(([first], starts[1:], [last]))
    return np.maximum.accumulate(np.clip(edges, first, last))


def _thin(spans: Intervals, start: float, least_s: float) -> tuple[tuple[float, float], ...]:
    """Return spans from a start, those joined that no picture of the step tells apart."""
    is_new = np.concatenate(([True], spans[1:, 0] - spans[:-1, 1] > least_s))
    firsts = np.flatnonzero(is_new)
    lasts = np.concatenate((firsts[1:] - 1, [len(spans) - 1]))
    return tuple(
        (float(begin - start), float(end - begin))
        for begin, end in zip(spans[firsts, 0], spans[lasts, 1], strict=True)
    )
