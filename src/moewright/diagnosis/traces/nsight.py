"""Nsight Systems exports (`nsys export --type sqlite`) as Captures.

Tables and columns as NVIDIA's exporter schema documents them; versions differ, so each is asked for
before it is used. Times are nanoseconds. A process is told by the bits above 24 of globalPid and
globalTid.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    KernelKind,
    KernelTableBuilder,
    collective_in_name,
    comm_library,
)
from moewright.diagnosis.traces.intervals import Intervals, merge
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Collective

NS = 1e-9
KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
_NAMES = ("demangledName", "shortName", "mangledName")
_PROCESS = 1 << 24
_STEP = re.compile(
    r"^(ProfilerStep#|iteration|iter|step|train_?step|training step|global_step)[ _#:=]*\d*$",
    re.IGNORECASE,
)
_LOADING = re.compile(
    r"dataloader|get_batch|batch[-_ ]generator|next_batch|data_iterator", re.IGNORECASE
)
_COLLECTING = re.compile(r"garbage|gc[._ ]?collect|python gc", re.IGNORECASE)


def read_nsight(path: Path) -> tuple[Capture, ...]:
    """One Capture for each process and device that ran kernels. Raises BadInput when there are
    none."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _captures(database, path)
    except sqlite3.Error as error:
        raise BadInput(
            Reason(field=str(path), rule=f"is not an export of Nsight Systems: {error}")
        ) from None


def _captures(database: sqlite3.Connection, path: Path) -> tuple[Capture, ...]:
    tables = {
        name
        for (name,) in database.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        )
    }
    if KERNEL_TABLE not in tables:
        rule = f"holds no kernels (no table {KERNEL_TABLE})"
        raise BadInput(
            Reason(field=str(path), rule=rule, nearest="a profile recorded with --trace=cuda,nvtx")
        )
    texts = (
        dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    )
    ranges = _ranges(database, tables, texts)
    runtime = _rows(
        database,
        tables,
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        ("start", "end", "correlationId", "globalTid", "nameId"),
    )
    launches = {
        (_process(tid), corr): start * NS for start, _, corr, tid, _ in runtime if corr is not None
    }
    found: dict[tuple[int, int], KernelTableBuilder] = {}
    for table, name in (
        (KERNEL_TABLE, ""),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "memcpy"),
        ("CUPTI_ACTIVITY_KIND_MEMSET", "memset"),
    ):
        _collect(database, tables, table, name, texts, launches, ranges, found)
    _collect(
        database,
        tables,
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "CUDA graph",
        texts,
        launches,
        ranges,
        found,
    )
    devices = _devices(database, tables)
    captures = []
    for rank, ((process, device), columns) in enumerate(sorted(found.items())):
        ours = [row for row in runtime if process in (0, _process(row[3]))]
        here = [(span, text) for owner, span, text in ranges if process in (0, owner)]
        name, memory = devices.get(device, ("", 0))
        captures.append(
            Capture(
                source=path.name,
                rank=rank,
                device=name,
                memory_bytes=memory,
                allocated_bytes=0,
                reserved_bytes=0,
                kernels=columns.build(),
                streams=columns.streams,
                channels=columns.channels,
                steps=_steps(here),
                syncs=_spans(
                    [
                        (s * NS, e * NS)
                        for s, e, _, _, n in ours
                        if e and "ynchronize" in str(texts.get(n, ""))
                    ]
                ),
                data_waits=_spans([span for span, text in here if _LOADING.search(text)]),
                gc_pauses=_spans([span for span, text in here if _COLLECTING.search(text)]),
                notes=("Nsight Systems records no shapes: rates of matrix products are not known",),
            )
        )
    return tuple(captures)


_Span = tuple[float, float]
_Range = tuple[int, _Span, str]  # process, seconds, text


def _collect(
    database: sqlite3.Connection,
    tables: set[str],
    table: str,
    name: str,
    texts: Mapping[int, str],
    launches: Mapping[tuple[int, Any], float],
    ranges: Sequence[_Range],
    found: dict[tuple[int, int], KernelTableBuilder],
) -> None:
    """Rows of one table of device activities; `name` for those that have none of their own."""
    wanted = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", *_NAMES)
    exchanges = [
        (span, collective_in_name(text))
        for _, span, text in ranges
        if text.startswith(("nccl", "c10d", "record_param"))
    ]
    exchanges.sort(key=lambda each: each[0])
    starts = [span[0] for span, _ in exchanges]
    for start, end, device, stream, corr, pid, *named in _rows(database, tables, table, wanted):
        if start is None or end is None:
            continue
        said = name or next((_text(texts, value) for value in named if value is not None), "")
        process = _process(pid)
        columns = found.setdefault((process, int(device or 0)), KernelTableBuilder())
        launched = launches.get((process, corr), float("nan"))
        work = KernelKind.COPY if name.startswith("mem") else columns.kind(said)
        channel = -1
        if work is KernelKind.COMMUNICATION:
            op = collective_in_name(said) or _around(exchanges, starts, launched)
            channel = columns.channel_index(
                CommChannel(op=op, stream=str(stream), library=comm_library(said), kernel=said)
            )
        columns.add(
            name=said,
            start_s=start * NS,
            end_s=end * NS,
            stream=str(stream),
            launched_s=launched,
            kind=work,
            channel_index=channel,
        )


def _around(
    exchanges: Sequence[tuple[_Span, Collective | None]], starts: Sequence[float], launched: float
) -> Collective | None:
    """The collective whose range was open when a kernel was launched."""
    at = int(np.searchsorted(starts, launched, side="right")) - 1
    return next(
        (op for span, op in exchanges[max(0, at - 3) : at + 1][::-1] if span[1] >= launched), None
    )


def _rows(
    database: sqlite3.Connection, tables: set[str], table: str, wanted: Sequence[str]
) -> list[tuple[Any, ...]]:
    """The columns asked for, NULL for those that this version does not have; [] without the
    table."""
    if table not in tables:
        return []
    have = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    if not {"start", "end"} <= have and "start" in wanted:
        return []
    columns = ", ".join(f'"{name}"' if name in have else "NULL" for name in wanted)
    return database.execute(f"SELECT {columns} FROM {table}").fetchall()


def _ranges(
    database: sqlite3.Connection, tables: set[str], texts: Mapping[int, str]
) -> list[_Range]:
    """NVTX ranges that ended."""
    rows = _rows(database, tables, "NVTX_EVENTS", ("start", "end", "text", "textId", "globalTid"))
    return [
        (
            _process(tid),
            (start * NS, end * NS),
            str(text if text is not None else texts.get(number, "")),
        )
        for start, end, text, number, tid in rows
        if start is not None and end is not None
    ]


def _steps(ranges: Sequence[tuple[_Span, str]]) -> tuple[_Span, ...]:
    """Ranges that are named like steps, of the name that is used most."""
    named: dict[str, list[_Span]] = {}
    for span, text in ranges:
        if found := _STEP.match(text.strip()):
            named.setdefault(found[1].casefold(), []).append(span)
    most = max(named.values(), key=len, default=[])
    return tuple(sorted(most))


def _devices(database: sqlite3.Connection, tables: set[str]) -> dict[int, tuple[str, int]]:
    """Name and memory of the GPUs by number."""
    if "TARGET_INFO_GPU" in tables:
        have = {row[1] for row in database.execute("PRAGMA table_info(TARGET_INFO_GPU)")}
        key = next((name for name in ("cuDevice", "id") if name in have), "rowid")
        rows = _rows(database, tables, "TARGET_INFO_GPU", (key, "name", "totalMemory"))
        return {
            int(number or 0): (str(name or ""), int(memory or 0)) for number, name, memory in rows
        }
    rows = _rows(database, tables, "TARGET_INFO_CUDA_GPU", ("cudaId", "name", "memorySize"))
    return {int(number or 0): (str(name or ""), int(memory or 0)) for number, name, memory in rows}


def _text(texts: Mapping[int, str], value: Any) -> str:
    return texts.get(value, str(value)) if isinstance(value, int) else str(value)


def _process(value: Any) -> int:
    return int(value) // _PROCESS if value is not None else 0


def _spans(found: Sequence[_Span]) -> Intervals:
    return merge(np.array(found, dtype=np.float64).reshape(-1, 2))
