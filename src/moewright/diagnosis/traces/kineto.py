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
    Channel,
    Columns,
    Routed,
    Work,
    library_of,
    op_of,
)
from moewright.diagnosis.traces.host_events import (
    RUNTIME,
    Host,
    between,
    host_of,
    inside,
    payload_of,
    rank_of,
    ranks_of,
    spans_of,
    timed,
    whole,
)
from moewright.diagnosis.traces.host_only import host_captures
from moewright.spec.errors import BadInput, Reason

_DEVICE = {
    "kernel": None,
    "gpu_memcpy": Work.COPY,
    "gpu_memset": Work.COPY,
    "memcpy": Work.COPY,
    "memset": Work.COPY,
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
        for capture in captures_of(read_events(file), file, place)
    )


def _named_as_trace(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz"))


def read_events(path: Path) -> Any:
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


def captures_of(data: Any, path: Path, place: int = 0) -> Iterator[Capture]:
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
    whole_ones = [event for event in map(timed, events) if event is not None]
    host = host_of(whole_ones)
    devices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in whole_ones:
        if event["cat"] in _DEVICE:
            devices[str(event["args"].get("device", event.get("pid", 0)))].append(event)
    about = data if isinstance(data, dict) else {}
    if not devices and not _beside_device(whole_ones, about):
        yield from host_captures(whole_ones, events, about, path, place)
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
    launched = any(event["cat"] in RUNTIME or event["name"].startswith("nccl:") for event in events)
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
        max((whole(args.get(key)) for args in ours), default=0)
        for key in ("Total Allocated", "Total Reserved")
    )
    return allocated, reserved


def _capture(
    events: list[dict[str, Any]],
    host: Host,
    about: Mapping[str, Any],
    path: Path,
    place: int,
    number: str,
    memory: tuple[int, int],
) -> Capture:
    columns = Columns()
    replays = host.replayed
    used: set[Any] = set()
    for event in events:
        name, args = event["name"], event["args"]
        work = _DEVICE[event["cat"]] or columns.work(name)
        stream = str(args.get("stream", event.get("tid", 0)))
        channel, payload = -1, 0.0
        if work is Work.COMMUNICATION:
            channel, payload = columns.channel(_channel(name, args, stream)), payload_of(args)
        launched = host.launches.get(args.get("correlation"), float("nan"))
        key = args.get("External id", args.get("external id"))
        counts = work in (Work.GEMM, Work.GROUPED_GEMM) and key in host.products and key not in used
        if counts:
            used.add(key)
        columns.add(
            name=name,
            start_s=event["start"],
            end_s=event["end"],
            stream=stream,
            launched_s=launched,
            work=work,
            channel=channel,
            payload=payload,
            flops=host.products[key] if counts else 0.0,
            replayed=inside(replays, launched),
        )
    device = _device(about, number)
    steps = host.steps or between(host.optimizer)
    routed = None
    if host.grouped:
        rows, experts = zip(*host.grouped, strict=True)
        routed = Routed(rows=fmean(rows), experts=round(fmean(experts)))
    return Capture(
        source=path.name,
        rank=rank_of(about, path, place),
        device=str(device.get("name", "")),
        memory_bytes=whole(device.get("totalGlobalMem")),
        allocated_bytes=memory[0],
        reserved_bytes=memory[1],
        kernels=columns.kernels(),
        streams=columns.streams,
        channels=columns.channels,
        steps=tuple(sorted(steps)),
        syncs=spans_of(host.syncs),
        loading=spans_of(host.loading),
        collecting=spans_of(host.collecting),
        routed=routed,
    )


def _channel(name: str, args: Mapping[str, Any], stream: str) -> Channel:
    said = str(args.get("Collective name") or "")
    return Channel(
        op=(op_of(said) if said and said != "coalesced" else None) or op_of(name),
        group=str(args.get("Process Group Name") or ""),
        description=str(args.get("Process Group Description") or ""),
        ranks=ranks_of(args.get("Process Group Ranks")),
        size=whole(args.get("Group size")),
        stream=stream,
        library=library_of(name),
        kernel=name,
    )


def _device(about: Mapping[str, Any], number: str) -> Mapping[str, Any]:
    listed = [each for each in about.get("deviceProperties") or [] if isinstance(each, dict)]
    return next(
        (each for each in listed if str(each.get("id")) == number), listed[0] if listed else {}
    )
