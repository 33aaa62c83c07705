"""Events of the PyTorch profiler's traces: their times, and what the host did.

Keys as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be
missing, and older versions name categories otherwise. Times are microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moewright.diagnosis.traces.intervals import Intervals, intersect, merge, subtract, unite

US = 1e-6
RUNTIME_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "driver",
    "hip_runtime",
    "privateuse1_runtime",
)
_HOST = ("cpu_op", "operator", "user_annotation", "python_function", "cpu_instant_event")
_SYNCS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaMemcpy", "hipMemcpy")
_LOADING = re.compile(
    r"dataloader|get_batch|batch[-_ ]generator|next_batch|data_iterator", re.IGNORECASE
)
_COLLECTING = re.compile(r"garbage|gc[._ ]?collect|python gc", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep#\d+")
_NAMED_STEP = re.compile(r"^Optimizer\.step#")
_OUR_LAYER = re.compile(r"^(layers|depths)\.\d+$")  # ranges of the engine (engine.profile)
_OUR_PHASES = {"data": "data_waits", "backward": "backward_phases"}
_CHECKPOINT = "CheckpointFunctionBackward"
_EVALUATE = "autograd::engine::evaluate_function: "
MATRIX_OPS = {  # places of the two factors
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
GROUPED_OPS = ("aten::_grouped_mm", "aten::grouped_mm", "aten::_scaled_grouped_mm")


@dataclass(kw_only=True, slots=True)
class HostEvents:
    """What the host did, found in one pass over the events."""

    launches: dict[Any, float] = field(default_factory=dict)  # correlation -> seconds
    syncs: list[tuple[float, float]] = field(default_factory=list)
    data_waits: list[tuple[float, float]] = field(default_factory=list)
    gc_pauses: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    optimizer_steps: list[tuple[float, float]] = field(default_factory=list)
    checkpoint_backwards: list[tuple[float, float]] = field(default_factory=list)
    operation_backwards: list[tuple[float, float]] = field(default_factory=list)
    matrix_flops: dict[Any, float] = field(default_factory=dict)  # external id -> FLOPs
    grouped_rows: list[tuple[float, int]] = field(default_factory=list)  # rows of a call, experts
    layer_forwards: list[tuple[float, float]] = field(
        default_factory=list
    )  # forwards of layers, replays among them
    backward_phases: list[tuple[float, float]] = field(
        default_factory=list
    )  # the phase of the engine's steps

    @property
    def recomputed(self) -> Intervals:
        """Forwards that run again inside a backward."""
        checkpoints = subtract(
            to_intervals(self.checkpoint_backwards), to_intervals(self.operation_backwards)
        )
        return unite(
            checkpoints,
            intersect(to_intervals(self.layer_forwards), to_intervals(self.backward_phases)),
        )


def parse_event(event: Any) -> dict[str, Any] | None:
    """A complete event with numbers for its times, its category in lower case; None for any
    other."""
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


def collect_host_events(events: Iterable[Mapping[str, Any]]) -> HostEvents:
    host = HostEvents()
    for event in events:
        name, cat, args, span = (
            event["name"],
            event["cat"],
            event["args"],
            (event["start"], event["end"]),
        )
        if cat in RUNTIME_CATEGORIES:
            if "correlation" in args:
                host.launches[args["correlation"]] = span[0]
            if "Synchronize" in name or name in _SYNCS:
                host.syncs.append(span)
        elif cat in _HOST:
            if name in _SYNCS:
                host.syncs.append(span)
            if _LOADING.search(name) and cat != "python_function":
                host.data_waits.append(span)
            elif name in _OUR_PHASES and cat == "user_annotation":
                getattr(host, _OUR_PHASES[name]).append(span)
            elif _OUR_LAYER.match(name):
                host.layer_forwards.append(span)
            elif _COLLECTING.search(name):
                host.gc_pauses.append(span)
            elif _STEP.match(name):
                host.steps.append(span)
            elif _NAMED_STEP.match(name):
                host.optimizer_steps.append(span)
            elif _CHECKPOINT in name:
                host.checkpoint_backwards.append(span)
            elif name.startswith(_EVALUATE):
                host.operation_backwards.append(span)
            elif name in MATRIX_OPS or name in GROUPED_OPS:
                _shape(host, name, args)
    return host


def _shape(host: HostEvents, name: str, args: Mapping[str, Any]) -> None:
    """FLOPs of a matrix product from the sizes of its operands, where they were recorded."""
    sizes: Any = args.get("Input Dims") or args.get("Input dims")
    key = args.get("External id", args.get("external id"))
    try:
        if name in GROUPED_OPS:
            left, right = sizes[0], sizes[1]
            rows, experts = prod(left[:-1]), right[0] if len(right) == 3 else 0
            if len(right) == 3 and rows and experts:
                host.matrix_flops[key] = 2.0 * rows * left[-1] * right[-1]
                host.grouped_rows.append((float(rows), int(experts)))
            return
        left, right = (sizes[place] for place in MATRIX_OPS[name])
        host.matrix_flops[key] = 2.0 * prod(left) * right[-1]
    except (TypeError, IndexError, KeyError):
        return


_NBYTES = {
    "char": 1,
    "byte": 1,
    "bool": 1,
    "bfloat16": 2,
    "half": 2,
    "short": 2,
    "double": 8,
    "long": 8,
}


def read_payload_bytes(args: Mapping[str, Any]) -> float:
    """Bytes that the rank hands in. Types go by their names in c10: Float, BFloat16, Half, Byte,
    Float8_e4m3fn."""
    dtype = str(args.get("dtype") or "").casefold()
    size = 1 if dtype.startswith("float8") else _NBYTES.get(dtype, 4)
    return float(size * to_int(args.get("In msg nelems")))


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Ranks as a list or as its text; a long one is printed with its middle left out, which says
    nothing."""
    text = str(value or "")
    return () if "..." in text else tuple(int(number) for number in re.findall(r"\d+", text))


def to_int(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def find_rank(about: Mapping[str, Any], path: Path, place: int) -> int:
    said = about.get("distributedInfo")
    if isinstance(said, dict) and isinstance(said.get("rank"), int):
        return int(said["rank"])
    named = re.search(r"rank[-_ .]?(\d+)", path.name, re.IGNORECASE)
    return int(named[1]) if named else place


def steps_between(ends: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps from one optimizer's end to the next; the first optimizer's step is not whole."""
    marks = sorted(end for _, end in ends)
    return list(pairwise(marks))


def to_intervals(found: list[tuple[float, float]]) -> Intervals:
    return merge(np.array(found, dtype=np.float64).reshape(-1, 2))


def covers(spans: Intervals, moment: float) -> bool:
    at = int(np.searchsorted(spans[:, 0], moment, side="right")) - 1 if len(spans) else -1
    return at >= 0 and moment <= float(spans[at, 1])
