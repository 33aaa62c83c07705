"""Traces of the PyTorch profiler (Kineto's Chrome JSON, plain or gzipped) as Captures.

Keys as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be missing, and older
versions name categories otherwise. Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from moewright.spec.errors import BadInput, Reason
from moewright.tune.traces.capture import Capture, Channel, Columns, Routed, Work, library_of, op_of
from moewright.tune.traces.spans import Spans, union, without

US = 1e-6
_DEVICE = {"kernel": None, "gpu_memcpy": Work.COPY, "gpu_memset": Work.COPY, "memcpy": Work.COPY, "memset": Work.COPY}
_RUNTIME = ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime")
_HOST = ("cpu_op", "operator", "user_annotation", "python_function", "cpu_instant_event")
_SYNCS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaMemcpy", "hipMemcpy")
_LOADING = re.compile(r"dataloader|get_batch|batch[-_ ]generator|next_batch|data_iterator", re.IGNORECASE)
_COLLECTING = re.compile(r"garbage|gc[._ ]?collect|python gc", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep#\d+")
_NAMED_STEP = re.compile(r"^Optimizer\.step#")
_CHECKPOINT = "CheckpointFunctionBackward"
_EVALUATE = "autograd::engine::evaluate_function: "
_PRODUCTS = {  # places of the two factors
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
_GROUPED = ("aten::_grouped_mm", "aten::grouped_mm", "aten::_scaled_grouped_mm")


def read_traces(path: Path) -> tuple[Capture, ...]:
    """A trace, or every trace of a folder, one Capture a device and file. Raises BadInput for what is none."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*.json*") if _named_as_trace(each))
    return tuple(capture for place, file in enumerate(files) for capture in captures_of(read_events(file), file, place))


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
    raise BadInput(Reason(field=str(path), rule="is not a trace: no JSON", nearest="the .json of torch.profiler"))


def _unzipped(raw: bytes) -> bytes:
    """All that can be unzipped: a file that was cut off still holds its beginning."""
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile):
        return zlib.decompressobj(wbits=31).decompress(raw)


def _mended(text: str) -> str:
    """Values that kineto leaves empty, and numbers that C++ prints and JSON does not have."""
    text = re.sub(r":\s*(?=[,}])", ": null", text)
    return re.sub(r"(:\s*)[-+]?(nan|inf)(?:\(\w*\))?(?=\s*[,}\]])", r"\1null", text, flags=re.IGNORECASE)


def _closed(text: str) -> str:
    """A trace that breaks off, closed after its last whole event."""
    return text[: text.rfind("},") + 1] + "]" + ("}" if text.lstrip().startswith("{") else "")


@dataclass(kw_only=True, slots=True)
class _Host:
    """What the host did, found in one pass over the events."""

    launches: dict[Any, float] = field(default_factory=dict)  # correlation -> seconds
    syncs: list[tuple[float, float]] = field(default_factory=list)
    loading: list[tuple[float, float]] = field(default_factory=list)
    collecting: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    optimizer: list[tuple[float, float]] = field(default_factory=list)
    replays: list[tuple[float, float]] = field(default_factory=list)
    backwards: list[tuple[float, float]] = field(default_factory=list)
    products: dict[Any, float] = field(default_factory=dict)  # external id -> FLOPs
    grouped: list[tuple[float, int]] = field(default_factory=list)  # rows of a call, experts


def captures_of(data: Any, path: Path, place: int = 0) -> Iterator[Capture]:
    """One Capture for each device that ran kernels. Raises BadInput when none did."""
    events = data if isinstance(data, list) else data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        rule = "is not a trace: it has no traceEvents"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="the .json of torch.profiler"))
    whole = [event for event in map(_timed, events) if event is not None]
    host = _host(whole)
    devices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in whole:
        if event["cat"] in _DEVICE:
            devices[str(event["args"].get("device", event.get("pid", 0)))].append(event)
    if not devices:
        rule = "holds no work of a GPU: it was recorded without ProfilerActivity.CUDA"
        raise BadInput(
            Reason(field=str(path), rule=rule, nearest="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]")
        )
    about = data if isinstance(data, dict) else {}
    for number, found in sorted(devices.items()):
        yield _capture(found, host, about, path, place, number, _memory(events, number))


def _memory(events: list[Any], number: str) -> tuple[int, int]:
    """Most bytes allocated and reserved on a device, where memory was profiled; else zeros."""
    reports = [
        each["args"]
        for each in events
        if isinstance(each, dict) and each.get("name") == "[memory]" and isinstance(each.get("args"), dict)
    ]
    ours = [args for args in reports if args.get("Device Type") == 1 and str(args.get("Device Id", number)) == number]
    allocated, reserved = (
        max((_whole(args.get(key)) for args in ours), default=0) for key in ("Total Allocated", "Total Reserved")
    )
    return allocated, reserved


def _timed(event: Any) -> dict[str, Any] | None:
    """A complete event with numbers for its times, its category in lower case; None for any other."""
    if not isinstance(event, dict) or event.get("ph", "X") != "X":
        return None
    try:
        start, length = float(event["ts"]) * US, float(event.get("dur") or 0) * US
    except (KeyError, TypeError, ValueError):
        return None
    if start != start or length != length:
        return None
    args = event.get("args")
    return {
        **event,
        "name": str(event.get("name", "")),
        "cat": str(event.get("cat", "")).casefold(),
        "args": args if isinstance(args, dict) else {},
        "start": start,
        "end": start + max(0.0, length),
    }


def _host(events: Iterable[Mapping[str, Any]]) -> _Host:
    host = _Host()
    for event in events:
        name, cat, args, span = event["name"], event["cat"], event["args"], (event["start"], event["end"])
        if cat in _RUNTIME:
            if "correlation" in args:
                host.launches[args["correlation"]] = span[0]
            if "Synchronize" in name or name in _SYNCS:
                host.syncs.append(span)
        elif cat in _HOST:
            if name in _SYNCS:
                host.syncs.append(span)
            if _LOADING.search(name) and cat != "python_function":
                host.loading.append(span)
            elif _COLLECTING.search(name):
                host.collecting.append(span)
            elif _STEP.match(name):
                host.steps.append(span)
            elif _NAMED_STEP.match(name):
                host.optimizer.append(span)
            elif _CHECKPOINT in name:
                host.replays.append(span)
            elif name.startswith(_EVALUATE):
                host.backwards.append(span)
            elif name in _PRODUCTS or name in _GROUPED:
                _shape(host, name, args)
    return host


def _shape(host: _Host, name: str, args: Mapping[str, Any]) -> None:
    """FLOPs of a matrix product from the sizes of its operands, where they were recorded."""
    sizes: Any = args.get("Input Dims") or args.get("Input dims")
    key = args.get("External id", args.get("external id"))
    try:
        if name in _GROUPED:
            left, right = sizes[0], sizes[1]
            rows, experts = prod(left[:-1]), right[0] if len(right) == 3 else 0
            if len(right) == 3 and rows and experts:
                host.products[key] = 2.0 * rows * left[-1] * right[-1]
                host.grouped.append((float(rows), int(experts)))
            return
        left, right = (sizes[place] for place in _PRODUCTS[name])
        host.products[key] = 2.0 * prod(left) * right[-1]
    except (TypeError, IndexError, KeyError):
        return


def _capture(
    events: list[dict[str, Any]],
    host: _Host,
    about: Mapping[str, Any],
    path: Path,
    place: int,
    number: str,
    memory: tuple[int, int],
) -> Capture:
    columns = Columns()
    replays = without(_spans(host.replays), _spans(host.backwards))
    used: set[Any] = set()
    for event in events:
        name, args = event["name"], event["args"]
        work = _DEVICE[event["cat"]] or columns.work(name)
        stream = str(args.get("stream", event.get("tid", 0)))
        channel, payload = -1, 0.0
        if work is Work.COMMUNICATION:
            channel, payload = columns.channel(_channel(name, args, stream)), _payload(args)
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
            replayed=_inside(replays, launched),
        )
    device = _device(about, number)
    steps = host.steps or _between(host.optimizer)
    routed = None
    if host.grouped:
        rows, experts = zip(*host.grouped, strict=True)
        routed = Routed(rows=fmean(rows), experts=round(fmean(experts)))
    return Capture(
        source=path.name,
        rank=_rank(about, path, place),
        device=str(device.get("name", "")),
        memory_bytes=_whole(device.get("totalGlobalMem")),
        allocated_bytes=memory[0],
        reserved_bytes=memory[1],
        kernels=columns.kernels(),
        streams=columns.streams,
        channels=columns.channels,
        steps=tuple(sorted(steps)),
        syncs=_spans(host.syncs),
        loading=_spans(host.loading),
        collecting=_spans(host.collecting),
        routed=routed,
    )


def _channel(name: str, args: Mapping[str, Any], stream: str) -> Channel:
    said = str(args.get("Collective name") or "")
    return Channel(
        op=(op_of(said) if said and said != "coalesced" else None) or op_of(name),
        group=str(args.get("Process Group Name") or ""),
        description=str(args.get("Process Group Description") or ""),
        ranks=_ranks(args.get("Process Group Ranks")),
        size=_whole(args.get("Group size")),
        stream=stream,
        library=library_of(name),
        kernel=name,
    )


_NBYTES = {"char": 1, "byte": 1, "bool": 1, "bfloat16": 2, "half": 2, "short": 2, "double": 8, "long": 8}


def _payload(args: Mapping[str, Any]) -> float:
    """Bytes that the rank hands in. Types go by their names in c10: Float, BFloat16, Half, Byte, Float8_e4m3fn."""
    dtype = str(args.get("dtype") or "").casefold()
    size = 1 if dtype.startswith("float8") else _NBYTES.get(dtype, 4)
    return float(size * _whole(args.get("In msg nelems")))


def _ranks(value: Any) -> tuple[int, ...]:
    """Ranks as a list or as its text; a long one is printed with its middle left out, which says nothing."""
    text = str(value or "")
    return () if "..." in text else tuple(int(number) for number in re.findall(r"\d+", text))


def _whole(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def _rank(about: Mapping[str, Any], path: Path, place: int) -> int:
    said = about.get("distributedInfo")
    if isinstance(said, dict) and isinstance(said.get("rank"), int):
        return int(said["rank"])
    named = re.search(r"rank[-_ .]?(\d+)", path.name, re.IGNORECASE)
    return int(named[1]) if named else place


def _device(about: Mapping[str, Any], number: str) -> Mapping[str, Any]:
    listed = [each for each in about.get("deviceProperties") or [] if isinstance(each, dict)]
    return next((each for each in listed if str(each.get("id")) == number), listed[0] if listed else {})


def _between(ends: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps from one optimizer's end to the next; the first optimizer's step is not whole."""
    marks = sorted(end for _, end in ends)
    return list(pairwise(marks))


def _spans(found: list[tuple[float, float]]) -> Spans:
    return union(np.array(found, dtype=np.float64).reshape(-1, 2))


def _inside(spans: Spans, moment: float) -> bool:
    at = int(np.searchsorted(spans[:, 0], moment, side="right")) - 1 if len(spans) else -1
    return at >= 0 and moment <= float(spans[at, 1])
