"""The findings of a traced run as tracks for Perfetto, on the clock of its trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moewright.codec import write_text
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.step_spans import find_step_spans
from moewright.spec.layout import Layout

_US_PER_S = 1e6


def write_findings_track(
    captures: Sequence[Capture], path: Path, layout: Layout | None = None
) -> None:
    """Write a process for each rank, with a track for each part of its steps.

    Raises:
        BadInput: the file cannot be written.
    """
    events = [event for capture in captures for event in _rank_events(capture, layout)]
    write_text(path, json.dumps({"traceEvents": events}))


def _rank_events(capture: Capture, layout: Layout | None) -> Iterator[dict[str, Any]]:
    rank = capture.rank
    yield _metadata("process_name", rank, 0, f"moewright diagnose: rank {rank}")
    for track, part in enumerate(find_step_spans(capture, layout)):
        yield _metadata("thread_name", rank, track, part.part)
        for (start, end), label in zip(part.spans.tolist(), part.labels, strict=True):
            yield {
                "ph": "X",
                "name": label,
                "cat": "finding",
                "pid": rank,
                "tid": track,
                "ts": start * _US_PER_S,
                "dur": (end - start) * _US_PER_S,
            }


def _metadata(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}
