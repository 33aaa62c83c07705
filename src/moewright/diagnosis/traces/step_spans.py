"""When each part of a traced step runs: the intervals behind a breakdown, to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moewright.diagnosis.traces.breakdown import (
    BLOCKING_FIRST,
    COMPUTE_KINDS,
    break_down_step,
    find_window,
)
from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.diagnosis.traces.comm_classes import classify_channels
from moewright.diagnosis.traces.intervals import Intervals, subtract, unite
from moewright.spec.layout import Layout

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
        labels=tuple(
            f"idle: {gap.cause}{f', filled by {gap.filler}' if gap.filler else ''}" for gap in gaps
        ),
    )
