"""Traces of the PyTorch profiler (Kineto's Chrome JSON, plain or gzipped) as Captures.

Keys as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be
missing, and older versions name categories otherwise. Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    GroupedRows,
    KernelKind,
    KernelTableBuilder,
    collective_in_name,
    comm_library,
)
from moewright.diagnosis.traces.cpu_traces import read_cpu_captures
from moewright.diagnosis.traces.kineto_events import (
    RUNTIME_CATEGORIES,
    HostEvents,
    collect_host_events,
    covers,
    find_rank,
    parse_event,
    parse_ranks,
    read_payload_bytes,
    steps_between,
    to_int,
    to_intervals,
)
from moewright.spec.errors import BadInput, Reason

_DEVICE = {
    "kernel": None,
    "gpu_memcpy": KernelKind.COPY,
    "gpu_memset": KernelKind.COPY,
    "memcpy": KernelKind.COPY,
    "memset": KernelKind.COPY,
}


def read_traces(path: Path) -> tuple[Capture, ...]:
    """A trace, or every trace of a folder, one Capture a device and file. Raises BadInput for what
    is none."""
    files = (
        [path]
        if path.is_file()
        else sorted(each for each in path.rglob("*.json*") if _named_as_trace(each))
    )
    return tuple(
        capture
        for place, file in enumerate(files)
        for capture in build_captures(load_trace(file), file, place)
    )


def _named_as_trace(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz"))


def load_trace(path: Path) -> Any:
    """Plain data of a trace file; what a killed or faulty writer left is mended where it can be."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = _unzipped(raw)
    except (OSError, zlib.error) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise BadInput(Reason(field=str(path), rule=rule)) from None
    text = raw.decode("utf-8", errors="replace")
    for mend in (str, _mended, _closed):
        text = mend(text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            continue
    raise BadInput(
        Reason(
            field=str(path), rule="is not a trace: no JSON", nearest="the .json of torch.profiler"
        )
    )


def _unzipped(raw: bytes) -> bytes:
    """All that can be unzipped: a file that was cut off still holds its beginning."""
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile):
        return zlib.decompressobj(wbits=31).decompress(raw)


def _mended(text: str) -> str:
    """Values that kineto leaves empty, and numbers that C++ prints and JSON does not have."""
    text = re.sub(r":\s*(?=[,}])", ": null", text)
    return re.sub(
        r"(:\s*)[-+]?(nan|inf)(?:\(\w*\))?(?=\s*[,}\]])", r"\1null", text, flags=re.IGNORECASE
    )


def _closed(text: str) -> str:
    """A trace that breaks off, closed after its last whole event."""
    return text[: text.rfind("},") + 1] + "]" + ("}" if text.lstrip().startswith("{") else "")


def build_captures(data: Any, path: Path, place: int = 0) -> Iterator[Capture]:
    """One Capture for each device that ran kernels; for each process where all was computed on the
    CPU. Raises BadInput when the host's side of a device is all there is.
    """
    events = (
        data
        if isinstance(data, list)
        else data.get("traceEvents")
        if isinstance(data, dict)
        else None
    )
    if not isinstance(events, list):
        rule = "is not a trace: it has no traceEvents"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="the .json of torch.profiler"))
    whole_ones = [event for event in map(parse_event, events) if event is not None]
    host = collect_host_events(whole_ones)
    devices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in whole_ones:
        if event["cat"] in _DEVICE:
            devices[str(event["args"].get("device", event.get("pid", 0)))].append(event)
    about = data if isinstance(data, dict) else {}
    if not devices and not _beside_device(whole_ones, about):
        yield from read_cpu_captures(whole_ones, events, about, path, place)
        return
    if not devices:
        rule = "holds no work of a GPU: it was recorded without ProfilerActivity.CUDA"
        raise BadInput(
            Reason(
                field=str(path),
                rule=rule,
                nearest="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
        )
    for number, found in sorted(devices.items()):
        yield _capture(found, host, about, path, place, number, _memory(events, number))


def _beside_device(events: list[dict[str, Any]], about: Mapping[str, Any]) -> bool:
    """Whether the trace is of a program that used a device, recorded or not; or of none that
    computed at all."""
    launched = any(
        event["cat"] in RUNTIME_CATEGORIES or event["name"].startswith("nccl:") for event in events
    )
    return (
        launched
        or bool(about.get("deviceProperties"))
        or not any(event["cat"] == "cpu_op" for event in events)
    )


def _memory(events: list[Any], number: str) -> tuple[int, int]:
    """Most bytes allocated and reserved on a device, where memory was profiled; else zeros."""
    reports = [
        each["args"]
        for each in events
        if isinstance(each, dict)
        and each.get("name") == "[memory]"
        and isinstance(each.get("args"), dict)
    ]
    ours = [
        args
        for args in reports
        if args.get("Device Type") == 1 and str(args.get("Device Id", number)) == number
    ]
    allocated, reserved = (
        max((to_int(args.get(key)) for args in ours), default=0)
        for key in ("Total Allocated", "Total Reserved")
    )
    return allocated, reserved


def _capture(
    events: list[dict[str, Any]],
    host: HostEvents,
    about: Mapping[str, Any],
    path: Path,
    place: int,
    number: str,
    memory: tuple[int, int],
) -> Capture:
    columns = KernelTableBuilder()
    replays = host.recomputed
    used: set[Any] = set()
    for event in events:
        name, args = event["name"], event["args"]
        work = _DEVICE[event["cat"]] or columns.kind(name)
        stream = str(args.get("stream", event.get("tid", 0)))
        channel, payload = -1, 0.0
        if work is KernelKind.COMMUNICATION:
            channel, payload = (
                columns.channel_index(_channel(name, args, stream)),
                read_payload_bytes(args),
            )
        launched = host.launches.get(args.get("correlation"), float("nan"))
        key = args.get("External id", args.get("external id"))
        counts = (
            work in (KernelKind.GEMM, KernelKind.GROUPED_GEMM)
            and key in host.matrix_flops
            and key not in used
        )
        if counts:
            used.add(key)
        columns.add(
            name=name,
            start_s=event["start"],
            end_s=event["end"],
            stream=stream,
            launched_s=launched,
            kind=work,
            channel_index=channel,
            payload_bytes=payload,
            flops=host.matrix_flops[key] if counts else 0.0,
            is_recompute=covers(replays, launched),
        )
    device = _device(about, number)
    steps = host.steps or steps_between(host.optimizer_steps)
    routed = None
    if host.grouped_rows:
        rows, experts = zip(*host.grouped_rows, strict=True)
        routed = GroupedRows(rows=fmean(rows), experts=round(fmean(experts)))
    return Capture(
        source=path.name,
        rank=find_rank(about, path, place),
        device=str(device.get("name", "")),
        memory_bytes=to_int(device.get("totalGlobalMem")),
        allocated_bytes=memory[0],
        reserved_bytes=memory[1],
        kernels=columns.build(),
        streams=columns.streams,
        channels=columns.channels,
        steps=tuple(sorted(steps)),
        syncs=to_intervals(host.syncs),
        data_waits=to_intervals(host.data_waits),
        gc_pauses=to_intervals(host.gc_pauses),
        grouped_rows=routed,
    )


def _channel(name: str, args: Mapping[str, Any], stream: str) -> CommChannel:
    said = str(args.get("Collective name") or "")
    return CommChannel(
        op=(collective_in_name(said) if said and said != "coalesced" else None)
        or collective_in_name(name),
        group=str(args.get("Process Group Name") or ""),
        description=str(args.get("Process Group Description") or ""),
        ranks=parse_ranks(args.get("Process Group Ranks")),
        size=to_int(args.get("Group size")),
        stream=stream,
        library=comm_library(name),
        kernel=name,
    )


def _device(about: Mapping[str, Any], number: str) -> Mapping[str, Any]:
    listed = [each for each in about.get("deviceProperties") or [] if isinstance(each, dict)]
    return next(
        (each for each in listed if str(each.get("id")) == number), listed[0] if listed else {}
    )
