"""Steps of a log that grows, or is larger than memory: iterations alone, of several trainers.

The file is mapped, not read, and only lines with a mark of a trainer are looked at. Lines of
Megatron-LM are taken apart many at once, and by the reader of whole logs where they differ.
"""

from __future__ import annotations

import json
import mmap
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from pathlib import Path

import numpy as np

from moewright.codec.files import read_part
from moewright.diagnosis.step_noise import Floats
from moewright.diagnosis.traces.foreign_logs import MLPERF_MARK, read_mlperf_steps
from moewright.diagnosis.traces.log_facts import HEAD_BYTES
from moewright.diagnosis.traces.megatron_log import (
    STEP_DIGITS,
    find_latest,
    parse_log,
)
from moewright.diagnosis.traces.megatron_pieces import ELAPSED_MS, PieceSteps, read_piece
from moewright.diagnosis.traces.torchtitan_pieces import TITAN_RATE, read_titan_piece
from moewright.spec.errors import BadInput, Reason

_ELAPSED = b"elapsed time per iteration"
_LONGEST_LINE = 1 << 17  # what has no newline for so long is no line of a step
_PIECE_BYTES = 1 << 22  # of a log that are taken apart at once


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLine:
    """A step as its line says; `total` is 0 where it does not say how many there are.

    `tokens_per_s` is of a device, where the line has a rate in place of seconds; else 0.
    """

    number: int
    step_s: float
    loss: float = nan
    total: int = 0
    tokens_per_s: float = 0.0


@dataclass(slots=True)
class StepSeries:
    """The steps of a log, in the order of their numbers once `sort` has been called.

    `offsets` are the places of their lines in the file, `end` that of the first line that is not
    read yet. Where the log has rates alone, seconds are those of a token of a device.
    """

    trainer: str = ""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    steps_s: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    total: int = 0
    end: int = 0
    has_rates: bool = False

    def add(self, step: StepLine, offset: int) -> None:
        """Add a step, unless its number or its time is none that a step has."""
        if not (0 <= step.number < 10**STEP_DIGITS and 0 <= step.total < 10**STEP_DIGITS):
            return
        seconds = step.step_s
        if step.tokens_per_s:
            self.has_rates = True
            seconds = 1 / step.tokens_per_s
        if not (isfinite(seconds) and seconds > 0):
            return
        self.numbers.append(step.number)
        self.steps_s.append(seconds)
        self.losses.append(step.loss)
        self.offsets.append(offset)
        self.total = step.total or self.total

    def clear(self) -> None:
        """Forget all steps."""
        for values in (self.numbers, self.steps_s, self.losses, self.offsets):
            del values[:]

    def extend(self, steps: PieceSteps, place: int) -> None:
        """Add the steps of a piece of the log that begins at a place of it."""
        self.numbers.frombytes(steps.numbers.tobytes())
        self.steps_s.frombytes(steps.steps_s.tobytes())
        self.losses.frombytes(steps.losses.tobytes())
        self.offsets.frombytes((steps.offsets + place).tobytes())

    def sort(self) -> SortedSteps:
        """Return the steps that count, by number (`find_latest`)."""
        numbers = np.array(self.numbers, dtype=np.int64)
        kept = find_latest(numbers)
        return SortedSteps(
            numbers=tuple(numbers[kept].tolist()),
            steps_s=np.array(self.steps_s, dtype=float)[kept],
            losses=np.array(self.losses, dtype=float)[kept],
            offsets=tuple(np.array(self.offsets, dtype=np.int64)[kept].tolist()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedSteps:
    """The steps of a log by number, each once."""

    numbers: tuple[int, ...]
    steps_s: Floats
    losses: Floats
    offsets: tuple[int, ...]


def read_new_steps(path: Path, series: StepSeries) -> None:
    """Add the steps of a log that are complete and not read yet.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        if size <= series.end:
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            stop = _find_last_end(text, series.end, size)
            _scan(text, series, stop)
            series.end = max(series.end, stop)
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise BadInput(Reason(field=str(path), rule=rule)) from None


def _find_last_end(text: mmap.mmap, start: int, size: int) -> int:
    """Return the place behind the last line, or the last state of a progress bar, that is whole."""
    newline = text.rfind(b"\n", start, size)
    drawn = text.rfind(b"\r", max(start, newline, size - _LONGEST_LINE), size)
    return max(newline, drawn) + 1


def _find_line(text: mmap.mmap, place: int, stop: int) -> tuple[int, int]:
    """Return where the line around a place begins and ends.

    A progress bar that is drawn over itself returns in place of ending a line.
    """
    first = max(0, place - _LONGEST_LINE)
    last = min(place + _LONGEST_LINE, stop)
    start = max(text.rfind(b"\n", first, place) + 1, first)
    end = text.find(b"\n", place, last)
    end = last if end < 0 else end
    # Within the line alone: a log that draws no bar has no return to be found for megabytes.
    drawn = text.find(b"\r", place, end)
    return max(text.rfind(b"\r", start, place) + 1, start), end if drawn < 0 else drawn


def _scan(text: mmap.mmap, series: StepSeries, stop: int) -> None:
    for trainer, scan in _DIALECTS:
        if series.trainer in ("", trainer) and scan(text, series, stop):
            series.trainer = trainer
            return


def _scan_marked(
    mark: bytes,
    parse: Callable[[bytes], StepLine | None],
    text: mmap.mmap,
    series: StepSeries,
    stop: int,
) -> bool:
    """Add the steps of lines that have a mark; False where none is."""
    place = series.end
    has_steps = False
    while (place := text.find(mark, place, stop)) >= 0:
        start, end = _find_line(text, place, stop)
        step = parse(text[start:end])
        if step is not None:
            series.add(step, start)
            has_steps = True
        place = end
    return has_steps


def _scan_megatron(text: mmap.mmap, series: StepSeries, stop: int) -> bool:
    if text.find(_ELAPSED, series.end, stop) < 0:
        return False
    return _scan_usual(text, series, stop) or _scan_marked(
        _ELAPSED, _parse_whole, text, series, stop
    )


def _scan_usual(text: mmap.mmap, series: StepSeries, stop: int) -> bool:
    """Add the steps of lines of Megatron-LM; False where none is.

    Pieces in which every line with a step is as Megatron-LM prints it are taken apart at once
    (`megatron_pieces`), others line by line.
    """
    first = len(series.numbers)
    for place, piece in _cut(text, series.end, text.rfind(b"\n", series.end, stop) + 1):
        if ELAPSED_MS in piece:
            steps = read_piece(piece)
            if steps is None:
                _add_line_by_line(piece, place, series)
            else:
                series.extend(steps, place)
    if len(series.numbers) == first:
        return False
    match = _OF.search(text[series.offsets[-1] : series.offsets[-1] + _LONGEST_LINE])
    series.total = int(match[1]) if match else series.total
    return True


def _cut(text: mmap.mmap, place: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of whole lines, each with its place; the last one ends where the text does."""
    while place < stop:
        end = text.rfind(b"\n", place, min(place + _PIECE_BYTES, stop)) + 1
        if end <= place:  # a line that is longer
            end = text.find(b"\n", place, stop) + 1 or stop
        yield place, text[place:end]
        place = end


def _scan_torchtitan(text: mmap.mmap, series: StepSeries, stop: int) -> bool:
    """Add the steps of lines of torchtitan; False where none is.

    Pieces are taken apart at once where their lines allow it (`torchtitan_pieces`), by a pattern
    where they do not.
    """
    first = len(series.numbers)
    for place, piece in _cut(text, series.end, stop):
        if TITAN_RATE not in piece:
            continue
        steps = read_titan_piece(piece)
        if steps is not None:
            series.extend(steps, place)
            continue
        for match in _TITAN.finditer(piece):
            rate = _to_float(match[3])
            step = StepLine(
                number=int(match[1]), step_s=0.0, loss=_to_float(match[2]), tokens_per_s=rate
            )
            series.add(step, place + match.start())
    series.has_rates = series.has_rates or len(series.numbers) > first
    return len(series.numbers) > first


def _scan_mlperf(text: mmap.mmap, series: StepSeries, stop: int) -> bool:
    """Add the steps of records of MLPerf; False where none is.

    What a record counts in is said by others before it, so that a log that grows is read anew.
    """
    if text.find(MLPERF_MARK, series.end, stop) < 0:
        return False
    steps = read_mlperf_steps(text[:stop])
    series.clear()
    for step in steps:
        line = StepLine(number=step.number, step_s=step.step_s, loss=step.loss)
        series.add(line, step.offset)
    return bool(steps)


def _add_line_by_line(piece: bytes, place: int, series: StepSeries) -> None:
    mark = piece.find(_ELAPSED)
    while mark >= 0:
        start = piece.rfind(b"\n", max(0, mark - _LONGEST_LINE), mark) + 1
        end = piece.find(b"\n", mark)
        step = _parse_whole(piece[start : min(end, start + _LONGEST_LINE)])
        if step is not None:
            series.add(step, place + start)
        mark = piece.find(_ELAPSED, end)


def _parse_whole(line: bytes) -> StepLine | None:
    """Return the step of any line of Megatron-LM, Megatron Bridge or Megatron-DeepSpeed."""
    log = parse_log(line.decode("utf-8", "replace"))
    if not log.iterations:
        return None
    (iteration, *_) = log.iterations
    match = _OF.search(line)
    return StepLine(
        number=iteration.number,
        step_s=iteration.step_s,
        loss=iteration.loss,
        total=int(match[1]) if match else 0,
    )


_STEP = rb"(\d{1,%d})\b" % STEP_DIGITS
_OF = re.compile(rb"iteration[ =]+\d+\s*/\s*" + _STEP)
_NUMBER = rb"([-+]?[\d,]+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan)"
_NEMO = re.compile(rb"train_step_timing in s\W+" + _NUMBER)
_NEMO_STEP = re.compile(rb"(?:iteration|global_step)\W+" + _STEP + rb"(?:\s*/\s*" + _STEP + rb")?")
_NEMO_LOSS = re.compile(rb"reduced_train_loss\W+" + _NUMBER)
_NEMO_BAR = re.compile(rb"\|\s*\d+/" + _STEP + rb" \[")
_COLOURS = rb"(?:\x1b\[[\d;]*m)*"
# To the end of its line, of which the first step counts. Fields lie within a thousand letters, so
# that a text without lines is not gone through again from each of its steps.
_TITAN = re.compile(
    rb"step:[ \t]*"
    + _COLOURS
    + _STEP
    + rb"[^\n\r]{0,1000}?loss:[ \t]*"
    + _COLOURS
    + _NUMBER
    + rb"[^\n\r]{0,1000}?tps:[ \t]*"
    + _COLOURS
    + rb"([\d,]+)[^\n\r]*"
)


def _parse_nemo(line: bytes) -> StepLine | None:
    timing, step = _NEMO.search(line), _NEMO_STEP.search(line)
    if timing is None or step is None:
        return None
    loss, bar = _NEMO_LOSS.search(line), _NEMO_BAR.search(line)
    total = int(bar[1]) if bar else 0
    return StepLine(
        number=int(step[1]) + 1,
        step_s=_to_float(timing[1]),
        loss=_to_float(loss[1]) if loss else nan,
        total=int(step[2]) + 1 if step[2] else total,
    )


def _parse_engine(line: bytes) -> StepLine | None:
    try:
        record = json.loads(line)
        step, loss = int(record["step"]), float(record["loss"])
        return StepLine(number=step, step_s=float(record["step_s"]), loss=loss)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _parse_recorder(line: bytes) -> StepLine | None:
    try:
        record = json.loads(line)
        return StepLine(number=int(record["recorded_step"]), step_s=float(record["step_s"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _to_float(text: bytes) -> float:
    try:
        return float(text.replace(b",", b""))
    except ValueError:
        return nan


# Each finds what a line of its trainer has, and no other's.
_DIALECTS: tuple[tuple[str, Callable[[mmap.mmap, StepSeries, int], bool]], ...] = (
    ("Megatron-LM", _scan_megatron),
    ("NeMo", partial(_scan_marked, b"train_step_timing in s", _parse_nemo)),
    ("torchtitan", _scan_torchtitan),
    ("MLPerf", _scan_mlperf),
    ("moewright", partial(_scan_marked, b'"kind": "step"', _parse_engine)),
    ("the step recorder", partial(_scan_marked, b'"recorded_step": ', _parse_recorder)),
)


def lacks_seconds(path: Path) -> bool:
    """Return whether a log has steps of NeMo, which prints their seconds where it is told to."""
    return _NEMO_LOSS.search(read_part(path, HEAD_BYTES)) is not None
