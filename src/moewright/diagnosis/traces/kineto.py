"""Traces of the PyTorch profiler (Kineto's Chrome JSON, plain or gzipped) as Captures.

Keys are as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be
missing, and older versions name categories otherwise. Times are microseconds. A file is read piece
by piece, and only columns of numbers are kept of its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from moewright.codec.foreign import budget, read_apart
from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    GroupedRows,
    KernelKind,
    KernelRow,
    KernelTable,
    KernelTableBuilder,
    collective_in_name,
    comm_library,
)
from moewright.diagnosis.traces.comm_classes import find_trainer_marks
from moewright.diagnosis.traces.cpu_traces import read_cpu_captures
from moewright.diagnosis.traces.intervals import Intervals
from moewright.diagnosis.traces.kineto_events import (
    HOST_CATEGORIES,
    RUNTIME_CATEGORIES,
    HostEvents,
    TimeSpan,
    external_id,
    find_rank,
    parse_event,
    parse_ranks,
    read_payload_bytes,
    read_span,
    steps_between,
    thread_of,
    to_int,
    to_intervals,
    to_key,
)
from moewright.diagnosis.traces.trace_stream import TraceStream
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import plural

_KIND_OF_CATEGORY = {
    "kernel": None,  # its name decides
    "gpu_memcpy": KernelKind.COPY,
    "gpu_memset": KernelKind.COPY,
    "memcpy": KernelKind.COPY,
    "memset": KernelKind.COPY,
}
_CUDA_DEVICE_TYPE = 1
_TRACE_SUFFIXES = (".json", ".json.gz")
_OUTLIER_S = 1e6  # from the median start: a damaged time
_SHOWN_FILES = 3


def read_traces(
    path: Path, *, report_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[Capture, ...]:
    """Read a trace, or every trace of a folder, as one Capture a device and file.

    Of a folder, files that are no trace are left out with a note, as long as one is a trace. So are
    traces that break off, as long as one is whole: a mean over ranks would take what they lack for
    time that was not spent. `report_progress` is called with the bytes that have been read, and
    those of all files.

    Raises:
        BadInput: a file is no trace, or none of a folder is.
    """
    if path.is_file():
        captures, _ = _read_file(path, 0, report_progress=report_progress)
        return captures
    whole: list[Capture] = []
    cut: list[Capture] = []
    left_out: list[str] = []
    cut_names: list[str] = []
    refusals: list[BadInput] = []
    files = sorted(file for file in path.rglob("*.json*") if _is_trace_name(file))
    total_bytes = sum(file.stat().st_size for file in files)
    read_bytes = 0
    for index, file in enumerate(files):
        report_progress(read_bytes, total_bytes)
        read_bytes += file.stat().st_size
        try:
            captures, is_cut = _read_file(file, index)
        except BadInput as error:
            refusals.append(error)
            left_out.append(str(error))
            continue
        (cut if is_cut else whole).extend(captures)
        if is_cut:
            cut_names.append(f"{file}: was cut off")
    if whole:
        left_out += cut_names
    elif not cut and refusals:
        raise refusals[0]
    notes = [f"left out: {reason}" for reason in left_out[:_SHOWN_FILES]]
    if len(left_out) > _SHOWN_FILES:
        notes.append(f"left out: {plural(len(left_out) - _SHOWN_FILES, 'more file')}")
    return tuple(replace(capture, notes=(*capture.notes, *notes)) for capture in whole or cut)


def _is_trace_name(path: Path) -> bool:
    return path.is_file() and path.name.endswith(_TRACE_SUFFIXES)


@read_apart
def _read_file(
    path: Path,
    index: int,
    *,
    report_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[tuple[Capture, ...], bool]:
    """Read a capture for each device that ran kernels, and whether the file breaks off.

    Where the program computed on the CPU alone, read one for each process.

    Raises:
        BadInput: the file is no trace, or a device was used and only the host was recorded.
    """
    total_bytes = path.stat().st_size
    with budget(str(path), file_bytes=total_bytes):
        stream = TraceStream(path, lambda nbytes: report_progress(nbytes, total_bytes))
        return _read_captures(stream, index)


def _read_captures(stream: TraceStream, index: int) -> tuple[tuple[Capture, ...], bool]:
    path = stream.path
    collector = _TraceCollector()
    for batch in stream.batches():
        collector.add(batch)
    if collector.builders:
        captures = tuple(collector.captures(path, index, stream.metadata))
    elif collector.other_device:
        rule = f"is of a device whose activities are not read ({collector.other_device})"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="a trace of CUDA, HIP or XPU"))
    elif not collector.has_events and not stream.is_cut:
        rule = "holds no event: nothing ran while it was recorded"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="a trace of at least one step"))
    elif collector.used_device or stream.metadata.get("deviceProperties"):
        rule = "holds no work of a GPU: it was recorded without ProfilerActivity.CUDA"
        nearest = "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        if stream.is_cut:
            rule = "was cut off before any work of a GPU"
            nearest = "the whole file"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest))
    else:
        raw_events = [event for batch in TraceStream(path).batches() for event in batch]
        events = [event for event in map(parse_event, raw_events) if event is not None]
        captures = tuple(read_cpu_captures(events, raw_events, stream.metadata, path, index))
    captures = tuple(
        replace(capture, notes=(*capture.notes, *stream.notes)) for capture in captures
    )
    return captures, stream.is_cut


class _TraceCollector:
    """What is kept of a trace's events: rows by device, the host's side, and peaks of memory."""

    def __init__(self) -> None:
        self.builders: dict[str, KernelTableBuilder] = {}
        self.other_device = ""  # category of a device's calls that are not read
        self._host = HostEvents()
        self._peak_bytes: dict[str, tuple[int, int]] = {}  # by device: allocated, reserved
        self._has_operations = False
        self._has_runtime = False
        self._categories: dict[str, str] = {}  # in lower case
        self._first_s = float("inf")

    @property
    def has_events(self) -> bool:
        """Return whether anything was recorded that took time."""
        return isfinite(self._first_s)

    @property
    def used_device(self) -> bool:
        """Return whether the program used a device, recorded or not; True without operations."""
        sent = any(name.startswith("nccl:") for name in self._host.names)
        return self._has_runtime or sent or not self._has_operations

    def add(self, events: Sequence[Any]) -> None:
        """Add events; what is none is passed over."""
        for event in events:
            if event.__class__ is not dict:
                continue
            name = event.get("name")
            if name == "[memory]":
                self._add_memory(event)
                continue
            category = self._category(event.get("cat"))
            if not category or event.get("ph", "X") != "X":
                continue
            span = read_span(event)
            if span is None:
                continue
            self._first_s = min(self._first_s, span[0])
            if name.__class__ is not str:
                name = str(name)
            args = event.get("args")
            if args.__class__ is not dict:
                args = {}
            if category in _KIND_OF_CATEGORY:
                self._add_activity(category, name, span, event, args)
            else:
                self._has_operations |= category == "cpu_op"
                self._has_runtime |= category in RUNTIME_CATEGORIES
                self._host.add(category, name, span, args, thread_of(event))

    def _category(self, value: Any) -> str:
        """Return a category that is kept, in lower case; "" for another."""
        if value.__class__ is not str:
            return ""
        kept_name = self._categories.get(value)
        if kept_name is None:
            folded = value.casefold()
            kept = (*_KIND_OF_CATEGORY, *RUNTIME_CATEGORIES, *HOST_CATEGORIES)
            kept_name = self._categories[value] = folded if folded in kept else ""
            if folded.endswith("_runtime") and not kept_name:
                self.other_device = folded
        return kept_name

    def _add_memory(self, event: Mapping[str, Any]) -> None:
        args = event.get("args")
        if not isinstance(args, dict) or args.get("Device Type") != _CUDA_DEVICE_TYPE:
            return
        device = str(args.get("Device Id", ""))
        allocated_bytes, reserved_bytes = self._peak_bytes.get(device, (0, 0))
        self._peak_bytes[device] = (
            max(allocated_bytes, to_int(args.get("Total Allocated"))),
            max(reserved_bytes, to_int(args.get("Total Reserved"))),
        )

    def _add_activity(
        self,
        category: str,
        name: str,
        span: TimeSpan,
        event: Mapping[str, Any],
        args: Mapping[str, Any],
    ) -> None:
        device = str(args.get("device", event.get("pid", 0)))
        builder = self.builders.get(device)
        if builder is None:
            builder = self.builders[device] = KernelTableBuilder()
        kind = _KIND_OF_CATEGORY[category] or builder.kind(name)
        stream = str(args.get("stream", event.get("tid", 0)))
        channel_index = -1
        payload_bytes = 0.0
        if kind is KernelKind.COMMUNICATION:
            channel_index = builder.channel_index(_build_channel(name, args, stream))
            payload_bytes = read_payload_bytes(args)
        elif kind is KernelKind.COPY:
            payload_bytes = max(0.0, np.nan_to_num(to_key(args.get("bytes")), posinf=0.0))
        row = KernelRow(
            name=name,
            start_s=span[0],
            end_s=span[1],
            stream=stream,
            kind=kind,
            channel_index=channel_index,
            payload_bytes=payload_bytes,
            correlation=to_key(args.get("correlation")),
            external_id=external_id(args),
        )
        builder.add(row)

    def captures(self, path: Path, index: int, metadata: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield a capture for each device."""
        host = self._host
        recomputed = host.recomputed
        uncounted_flops = dict(host.matrix_flops)
        for device, builder in sorted(self.builders.items()):
            table, left_out = _drop_outliers(builder.build())
            kernels = _join(table, host, recomputed, uncounted_flops)
            properties = _device_properties(metadata, device)
            allocated_bytes, reserved_bytes = self._peak_bytes.get(
                device, self._peak_bytes.get("", (0, 0))
            )
            yield Capture(
                path=path,
                rank=find_rank(metadata, path, index),
                device=str(properties.get("name", "")),
                memory_bytes=to_int(properties.get("totalGlobalMem")),
                allocated_bytes=allocated_bytes,
                reserved_bytes=reserved_bytes,
                kernels=kernels,
                streams=builder.streams,
                channels=builder.channels,
                first_s=max(self._first_s, float(kernels.start_s.min()) - _OUTLIER_S),
                steps=tuple(sorted(host.steps or steps_between(host.optimizer_steps))),
                syncs=to_intervals(host.syncs),
                data_waits=to_intervals(host.data_waits),
                gc_pauses=to_intervals(host.gc_pauses),
                grouped_rows=_mean_grouped_rows(host),
                host_ranges=host.launching_ranges,
                trainer_marks=find_trainer_marks((*kernels.names, *host.names), builder.channels),
                notes=(f"left out: activities with impossible times, {left_out} of them",)
                if left_out
                else (),
            )


def _drop_outliers(table: KernelTable) -> tuple[KernelTable, int]:
    """Return the table without rows whose times are damaged, and how many those are."""
    is_near = np.abs(table.start_s - np.median(table.start_s)) < _OUTLIER_S
    left_out = int((~is_near).sum())
    return (table.select(is_near), left_out) if left_out else (table, 0)


def _join(
    table: KernelTable,
    host: HostEvents,
    recomputed: Intervals,
    uncounted_flops: dict[float, float],
) -> KernelTable:
    """Join activities with the calls that launched them and the operations that they belong to.

    Where a product ran as several kernels, the first one gets its FLOPs, which are taken out of
    `uncounted_flops`.
    """
    launched_s, launch_end_s = host.find_launches(table.correlation)
    flops = np.zeros(len(table.start_s))
    is_product = table.has_kind(KernelKind.GEMM, KernelKind.GROUPED_GEMM)
    for index in np.flatnonzero(is_product & ~np.isnan(table.external_id)).tolist():
        flops[index] = uncounted_flops.pop(float(table.external_id[index]), 0.0)
    places = np.searchsorted(recomputed[:, 0], launched_s, side="right") - 1
    is_recompute = np.zeros(len(launched_s), dtype=bool)
    if len(recomputed):
        inside = launched_s <= recomputed[np.maximum(places, 0), 1]
        is_recompute = (places >= 0) & inside
    return replace(
        table,
        launched_s=launched_s,
        launch_end_s=launch_end_s,
        flops=flops,
        is_recompute=is_recompute,
    )


def _build_channel(name: str, args: Mapping[str, Any], stream: str) -> CommChannel:
    collective = str(args.get("Collective name") or "")
    op = None
    if collective and collective != "coalesced":
        op = collective_in_name(collective)
    return CommChannel(
        op=op or collective_in_name(name),
        group=str(args.get("Process Group Name") or ""),
        description=str(args.get("Process Group Description") or ""),
        ranks=parse_ranks(args.get("Process Group Ranks")),
        size=to_int(args.get("Group size")),
        stream=stream,
        library=comm_library(name),
        kernel=name,
    )


def _mean_grouped_rows(host: HostEvents) -> GroupedRows | None:
    if not host.grouped_rows:
        return None
    rows, experts = zip(*host.grouped_rows, strict=True)
    return GroupedRows(rows=fmean(rows), experts=round(fmean(experts)))


def _device_properties(metadata: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    """Return the properties of a device; of the first one where it is not listed."""
    properties = metadata.get("deviceProperties")
    if not isinstance(properties, list):
        properties = []
    listed = [entry for entry in properties if isinstance(entry, dict)]
    first: dict[str, Any] = next(iter(listed), {})
    return next((entry for entry in listed if str(entry.get("id")) == device), first)
