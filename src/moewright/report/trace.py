"""Timetables and findings as tracks of a trace, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moewright.codec import format_layout, write_text
from moewright.codec.files import write_pieces
from moewright.codec.foreign import budget, read_apart
from moewright.diagnosis.traces.breakdown import find_window
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.intervals import Intervals
from moewright.diagnosis.traces.nsight import is_export
from moewright.diagnosis.traces.trace_stream import TraceStream
from moewright.diagnosis.traces.worst_step import find_step_spans
from moewright.rules.timetable.schedule import split_backwards, timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.errors import BadInput, Reason
from moewright.spec.finding import Finding
from moewright.spec.layout import Layout
from moewright.spec.plan import Estimate, Plan, TimePart
from moewright.spec.units import US_PER_S

# Parts of a step that follow the last backward.
AFTER_PIPELINE = (TimePart.DP_COMM, TimePart.OPTIMIZER)
KIND_NAMES = {RowKind.F: "forward", RowKind.B: "backward", RowKind.W: "weight gradients"}
# A backward has twice the FLOPs of a forward, half of them for the gradients of the inputs and
# half for those of the weights.
UNIT_SECONDS = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)


def write_trace(plan: Plan, path: Path) -> None:
    """Write the trace of a plan's step as JSON.

    Raises:
        BadInput: The layout has no timetable, or the file cannot be written.
    """
    write_text(path, json.dumps(build_trace(plan)))


def build_trace(plan: Plan) -> dict[str, Any]:
    """Build the trace events of one step, one track a pipeline rank, times in microseconds.

    Model chunks are equal, a backward takes twice a forward and communication is free. The times
    are scaled so that the last backward ends where the predicted step reaches gradient reduction
    and the optimizer.

    Raises:
        BadInput: The layout has no timetable.
    """
    layout = plan.layout
    table = timetable(layout, plan.estimate.micro_batches)
    ends = row_end_times(layout, table, [UNIT_SECONDS] * (layout.pp * layout.vpp))
    scale_us = US_PER_S * _pipeline_s(plan.estimate) / max(ends.values())
    events: list[dict[str, Any]] = [_metadata_event("process_name", 0, format_layout(layout))]
    for rank, rows in enumerate(table):
        split = split_backwards(rows)
        events.append(_metadata_event("thread_name", rank, f"pipeline rank {rank}"))
        for row in rows:
            is_full_backward = row.kind is RowKind.B and (row.micro_batch, row.chunk) not in split
            duration = 2.0 if is_full_backward else 1.0
            stage = virtual_stage(layout, rank, row.chunk)
            name = f"{row.kind}{row.micro_batch}"
            if layout.vpp > 1:
                name += f" chunk {row.chunk}"
            event = {
                "name": name,
                "cat": KIND_NAMES[row.kind],
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": (ends[row.kind, row.micro_batch, stage] - duration) * scale_us,
                "dur": duration * scale_us,
                "args": {"micro_batch": row.micro_batch, "virtual_stage": stage},
            }
            events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _pipeline_s(estimate: Estimate) -> float:
    """Return the predicted seconds from the start of a step to the end of its last backward."""
    return estimate.step_s - sum(
        share.seconds for share in estimate.shares if share.part in AFTER_PIPELINE
    )


def _metadata_event(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}


# Beyond the ids of processes, and of devices, which profilers number like processes.
_FIRST_PROCESS = 1 << 24
_ON_TOP = -1  # profilers sort processes by positive numbers
_GZIP_FORMAT = 31
_FAST = 1  # level of compression: a trace is large, and is looked at once
_ROWS = 10_000  # of columns made Python numbers at once


@read_apart
def write_findings_tracks(
    path: Path,
    captures: Sequence[Capture],
    findings: Sequence[Finding],
    layout: Layout | None = None,
) -> None:
    """Write each trace again with the findings and the parts of its steps as tracks on top.

    `path` is a file where the captures are of one trace, and a folder of traces of the same names
    where they are of more. An export of Nsight Systems is no trace that Perfetto reads: of it the
    tracks alone are written. A name that ends in .gz makes the file a packed one.

    Raises:
        BadInput: a file cannot be written, or would overwrite a trace.
    """
    by_file = {file: tuple(own) for file, own in groupby(captures, key=lambda own: own.path)}
    for file, target in _choose_targets(path, tuple(by_file)).items():
        events = _file_events(by_file[file], findings, layout)
        texts = _trace_of(events) if is_export(file) else TraceStream(file).copy_with(events)
        pieces = (text.encode(errors="replace") for text in texts)
        with budget(str(file), file_bytes=file.stat().st_size):
            write_pieces(target, _pack(pieces) if target.name.endswith(".gz") else pieces)


def _choose_targets(path: Path, files: Sequence[Path]) -> dict[Path, Path]:
    """Return the file to write for each trace.

    Raises:
        BadInput: it is the trace, or would be read with the traces the next time.
    """
    if len(files) == 1:
        if path.resolve() == files[0].resolve():
            rule = "is the trace itself, which would be overwritten"
            raise BadInput(Reason(field="--perfetto", value=str(path), rule=rule))
        return {files[0]: path}
    folder = Path(os.path.commonpath([file.parent for file in files]))
    if path.resolve().is_relative_to(folder.resolve()):
        rule = "lies among the traces, and would be diagnosed with them the next time"
        raise BadInput(Reason(field="--perfetto", value=str(path), rule=rule))
    names = {file: file.relative_to(folder) for file in files}
    return {
        file: path / (name.with_suffix(".json") if is_export(file) else name)
        for file, name in names.items()
    }


def _trace_of(events: Iterable[str]) -> Iterator[str]:
    separator = '{"traceEvents": [\n'
    for event in events:
        yield separator + event
        separator = ",\n"
    yield "]}"


def _pack(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(_FAST, wbits=_GZIP_FORMAT)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _file_events(
    captures: Sequence[Capture], findings: Sequence[Finding], layout: Layout | None
) -> Iterator[str]:
    """Yield a process for each capture as JSON, with a track for findings and one for each part."""
    for index, capture in enumerate(captures):
        process = _FIRST_PROCESS + index
        name = f"moewright diagnose: rank {capture.rank}"
        yield _metadata("process_name", process, 0, name=name)
        yield _metadata("process_sort_index", process, 0, sort_index=_ON_TOP)
        yield _metadata("thread_name", process, 1, name="findings")
        window = find_window(capture).interval
        for finding in findings:
            name = f"{finding.share:.0%} {finding.cause}: {finding.title}"
            yield from _slices(process, 1, window, (name,))
        for track, part in enumerate(find_step_spans(capture, layout), start=2):
            yield _metadata("thread_name", process, track, name=part.part)
            yield from _slices(process, track, part.spans, part.labels)


def _slices(process: int, track: int, spans: Intervals, labels: Sequence[str]) -> Iterator[str]:
    """Yield an event for each span; spans of the same times are drawn below each other."""
    for first in range(0, len(spans), _ROWS):
        rows = np.asarray(spans[first : first + _ROWS]).tolist()
        for (start, end), label in zip(rows, labels[first : first + _ROWS], strict=True):
            event = {
                "ph": "X",
                "name": label,
                "cat": "finding",
                "pid": process,
                "tid": track,
                "ts": start * US_PER_S,
                "dur": (end - start) * US_PER_S,
            }
            yield json.dumps(event)


def _metadata(kind: str, process: int, track: int, **args: Any) -> str:
    event = {"ph": "M", "name": kind, "pid": process, "tid": track, "ts": 0, "args": args}
    return json.dumps(event)
