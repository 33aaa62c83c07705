"""The captures of a file or a folder, whichever tool has written them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.nsight import is_export, read_nsight
from moewright.spec.errors import BadInput, Reason

Progress = Callable[[int, int], None]


def ignore_progress(_done: int, _total: int) -> None:
    """Report nothing."""


def read_captures(path: Path, report_progress: Progress = ignore_progress) -> tuple[Capture, ...]:
    """Read the captures of a file, or those of a folder: exports of Nsight, else traces.

    Raises:
        BadInput: there are none, or what is there cannot be read.
    """
    if path.is_file():
        if is_export(path):
            return read_nsight(path)
        return read_traces(path, report_progress=report_progress)
    exports = sorted(file for file in path.rglob("*.sqlite") if file.is_file())
    captures = [capture for export in exports for capture in read_nsight(export)]
    if not captures:
        traces = read_traces(path, report_progress=report_progress)
        if not traces:
            rule = "holds neither a run (plan.json) nor traces (.json, .json.gz)"
            raise BadInput(Reason(field=str(path), rule=rule))
        return traces
    # Each export counts its own processes from 0; as many hosts' ranks follow each other.
    return tuple(replace(capture, rank=rank) for rank, capture in enumerate(captures))
