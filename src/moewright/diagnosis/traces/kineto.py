"""Traces of the PyTorch profiler (Kineto's Chrome JSON, plain or gzipped) as Captures.

Keys are as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be
missing, and older versions name categories otherwise. Times are microseconds.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from moewright.codec import read_bytes
from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    GroupedRows,
    KernelKind,
    KernelRow,
    KernelTableBuilder,
    collective_in_name,
    comm_library,
)
from moewright.diagnosis.traces.cpu_traces import read_cpu_captures
from moewright.diagnosis.traces.intervals import Intervals
from moewright.diagnosis.traces.kineto_events import (
    RUNTIME_CATEGORIES,
    HostEvents,
    collect_host_events,
    covers,
    external_id,
    find_rank,
    parse_event,
    parse_ranks,
    read_payload_bytes,
    steps_between,
    to_int,
    to_intervals,
)
from moewright.diagnosis.traces.trainer_marks import find_trainer_marks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import GIB, format_bytes

_KIND_OF_CATEGORY = {
    "kernel": None,  # its name decides
    "gpu_memcpy": KernelKind.COPY,
    "gpu_memset": KernelKind.COPY,
    "memcpy": KernelKind.COPY,
    "memset": KernelKind.COPY,
}
_CUDA_DEVICE_TYPE = 1
_TRACE_SUFFIXES = (".json", ".json.gz")
_GZIP_MAGIC = b"\x1f\x8b"
_LARGEST_TRACE_BYTES = 4 * GIB
_EXPECTED_FILE = "the .json of torch.profiler"


@dataclass(frozen=True, kw_only=True, slots=True)
class _TraceFile:
    """A trace file, with its index among those that are read and what it says besides events."""

    path: Path
    index: int
    metadata: Mapping[str, Any]


def read_traces(path: Path) -> tuple[Capture, ...]:
    """Read a trace, or every trace of a folder, as one Capture a device and file.

    Raises:
        BadInput: a file is no trace.
    """
    files = [path]
    if not path.is_file():
        files = sorted(file for file in path.rglob("*.json*") if _is_trace_name(file))
    captures = []
    for index, file in enumerate(files):
        trace = load_trace(file)
        captures += [
            replace(capture, notes=(*capture.notes, *trace.notes))
            for capture in build_captures(trace.data, file, index)
        ]
    return tuple(captures)


def _is_trace_name(path: Path) -> bool:
    return path.is_file() and path.name.endswith(_TRACE_SUFFIXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTrace:
    """The plain data of a trace file, with notes on what had to be repaired."""

    data: Any
    notes: tuple[str, ...] = ()


def load_trace(path: Path) -> LoadedTrace:
    """Load the plain data of a trace file, repairing what a killed or faulty writer left.

    Raises:
        BadInput: the file cannot be read, is too large, or holds no JSON.
    """
    raw = read_bytes(path, limit_bytes=_LARGEST_TRACE_BYTES)
    is_cut = False
    if raw[:2] == _GZIP_MAGIC:
        raw, is_cut = _unzip(raw, path)
    text = raw.decode("utf-8", errors="replace")
    for repair in (str, _repair_values, _close):
        text = repair(text)
        with suppress(ValueError, RecursionError):
            data = json.loads(text)
            note = f"{path.name} was cut off: events after its last complete one are missing"
            return LoadedTrace(data=data, notes=(note,) if is_cut or repair is _close else ())
    rule = "is not a trace: no JSON"
    raise BadInput(Reason(field=str(path), rule=rule, nearest=_EXPECTED_FILE))


def _unzip(raw: bytes, path: Path) -> tuple[bytes, bool]:
    """Return what a gzip file holds, and whether it was cut off; its beginning is read then."""
    parts = []
    remaining_bytes = _LARGEST_TRACE_BYTES
    is_cut = False
    while raw[:2] == _GZIP_MAGIC and not is_cut:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(raw, remaining_bytes + 1)
        except zlib.error as error:
            rule = f"cannot be read: {error}"
            raise BadInput(Reason(field=str(path), rule=rule)) from None
        remaining_bytes -= len(part)
        if remaining_bytes < 0:
            rule = f"holds more than the {format_bytes(_LARGEST_TRACE_BYTES)} that are read"
            raise BadInput(Reason(field=str(path), rule=rule))
        parts.append(part)
        is_cut = not member.eof
        raw = member.unused_data
    return b"".join(parts), is_cut


def _repair_values(text: str) -> str:
    """Write null for values that kineto leaves empty, and for nan and inf, which JSON lacks."""
    text = re.sub(r":\s*(?=[,}])", ": null", text)
    return re.sub(
        r"(:\s*)[-+]?(nan|inf)(?:\(\w*\))?(?=\s*[,}\]])", r"\1null", text, flags=re.IGNORECASE
    )


def _close(text: str) -> str:
    """Close a trace that breaks off, after its last complete event."""
    end = "]}" if text.lstrip().startswith("{") else "]"
    return text[: text.rfind("},") + 1] + end


def build_captures(data: Any, path: Path, index: int = 0) -> Iterator[Capture]:
    """Yield a capture for each device that ran kernels.

    Where the program computed on the CPU alone, yield one for each process.

    Raises:
        BadInput: the data is no trace, or a device was used and only the host was recorded.
    """
    metadata = data if isinstance(data, dict) else {}
    raw_events = data if isinstance(data, list) else metadata.get("traceEvents")
    if not isinstance(raw_events, list):
        rule = "is not a trace: it has no traceEvents"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=_EXPECTED_FILE))
    events = [event for event in map(parse_event, raw_events) if event is not None]
    events_of_device: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["cat"] in _KIND_OF_CATEGORY:
            device = str(event["args"].get("device", event.get("pid", 0)))
            events_of_device[device].append(event)
    if not events_of_device and not _used_device(events, metadata):
        yield from read_cpu_captures(events, raw_events, metadata, path, index)
        return
    if not events_of_device:
        rule = "holds no work of a GPU: it was recorded without ProfilerActivity.CUDA"
        nearest = "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest))
    host = collect_host_events(events)
    file = _TraceFile(path=path, index=index, metadata=metadata)
    for device, device_events in sorted(events_of_device.items()):
        peak_bytes = _peak_bytes(raw_events, device)
        yield _build_capture(device_events, host, file, device, peak_bytes)


def _used_device(events: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> bool:
    """Return whether the program used a device, recorded or not; True without any operation."""
    if metadata.get("deviceProperties"):
        return True
    for event in events:
        if event["cat"] in RUNTIME_CATEGORIES or event["name"].startswith("nccl:"):
            return True
    return not any(event["cat"] == "cpu_op" for event in events)


def _peak_bytes(raw_events: Sequence[Any], device: str) -> tuple[int, int]:
    """Return the most bytes allocated and reserved on a device; zeros: memory was not profiled."""
    allocated_bytes = 0
    reserved_bytes = 0
    for event in raw_events:
        if not isinstance(event, dict) or event.get("name") != "[memory]":
            continue
        args = event.get("args")
        if not isinstance(args, dict) or args.get("Device Type") != _CUDA_DEVICE_TYPE:
            continue
        if str(args.get("Device Id", device)) == device:
            allocated_bytes = max(allocated_bytes, to_int(args.get("Total Allocated")))
            reserved_bytes = max(reserved_bytes, to_int(args.get("Total Reserved")))
    return allocated_bytes, reserved_bytes


def _build_capture(
    events: Sequence[Mapping[str, Any]],
    host: HostEvents,
    file: _TraceFile,
    device: str,
    peak_bytes: tuple[int, int],
) -> Capture:
    builder = KernelTableBuilder()
    recomputed = host.recomputed
    uncounted_flops = dict(host.matrix_flops)
    for event in events:
        builder.add(_build_row(event, host, recomputed, uncounted_flops, builder))
    properties = _device_properties(file.metadata, device)
    steps = host.steps or steps_between(host.optimizer_steps)
    kernels = builder.build()
    return Capture(
        source=file.path.name,
        rank=find_rank(file.metadata, file.path, file.index),
        device=str(properties.get("name", "")),
        memory_bytes=to_int(properties.get("totalGlobalMem")),
        allocated_bytes=peak_bytes[0],
        reserved_bytes=peak_bytes[1],
        kernels=kernels,
        streams=builder.streams,
        channels=builder.channels,
        steps=tuple(sorted(steps)),
        syncs=to_intervals(host.syncs),
        data_waits=to_intervals(host.data_waits),
        gc_pauses=to_intervals(host.gc_pauses),
        grouped_rows=_mean_grouped_rows(host),
        host_ranges=host.launching_ranges,
        trainer_marks=find_trainer_marks((*kernels.names, *host.names), builder.channels),
    )


def _build_row(
    event: Mapping[str, Any],
    host: HostEvents,
    recomputed: Intervals,
    uncounted_flops: dict[Any, float],
    builder: KernelTableBuilder,
) -> KernelRow:
    """Build the row of a device activity.

    Where a product ran as several kernels, the first one gets its FLOPs, which are taken out of
    `uncounted_flops`.
    """
    name = event["name"]
    args = event["args"]
    kind = _KIND_OF_CATEGORY[event["cat"]] or builder.kind(name)
    stream = str(args.get("stream", event.get("tid", 0)))
    nowhere = (float("nan"), float("nan"))
    launched_s, launch_end_s = host.launches.get(args.get("correlation"), nowhere)
    channel_index = -1
    payload_bytes = 0.0
    flops = 0.0
    if kind is KernelKind.COMMUNICATION:
        channel_index = builder.channel_index(_build_channel(name, args, stream))
        payload_bytes = read_payload_bytes(args)
    elif kind in (KernelKind.GEMM, KernelKind.GROUPED_GEMM):
        flops = uncounted_flops.pop(external_id(args), 0.0)
    elif kind is KernelKind.COPY:
        payload_bytes = float(to_int(args.get("bytes")))
    return KernelRow(
        name=name,
        start_s=event["start"],
        end_s=event["end"],
        stream=stream,
        launched_s=launched_s,
        launch_end_s=launch_end_s,
        kind=kind,
        channel_index=channel_index,
        payload_bytes=payload_bytes,
        flops=flops,
        is_recompute=covers(recomputed, launched_s),
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
    properties = metadata.get("deviceProperties") or []
    listed = [entry for entry in properties if isinstance(entry, dict)]
    first = listed[0] if listed else {}
    return next((entry for entry in listed if str(entry.get("id")) == device), first)
