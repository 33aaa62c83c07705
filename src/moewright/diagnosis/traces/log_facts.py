"""What a log says besides its steps: its head, the allocator's memory, and its clock."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from moewright.codec.files import read_part
from moewright.diagnosis.traces.megatron_log import MemoryReport
from moewright.spec.units import GIB

# What lines of torchtitan, NeMo and Primus say of the allocator's memory, each with its unit.
_STEP_MEMORY = (
    (re.compile(r"memory:\s*(?:\x1b\[\d+m)*(\d+(?:\.\d+)?)GiB\("), GIB),
    (re.compile(r"\bmax_memory_reserved\W+(\d+)\b"), 1),
    (re.compile(r"\bmem usage/free/total/usage_ratio: (\d+(?:\.\d+)?)GB/"), GIB),
)


def read_step_memory(text: str) -> tuple[MemoryReport, ...]:
    """Return the most of the allocator's memory that lines of steps say, () where none does."""
    peaks_bytes = [
        round(float(match[1]) * unit)
        for pattern, unit in _STEP_MEMORY
        for match in pattern.finditer(text)
    ]
    if not peaks_bytes:
        return ()
    report = MemoryReport(
        rank=0,
        allocated_bytes=0,
        max_allocated_bytes=0,
        reserved_bytes=0,
        max_reserved_bytes=max(peaks_bytes),
    )
    return (report,)


def read_head(path: Path) -> str:
    """Return the beginning of a log, in which its trainer has told its arguments."""
    text = read_part(path, HEAD_BYTES)
    steps = [place for mark in _STEP_MARKS if (place := text.find(mark)) >= 0]
    if steps:
        text = text[: min(steps) + _EARLY_BYTES]
    return text.decode("utf-8", "replace")


# Of Megatron-LM, torchtitan and NeMo: behind the first step no arguments follow.
_STEP_MARKS = (b"elapsed time per iteration", b"tps: ", b"train_step_timing in s")
HEAD_BYTES = 4 << 20  # a trainer prints a thousand arguments in less
_EARLY_BYTES = 1 << 17  # behind the first step, in which memory is reported once


def read_lines_between(path: Path, begin: int, end: int) -> str:
    """Return the text of a log between two places."""
    return read_part(path, max(0, end - begin), begin=begin).decode("utf-8", "replace")


# As the loggers of Megatron-LM, torchtitan and Python write it, and ISO 8601.
_CLOCK = re.compile(r"\b(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_CLOCK_BYTES = 4096  # of a line on either side of a place


def read_clock(path: Path, place: int) -> float:
    """Return when the line around a place of a log was written, in seconds; 0 where it has none.

    Only the difference of two of a log means something: lines do not say their time zone.
    """
    before = read_lines_between(path, max(0, place - _CLOCK_BYTES), place)
    behind = read_lines_between(path, place, place + _CLOCK_BYTES)
    start = max(before.rfind("\n"), before.rfind("\r")) + 1
    line = before[start:] + re.split(r"[\r\n]", behind, maxsplit=1)[0]
    match = _CLOCK.search(line)
    if match is None:
        return 0.0
    try:
        written = datetime.fromisoformat(match[1])
    except ValueError:
        return 0.0
    return written.replace(tzinfo=UTC).timestamp() + float(f"0.{match[2] or 0}")
