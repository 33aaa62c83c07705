"""Traces with their findings as tracks, for Perfetto, on the clock of the trace."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moewright.codec.files import write_pieces
from moewright.codec.foreign import budget, read_apart
from moewright.diagnosis.traces.breakdown import find_window
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.intervals import Intervals
from moewright.diagnosis.traces.nsight import is_export
from moewright.diagnosis.traces.trace_stream import TraceStream
from moewright.diagnosis.traces.worst_step import find_step_spans
from moewright.spec.errors import BadInput, Reason
from moewright.spec.finding import Finding
from moewright.spec.layout import Layout

_US_PER_S = 1e6
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
                "ts": start * _US_PER_S,
                "dur": (end - start) * _US_PER_S,
            }
            yield json.dumps(event)


def _metadata(kind: str, process: int, track: int, **args: Any) -> str:
    event = {"ph": "M", "name": kind, "pid": process, "tid": track, "ts": 0, "args": args}
    return json.dumps(event)
