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

from moewright.diagnosis.traces.spans import Spans, both, joined, union, without

US = 1e-6
RUNTIME = ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime")
_HOST = ("cpu_op", "operator", "user_annotation", "python_function", "cpu_instant_event")
_SYNCS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaMemcpy", "hipMemcpy")
_LOADING = re.compile(
    r"dataloader|get_batch|batch[-_ ]generator|next_batch|data_iterator", re.IGNORECASE
)
_COLLECTING = re.compile(r"garbage|gc[._ ]?collect|python gc", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep#\d+")
_NAMED_STEP = re.compile(r"^Optimizer\.step#")
_OUR_LAYER = re.compile(r"^(layers|depths)\.\d+$")  # ranges of the engine (engine.profile)
_OUR_PHASES = {"data": "loading", "backward": "backward"}
_CHECKPOINT = "CheckpointFunctionBackward"
_EVALUATE = "autograd::engine::evaluate_function: "
PRODUCTS = {  # places of the two factors
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
GROUPED = ("aten::_grouped_mm", "aten::grouped_mm", "aten::_scaled_grouped_mm")


@dataclass(kw_only=True, slots=True)
class Host:
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
    modules: list[tuple[float, float]] = field(
        default_factory=list
    )  # forwards of layers, replays among them
    backward: list[tuple[float, float]] = field(
        default_factory=list
    )  # the phase of the engine's steps

    @property
    def replayed(self) -> Spans:
        """Forwards that run again inside a backward."""
        checkpoints = without(spans_of(self.replays), spans_of(self.backwards))
        return joined(checkpoints, both(spans_of(self.modules), spans_of(self.backward)))


def timed(event: Any) -> dict[str, Any] | None:
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


def host_of(events: Iterable[Mapping[str, Any]]) -> Host:
    host = Host()
    for event in events:
        name, cat, args, span = (
            event["name"],
            event["cat"],
            event["args"],
            (event["start"], event["end"]),
        )
        if cat in RUNTIME:
            if "correlation" in args:
                host.launches[args["correlation"]] = span[0]
            if "Synchronize" in name or name in _SYNCS:
                host.syncs.append(span)
        elif cat in _HOST:
            if name in _SYNCS:
                host.syncs.append(span)
            if _LOADING.search(name) and cat != "python_function":
                host.loading.append(span)
            elif name in _OUR_PHASES and cat == "user_annotation":
                getattr(host, _OUR_PHASES[name]).append(span)
            elif _OUR_LAYER.match(name):
                host.modules.append(span)
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
            elif name in PRODUCTS or name in GROUPED:
                _shape(host, name, args)
    return host


def _shape(host: Host, name: str, args: Mapping[str, Any]) -> None:
    """FLOPs of a matrix product from the sizes of its operands, where they were recorded."""
    sizes: Any = args.get("Input Dims") or args.get("Input dims")
    key = args.get("External id", args.get("external id"))
    try:
        if name in GROUPED:
            left, right = sizes[0], sizes[1]
            rows, experts = prod(left[:-1]), right[0] if len(right) == 3 else 0
            if len(right) == 3 and rows and experts:
                host.products[key] = 2.0 * rows * left[-1] * right[-1]
                host.grouped.append((float(rows), int(experts)))
            return
        left, right = (sizes[place] for place in PRODUCTS[name])
        host.products[key] = 2.0 * prod(left) * right[-1]
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


def payload_of(args: Mapping[str, Any]) -> float:
    """Bytes that the rank hands in. Types go by their names in c10: Float, BFloat16, Half, Byte,
    Float8_e4m3fn."""
    dtype = str(args.get("dtype") or "").casefold()
    size = 1 if dtype.startswith("float8") else _NBYTES.get(dtype, 4)
    return float(size * whole(args.get("In msg nelems")))


def ranks_of(value: Any) -> tuple[int, ...]:
    """Ranks as a list or as its text; a long one is printed with its middle left out, which says
    nothing."""
    text = str(value or "")
    return () if "..." in text else tuple(int(number) for number in re.findall(r"\d+", text))


def whole(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def rank_of(about: Mapping[str, Any], path: Path, place: int) -> int:
    said = about.get("distributedInfo")
    if isinstance(said, dict) and isinstance(said.get("rank"), int):
        return int(said["rank"])
    named = re.search(r"rank[-_ .]?(\d+)", path.name, re.IGNORECASE)
    return int(named[1]) if named else place


def between(ends: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps from one optimizer's end to the next; the first optimizer's step is not whole."""
    marks = sorted(end for _, end in ends)
    return list(pairwise(marks))


def spans_of(found: list[tuple[float, float]]) -> Spans:
    return union(np.array(found, dtype=np.float64).reshape(-1, 2))


def inside(spans: Spans, moment: float) -> bool:
    at = int(np.searchsorted(spans[:, 0], moment, side="right")) - 1 if len(spans) else -1
    return at >= 0 and moment <= float(spans[at, 1])
