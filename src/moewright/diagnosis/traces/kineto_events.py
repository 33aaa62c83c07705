"""Events of the PyTorch profiler's traces: their times, and what the host did.

Keys are as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be
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

from moewright.diagnosis.traces.capture import HostRanges, build_host_ranges
from moewright.diagnosis.traces.intervals import Intervals, intersect, merge, subtract, unite

US = 1e-6
_LONG_RANGE_S = 5e-5  # shorter ones never fill a gap that is worth a name
RUNTIME_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "driver",
    "hip_runtime",
    "privateuse1_runtime",
)
_HOST_CATEGORIES = (
    "cpu_op",
    "operator",
    "user_annotation",
    "python_function",
    "cpu_instant_event",
)
_SYNCS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaMemcpy", "hipMemcpy")
DATA_WAIT_NAME = re.compile(
    r"dataloader|get_batch|batch[-_ ]generator|next_batch|data_iterator", re.IGNORECASE
)
GC_NAME = re.compile(r"garbage|gc[._ ]?collect|python gc", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep#\d+")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
# Ranges of the engine (engine.observe).
_ENGINE_LAYER = re.compile(r"^(layers|depths)\.\d+$")
_ENGINE_DATA = "data"
_ENGINE_BACKWARD = "backward"
_CHECKPOINT = "CheckpointFunctionBackward"
_EVALUATE = "autograd::engine::evaluate_function: "
# Matrix products, with the positions of their two factors among the operands.
MATRIX_OPS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
GROUPED_OPS = ("aten::_grouped_mm", "aten::grouped_mm", "aten::_scaled_grouped_mm")
# Bytes of the types that have not four, by their names in c10: Float, BFloat16, Half, Byte.
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

TimeSpan = tuple[float, float]


@dataclass(kw_only=True, slots=True)
class HostEvents:
    """The host's side of a trace, collected in one pass over its events."""

    # by correlation: when the call began and returned
    launches: dict[Any, TimeSpan] = field(default_factory=dict)
    # long ranges of any thread, with the thread; and the threads that launch
    ranges: list[tuple[str, float, float, Any]] = field(default_factory=list)
    launching: set[Any] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    syncs: list[TimeSpan] = field(default_factory=list)
    data_waits: list[TimeSpan] = field(default_factory=list)
    gc_pauses: list[TimeSpan] = field(default_factory=list)
    steps: list[TimeSpan] = field(default_factory=list)
    optimizer_steps: list[TimeSpan] = field(default_factory=list)
    checkpoint_backwards: list[TimeSpan] = field(default_factory=list)
    operation_backwards: list[TimeSpan] = field(default_factory=list)
    matrix_flops: dict[Any, float] = field(default_factory=dict)  # external id -> FLOPs
    grouped_rows: list[tuple[float, int]] = field(default_factory=list)  # rows of a call, experts
    # forwards of the engine's layers, recomputed ones among them
    layer_forwards: list[TimeSpan] = field(default_factory=list)
    # the backward phase of the engine's steps
    backward_phases: list[TimeSpan] = field(default_factory=list)

    @property
    def launching_ranges(self) -> HostRanges:
        """Return the long ranges of the threads that launch; of all threads where none does."""
        return build_host_ranges(
            (name, start, end)
            for name, start, end, thread in self.ranges
            if not self.launching or thread in self.launching
        )

    @property
    def recomputed(self) -> Intervals:
        """Return the forwards that run again inside a backward."""
        checkpoints = subtract(
            to_intervals(self.checkpoint_backwards), to_intervals(self.operation_backwards)
        )
        in_backward = intersect(
            to_intervals(self.layer_forwards), to_intervals(self.backward_phases)
        )
        return unite(checkpoints, in_backward)


def parse_event(event: Any) -> dict[str, Any] | None:
    """Parse a complete event: its times in seconds, its category in lower case.

    Return None for any other event, and for one whose times are not numbers.
    """
    if not isinstance(event, dict) or event.get("ph", "X") != "X":
        return None
    try:
        start = float(event["ts"]) * US
        length = float(event.get("dur") or 0) * US
    except (KeyError, TypeError, ValueError):
        return None
    if np.isnan(start) or np.isnan(length):
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
    """Collect what the host did from parsed events."""
    host = HostEvents()
    for event in events:
        if event["cat"] in RUNTIME_CATEGORIES:
            _collect_runtime_event(host, event)
        elif event["cat"] in _HOST_CATEGORIES:
            _collect_host_event(host, event)
    return host


def _collect_runtime_event(host: HostEvents, event: Mapping[str, Any]) -> None:
    if "correlation" in event["args"]:
        host.launches[event["args"]["correlation"]] = (event["start"], event["end"])
        host.launching.add((event.get("pid"), event.get("tid")))
    _collect_range(host, event)
    if "Synchronize" in event["name"] or event["name"] in _SYNCS:
        host.syncs.append((event["start"], event["end"]))


def _collect_host_event(host: HostEvents, event: Mapping[str, Any]) -> None:
    name = event["name"]
    is_annotation = event["cat"] == "user_annotation"
    span = (event["start"], event["end"])
    if not _STEP.match(name):
        _collect_range(host, event)
    if name in _SYNCS:
        host.syncs.append(span)
    if (DATA_WAIT_NAME.search(name) and event["cat"] != "python_function") or (
        is_annotation and name == _ENGINE_DATA
    ):
        host.data_waits.append(span)
    elif is_annotation and name == _ENGINE_BACKWARD:
        host.backward_phases.append(span)
    elif _ENGINE_LAYER.match(name):
        host.layer_forwards.append(span)
    elif GC_NAME.search(name):
        host.gc_pauses.append(span)
    elif _STEP.match(name):
        host.steps.append(span)
    elif _OPTIMIZER_STEP.match(name):
        host.optimizer_steps.append(span)
    elif _CHECKPOINT in name:
        host.checkpoint_backwards.append(span)
    elif name.startswith(_EVALUATE):
        host.operation_backwards.append(span)
    elif name in MATRIX_OPS or name in GROUPED_OPS:
        _collect_matrix_flops(host, name, event["args"])


def _collect_range(host: HostEvents, event: Mapping[str, Any]) -> None:
    host.names.add(event["name"])
    if event["end"] - event["start"] >= _LONG_RANGE_S:
        thread = (event.get("pid"), event.get("tid"))
        host.ranges.append((event["name"], event["start"], event["end"], thread))


def _collect_matrix_flops(host: HostEvents, name: str, args: Mapping[str, Any]) -> None:
    """Collect the FLOPs of a matrix product from the sizes of its operands, where recorded."""
    sizes: Any = args.get("Input Dims") or args.get("Input dims")
    try:
        if name in GROUPED_OPS:
            _collect_grouped_flops(host, sizes[0], sizes[1], key=external_id(args))
            return
        left, right = (sizes[position] for position in MATRIX_OPS[name])
        host.matrix_flops[external_id(args)] = 2.0 * prod(left) * right[-1]
    except (TypeError, IndexError, KeyError):
        return


def _collect_grouped_flops(host: HostEvents, left: Any, right: Any, *, key: Any) -> None:
    rows = prod(left[:-1])
    if len(right) != 3 or not rows or not right[0]:
        return
    host.matrix_flops[key] = 2.0 * rows * left[-1] * right[-1]
    host.grouped_rows.append((float(rows), int(right[0])))


def external_id(args: Mapping[str, Any]) -> Any:
    """Return the id that ties a kernel to the operation that launched it; None: not recorded."""
    return args.get("External id", args.get("external id"))


def read_payload_bytes(args: Mapping[str, Any]) -> float:
    """Return the bytes that the rank hands in to a collective."""
    dtype = str(args.get("dtype") or "").casefold()
    nbytes = 1 if dtype.startswith("float8") else _NBYTES.get(dtype, 4)
    return float(nbytes * to_int(args.get("In msg nelems")))


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Parse ranks as a list or as its text.

    A long list is printed with its middle left out, which says nothing.
    """
    text = str(value or "")
    return () if "..." in text else tuple(int(number) for number in re.findall(r"\d+", text))


def to_int(value: Any) -> int:
    """Return a whole number; 0 for what is none."""
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def find_rank(metadata: Mapping[str, Any], path: Path, index: int) -> int:
    """Return the rank of a trace: as it says, as its file is called, else its index."""
    distributed = metadata.get("distributedInfo")
    if isinstance(distributed, dict) and isinstance(distributed.get("rank"), int):
        return int(distributed["rank"])
    in_name = re.search(r"rank[-_ .]?(\d+)", path.name, re.IGNORECASE)
    return int(in_name[1]) if in_name else index


def steps_between(optimizer_steps: list[TimeSpan]) -> list[TimeSpan]:
    """Return steps from one optimizer's end to the next; the first optimizer's is not complete."""
    ends = sorted(end for _, end in optimizer_steps)
    return list(pairwise(ends))


def to_intervals(spans: list[TimeSpan]) -> Intervals:
    """Return spans as a set of intervals."""
    return merge(np.array(spans, dtype=np.float64).reshape(-1, 2))


def covers(intervals: Intervals, moment: float) -> bool:
    """Return whether a moment lies in a set of intervals."""
    if not len(intervals):
        return False
    index = int(np.searchsorted(intervals[:, 0], moment, side="right")) - 1
    return index >= 0 and moment <= float(intervals[index, 1])
