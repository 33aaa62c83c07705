"""Steps of TensorBoard's event files, read without TensorBoard.

Trainers that write the seconds of a step are known by their tags. Of all others a step is the time
between two values of the scalar that comes most often, by the clock that each event has.

A file is a row of records: eight bytes of length, four of checksum, an Event of protobuf, four of
checksum. Of an Event its step (field 2) and the simple values of its summary (field 5) are read,
and those of tensors with one float in `float_val` or `tensor_content`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

from moewright.codec.files import read_part
from moewright.diagnosis.traces.step_lines import StepLine, StepSeries
from moewright.spec.errors import BadInput, Reason

EVENT_FILES = "events.out.tfevents.*"
_LONGEST_RECORD = 1 << 24  # bytes: images and graphs of a model among them
# The tags of the seconds of a step and of its loss, by trainer.
_TAGS: Mapping[str, tuple[str, str]] = {
    "Megatron-LM": ("iteration-time", "lm loss"),
    "NeMo": ("train_step_timing in s", "reduced_train_loss"),
    "torchtitan": ("time_metrics/end_to_end(s)", "loss_metrics/global_avg_loss"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarEvent:
    """The scalars that an event has at a step, by tag, and when it was written."""

    step: int
    values: Mapping[str, float]
    written_s: float


def is_event_file(path: Path) -> bool:
    """Return whether a path is a file of TensorBoard's, by its name, or a folder with one."""
    return path.match(EVENT_FILES) or (path.is_dir() and any(path.glob(EVENT_FILES)))


class EventReader:
    """Reads an event file, or all of a folder: each start of a run begins one of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: dict[Path, int] = {}
        self._has_seconds = False
        self._clock_tag = ""
        self._latest: dict[Path, tuple[int, float]] = {}  # step and time of the clock's tag

    def read_new(self, series: StepSeries) -> None:
        """Add the steps that are complete and not read yet.

        Raises:
            BadInput: a file cannot be read, or is none of TensorBoard's.
        """
        paths = [self._path]
        if self._path.is_dir():  # by the time of their start, which their names begin with
            paths = sorted(self._path.glob(EVENT_FILES))
        for path in paths:
            self._take(path, self._read_file(path), series)

    def _read_file(self, path: Path) -> list[tuple[int, ScalarEvent]]:
        begin = self._ends.get(path, 0)
        data = read_part(path, -1, begin=begin)
        events = []
        done = 0
        try:
            for place, end, event in _read_events(data):
                events.append((begin + place, event))
                done = end
        except (ValueError, IndexError, struct.error):
            rule = "is no event file of TensorBoard"
            raise BadInput(Reason(field=str(path), rule=rule)) from None
        self._ends[path] = begin + done
        return events

    def _take(
        self, path: Path, events: Sequence[tuple[int, ScalarEvent]], series: StepSeries
    ) -> None:
        seconds: dict[int, tuple[float, int]] = {}
        losses: dict[int, float] = {}
        for offset, event in events:
            for trainer, (time_tag, loss_tag) in _TAGS.items():
                if time_tag in event.values:
                    series.trainer = trainer
                    seconds[event.step] = (event.values[time_tag], offset)
                if loss_tag in event.values:
                    losses[event.step] = event.values[loss_tag]
        if seconds and not self._has_seconds:
            self._has_seconds = True
            series.clear()  # of what the clock said until the first came
        if not self._has_seconds:
            seconds, losses = self._read_clock(path, events)
            series.trainer = "TensorBoard"
        for step, (step_s, offset) in seconds.items():
            series.add(StepLine(number=step, step_s=step_s, loss=losses.get(step, nan)), offset)

    def _read_clock(
        self, path: Path, events: Sequence[tuple[int, ScalarEvent]]
    ) -> tuple[dict[int, tuple[float, int]], dict[int, float]]:
        """Return the seconds of steps between the values of a tag, and the losses."""
        counts = Counter(tag for _, event in events for tag in event.values)
        if not self._clock_tag and counts:
            most = max(counts.values())
            often = [tag for tag, count in counts.items() if count == most]
            self._clock_tag = next((tag for tag in often if "loss" in tag.lower()), often[0])
        seconds: dict[int, tuple[float, int]] = {}
        losses: dict[int, float] = {}
        for offset, event in events:
            if self._clock_tag not in event.values:
                continue
            if "loss" in self._clock_tag.lower():
                losses[event.step] = event.values[self._clock_tag]
            before = self._latest.get(path)
            self._latest[path] = (event.step, event.written_s)
            if before is not None and event.step > before[0]:
                step_s = (event.written_s - before[1]) / (event.step - before[0])
                seconds[event.step] = (step_s, offset)
        return seconds, losses


def _read_events(data: bytes) -> Iterator[tuple[int, int, ScalarEvent]]:
    """Yield the events of whole records, each with its place and the place behind it."""
    for place, begin, end in _split_records(data):
        yield place, end + 4, _parse_event(data[begin:end])


def _split_records(data: bytes) -> Iterator[tuple[int, int, int]]:
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        if length > _LONGEST_RECORD:
            raise ValueError(length)
        begin = place + 12
        if begin + length + 4 > len(data):
            return
        yield place, begin, begin + length
        place = begin + length + 4


def _parse_event(data: bytes) -> ScalarEvent:
    step = 0
    written_s = 0.0
    values: dict[str, float] = {}
    for number, value in _parse_fields(data):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            written_s = struct.unpack("<d", value)[0]
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            values.update(_parse_summary(value))
    return ScalarEvent(step=step, values=values, written_s=written_s)


def _parse_summary(data: bytes) -> Iterator[tuple[str, float]]:
    for number, value in _parse_fields(data):
        if number == 1 and isinstance(value, bytes):
            fields = dict(_parse_fields(value))
            tag, simple, tensor = fields.get(1), fields.get(2), fields.get(8)
            scalar: float | None = None
            if isinstance(simple, bytes):  # the fixed 32 bits
                scalar = struct.unpack("<f", simple)[0]
            elif isinstance(tensor, bytes):
                scalar = _parse_tensor(tensor)
            if isinstance(tag, bytes) and scalar is not None:
                yield tag.decode("utf-8", "replace"), scalar


def _parse_tensor(data: bytes) -> float | None:
    """Return the one float of a tensor (float_val, field 5; tensor_content, field 4)."""
    for number, value in _parse_fields(data):
        if number in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
    return None


def _parse_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the numbers and values of the fields of a message; fixed ones are bytes."""
    place = 0
    while place < len(data):
        key, place = _parse_varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _parse_varint(data, place)
            yield number, value
            continue
        if kind == 2:
            length, place = _parse_varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(kind)
        if place + length > len(data):
            raise ValueError(length)
        yield number, data[place : place + length]
        place += length


def _parse_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError(value)
