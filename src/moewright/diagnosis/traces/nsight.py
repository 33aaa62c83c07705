"""Nsight Systems exports (`nsys export --type sqlite`) as Captures.

Tables and columns are as NVIDIA's exporter schema documents them; versions differ, so each is
looked for before it is used. Times are nanoseconds. A process is told by the bits above 24 of
globalPid and globalTid.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moewright.codec.files import read_part
from moewright.codec.foreign import budget, read_apart
from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    KernelKind,
    KernelRow,
    KernelTableBuilder,
    build_host_ranges,
    collective_in_name,
    comm_library,
)
from moewright.diagnosis.traces.comm_classes import find_trainer_marks
from moewright.diagnosis.traces.kineto_events import (
    DATA_WAIT_NAME,
    GC_NAME,
    TimeSpan,
    to_intervals,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Collective

NS = 1e-9  # Nsight's timestamps are nanoseconds
_SQLITE = b"SQLite format 3\0"
KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
# Tables of device activities, with a name for those that have none of their own.
_ACTIVITY_TABLES = (
    (KERNEL_TABLE, ""),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", "memcpy"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", "memset"),
    ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUDA graph"),
)
_COPIES = ("memcpy", "memset")
_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
_PROCESS_DIVISOR = 1 << 24
_COLLECTIVE_RANGES = ("nccl", "c10d", "record_param")
_OPEN_RANGES = 4  # ranges before a launch among which the open one is looked for
_STEP = re.compile(
    r"^(ProfilerStep#|iteration|iter|step|train_?step|training step|global_step)[ _#:=]*\d*$",
    re.IGNORECASE,
)
# Processes and devices of one export, which is of one machine: each searches all calls of the host.
_MOST_DEVICES = 256
_NOTE = "Nsight Systems records no shapes: rates of matrix products are not known"


@dataclass(frozen=True, kw_only=True, slots=True)
class _RuntimeCall:
    """A call of the CUDA runtime; `correlation` ties it to the activity that it launched."""

    process: int
    start_s: float
    end_s: float
    correlation: Any
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _NvtxRange:
    """An NVTX range that ended."""

    process: int
    span: TimeSpan
    text: str


# Operations of SQLite's machine; a scan of a table takes less than one a byte.
_OPERATIONS = 10_000_000
_OPERATIONS_A_BYTE = 20
_OPERATIONS_A_TURN = 100_000


class _Budget:
    """The work that reading a file may take: a view of a few bytes can have rows without end."""

    def __init__(self, nbytes: int) -> None:
        self._turns = (_OPERATIONS + _OPERATIONS_A_BYTE * nbytes) // _OPERATIONS_A_TURN

    def spend(self) -> bool:
        """Return whether nothing is left, which has SQLite give up."""
        self._turns -= 1
        return self.is_spent

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self._turns < 0


class _Export:
    """An export, of which tables and columns may be missing."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        self.tables = {name for (name,) in database.execute(query)}
        self._texts: Mapping[int, str] = {}
        if "StringIds" in self.tables:
            self._texts = dict(database.execute("SELECT id, value FROM StringIds"))

    def columns(self, table: str) -> set[str]:
        """Return the columns that this version has of a table."""
        return {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}

    def select(self, table: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return rows, with NULL for columns that this version lacks; [] without the table.

        A table of times that lacks them has no rows either.
        """
        if table not in self.tables:
            return []
        present = self.columns(table)
        if "start" in columns and not {"start", "end"} <= present:
            return []
        selected = ", ".join(f'"{name}"' if name in present else "NULL" for name in columns)
        return self._database.execute(f"SELECT {selected} FROM {table}").fetchall()

    def text(self, value: Any) -> str:
        """Return a text, which stands in a column itself or as the number of a string."""
        return self._texts.get(value, str(value)) if isinstance(value, int) else str(value)

    def text_of_id(self, text_id: Any) -> str:
        """Return the string of a number; "" where there is none."""
        return str(self._texts.get(text_id, ""))


def is_export(path: Path) -> bool:
    """Tell whether a file is a database, as Nsight Systems exports its reports."""
    return read_part(path, len(_SQLITE)) == _SQLITE


@read_apart
def read_nsight(path: Path) -> tuple[Capture, ...]:
    """Read one Capture for each process and device that ran kernels.

    Raises:
        BadInput: there are none, or the file is no such export.
    """
    nbytes = path.stat().st_size
    work = _Budget(nbytes)
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with (
            budget(str(path), file_bytes=nbytes),
            closing(sqlite3.connect(address, uri=True)) as database,
        ):
            database.set_progress_handler(work.spend, _OPERATIONS_A_TURN)
            return _build_captures(_Export(database), path)
    except sqlite3.Error as error:
        cause = "a view takes more work than its bytes" if work.is_spent else error
        rule = f"is not an export of Nsight Systems: {cause}"
        raise BadInput(Reason(field=str(path), rule=rule)) from None


def _build_captures(export: _Export, path: Path) -> tuple[Capture, ...]:
    nearest = "a profile recorded with --trace=cuda,nvtx"
    if KERNEL_TABLE not in export.tables:
        rule = f"holds no kernels (no table {KERNEL_TABLE})"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest))
    ranges = _read_ranges(export)
    calls = _read_runtime_calls(export)
    builders = _collect_activities(export, ranges, calls)
    if not builders:
        rule = f"holds no kernels (no times in {KERNEL_TABLE})"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest))
    if len(builders) > _MOST_DEVICES:
        rule = f"holds kernels of {len(builders)} processes and devices"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=f"{_MOST_DEVICES} at most"))
    devices = _read_devices(export)
    captures = []
    for rank, ((process, device), builder) in enumerate(sorted(builders.items())):
        own_calls = [call for call in calls if process in (0, call.process)]
        own_ranges = [nvtx for nvtx in ranges if process in (0, nvtx.process)]
        name, memory_bytes = devices.get(device, ("", 0))
        kernels = builder.build()
        captures.append(
            Capture(
                path=path,
                rank=rank,
                device=name,
                memory_bytes=memory_bytes,
                allocated_bytes=0,
                reserved_bytes=0,
                kernels=kernels,
                streams=builder.streams,
                channels=builder.channels,
                steps=_find_steps(own_ranges),
                first_s=0.0,  # the report's own zero
                syncs=to_intervals(
                    [
                        (call.start_s, call.end_s)
                        for call in own_calls
                        if call.end_s and "ynchronize" in call.name
                    ]
                ),
                data_waits=to_intervals(_spans_named(own_ranges, DATA_WAIT_NAME)),
                gc_pauses=to_intervals(_spans_named(own_ranges, GC_NAME)),
                host_ranges=build_host_ranges(
                    (nvtx.text, *nvtx.span) for nvtx in own_ranges if not _STEP.match(nvtx.text)
                ),
                trainer_marks=find_trainer_marks(
                    (*kernels.names, *{nvtx.text for nvtx in own_ranges}), builder.channels
                ),
                notes=(_NOTE,),
            )
        )
    return tuple(captures)


def _spans_named(ranges: Sequence[_NvtxRange], pattern: re.Pattern[str]) -> list[TimeSpan]:
    return [nvtx.span for nvtx in ranges if pattern.search(nvtx.text)]


def _read_runtime_calls(export: _Export) -> list[_RuntimeCall]:
    columns = ("start", "end", "correlationId", "globalTid", "nameId")
    rows = export.select("CUPTI_ACTIVITY_KIND_RUNTIME", columns)
    return [
        _RuntimeCall(
            process=_process(thread),
            start_s=start * NS,
            end_s=(end or 0) * NS,
            correlation=correlation,
            name=export.text_of_id(name_id),
        )
        for start, end, correlation, thread, name_id in rows
    ]


def _read_ranges(export: _Export) -> list[_NvtxRange]:
    columns = ("start", "end", "text", "textId", "globalTid")
    return [
        _NvtxRange(
            process=_process(thread),
            span=(start * NS, end * NS),
            text=str(text) if text is not None else export.text_of_id(text_id),
        )
        for start, end, text, text_id, thread in export.select("NVTX_EVENTS", columns)
        if start is not None and end is not None
    ]


class _OpenRanges:
    """The ranges of collectives, of which the one that was open at a launch can be found."""

    def __init__(self, ranges: Sequence[_NvtxRange]) -> None:
        named = (nvtx for nvtx in ranges if nvtx.text.startswith(_COLLECTIVE_RANGES))
        collectives = [(nvtx.span, collective_in_name(nvtx.text)) for nvtx in named]
        self._collectives = sorted(collectives, key=lambda pair: pair[0])
        self._starts = [span[0] for span, _ in self._collectives]

    def collective_at(self, launched_s: float) -> Collective | None:
        """Return the collective whose range was open at a time."""
        last = int(np.searchsorted(self._starts, launched_s, side="right"))
        recent = self._collectives[max(0, last - _OPEN_RANGES) : last]
        return next((op for span, op in reversed(recent) if span[1] >= launched_s), None)


def _collect_activities(
    export: _Export, ranges: Sequence[_NvtxRange], calls: Sequence[_RuntimeCall]
) -> dict[tuple[int, int], KernelTableBuilder]:
    """Collect the device activities of all tables by process and device."""
    open_ranges = _OpenRanges(ranges)
    launches = {
        (call.process, call.correlation): (call.start_s, call.end_s)
        for call in calls
        if call.correlation is not None
    }
    builders: dict[tuple[int, int], KernelTableBuilder] = {}
    for activity in _read_activities(export):
        builder = builders.setdefault((activity.process, activity.device), KernelTableBuilder())
        nowhere = (float("nan"), float("nan"))
        key = (activity.process, activity.correlation)
        launched_s, launch_end_s = launches.get(key, nowhere)
        kind = KernelKind.COPY if activity.is_copy else builder.kind(activity.name)
        channel_index = -1
        if kind is KernelKind.COMMUNICATION:
            op = collective_in_name(activity.name) or open_ranges.collective_at(launched_s)
            channel = CommChannel(
                op=op,
                stream=activity.stream,
                library=comm_library(activity.name),
                kernel=activity.name,
            )
            channel_index = builder.channel_index(channel)
        builder.add(
            KernelRow(
                name=activity.name,
                start_s=activity.start_s,
                end_s=activity.end_s,
                stream=activity.stream,
                launched_s=launched_s,
                launch_end_s=launch_end_s,
                kind=kind,
                channel_index=channel_index,
            )
        )
    return builders


@dataclass(frozen=True, kw_only=True, slots=True)
class _Activity:
    """A kernel, a copy or a graph that ran on a device."""

    process: int
    device: int
    stream: str
    start_s: float
    end_s: float
    correlation: Any
    name: str
    is_copy: bool


def _read_activities(export: _Export) -> Iterator[_Activity]:
    columns = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
    for table, table_name in _ACTIVITY_TABLES:
        for row in export.select(table, (*columns, *_KERNEL_NAMES)):
            start, end, device, stream, correlation, pid, *names = row
            if start is None or end is None:
                continue
            named = (export.text(name) for name in names if name is not None)
            yield _Activity(
                process=_process(pid),
                device=int(device or 0),
                stream=str(stream),
                start_s=start * NS,
                end_s=end * NS,
                correlation=correlation,
                name=table_name or next(named, ""),
                is_copy=table_name in _COPIES,
            )


def _find_steps(ranges: Sequence[_NvtxRange]) -> tuple[TimeSpan, ...]:
    """Return the ranges that are named like steps, of the name that is used most."""
    spans_of_name: dict[str, list[TimeSpan]] = {}
    for nvtx in ranges:
        if match := _STEP.match(nvtx.text.strip()):
            spans_of_name.setdefault(match[1].casefold(), []).append(nvtx.span)
    most_used = max(spans_of_name.values(), key=len, default=[])
    return tuple(sorted(most_used))


def _read_devices(export: _Export) -> dict[int, tuple[str, int]]:
    """Return name and memory of the GPUs by number."""
    if "TARGET_INFO_GPU" in export.tables:
        present = export.columns("TARGET_INFO_GPU")
        key = next((name for name in ("cuDevice", "id") if name in present), "rowid")
        rows = export.select("TARGET_INFO_GPU", (key, "name", "totalMemory"))
    else:
        rows = export.select("TARGET_INFO_CUDA_GPU", ("cudaId", "name", "memorySize"))
    return {
        int(number or 0): (str(name or ""), int(memory_bytes or 0))
        for number, name, memory_bytes in rows
    }


def _process(value: Any) -> int:
    return int(value) // _PROCESS_DIVISOR if value is not None else 0
