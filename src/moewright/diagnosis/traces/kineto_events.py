"""Events of the PyTorch profiler's traces: their times, and what the host did.

Keys are as torch/csrc/profiler and kineto's output_json.cpp write them; every one of them may be
missing, and older versions name categories otherwise. Times are microseconds.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moewright.diagnosis.traces.capture import Floats, HostRanges
from moewright.diagnosis.traces.intervals import Intervals, intersect, merge, subtract, unite
from moewright.spec.errors import escape_controls

US = 1e-6  # Kineto's timestamps are microseconds
_LATEST_S = 1e11  # of any clock; later times are damage
_LONGEST_S = 1e7
_LARGEST_KEY = 1 << 53
_LONG_RANGE_S = 5e-5  # shorter ones never fill a gap that is worth a name
RUNTIME_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "driver",
    "hip_runtime",
    "privateuse1_runtime",
    "privateuse1_driver",
    "xpu_runtime",
    "xpu_driver",
)
HOST_CATEGORIES = (
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
    "aten::_scaled_mm_v2": (0, 1),
}
GROUPED_OPS = (
    "aten::_grouped_mm",
    "aten::grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_grouped_mm_v2",
)
# An element of this type is two numbers along the contraction.
_PACKED_TYPE = "Float4_e2m1fn_x2"
_PRODUCTS = frozenset((*MATRIX_OPS, *GROUPED_OPS))
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


class HostEvents:
    """The host's side of a trace, collected in one pass over its events.

    Spans are starts and ends in seconds. `matrix_flops` is by external id, `grouped_rows` the rows
    and experts of each grouped product, `layer_forwards` the forwards of the engine's layers,
    recomputed ones among them, and `backward_phases` the backward of the engine's steps.
    """

    def __init__(self) -> None:
        self.syncs: list[TimeSpan] = []
        self.data_waits: list[TimeSpan] = []
        self.gc_pauses: list[TimeSpan] = []
        self.steps: list[TimeSpan] = []
        self.optimizer_steps: list[TimeSpan] = []
        self.checkpoint_backwards: list[TimeSpan] = []
        self.operation_backwards: list[TimeSpan] = []
        self.layer_forwards: list[TimeSpan] = []
        self.backward_phases: list[TimeSpan] = []
        self.matrix_flops: dict[float, float] = {}
        self.grouped_rows: list[tuple[float, int]] = []
        self._launches = array("d")  # correlation, start and end of each call
        self._launching: set[int] = set()  # threads
        self._threads: dict[str, int] = {}
        self._range_names: dict[str, int] = {}
        self._ranges = array("d")  # name, start, end and thread of each
        # by category and name: the lists that take its spans
        self._lists: dict[tuple[str, str], tuple[list[TimeSpan], ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all events of the host."""
        return tuple(dict.fromkeys(name for _, name in self._lists))

    def add(
        self, category: str, name: str, span: TimeSpan, args: Mapping[str, Any], thread: str
    ) -> None:
        """Add an event of a category of RUNTIME_CATEGORIES or HOST_CATEGORIES."""
        key = (category, name)
        lists = self._lists.get(key)
        if lists is None:
            lists = self._lists[key] = tuple(self._choose_lists(category, name))
        for spans in lists:
            spans.append(span)
        start, end = span
        if end - start >= _LONG_RANGE_S and lists != (self.steps,):
            number = self._threads.setdefault(thread, len(self._threads))
            place = self._range_names.setdefault(name, len(self._range_names))
            self._ranges.extend((place, start, end, number))
        if category in RUNTIME_CATEGORIES:
            correlation = to_key(args.get("correlation"))
            if correlation == correlation:  # it is a number
                self._launches.extend((correlation, start, end))
                self._launching.add(self._threads.setdefault(thread, len(self._threads)))
        elif name in _PRODUCTS:
            self._add_product(name, args)

    def _choose_lists(self, category: str, name: str) -> Iterator[list[TimeSpan]]:
        """Yield the lists for the spans of a name."""
        if category in RUNTIME_CATEGORIES:
            if "Synchronize" in name or name in _SYNCS:
                yield self.syncs
            return
        is_annotation = category == "user_annotation"
        if name in _SYNCS:
            yield self.syncs
        if (DATA_WAIT_NAME.search(name) and category != "python_function") or (
            is_annotation and name == _ENGINE_DATA
        ):
            yield self.data_waits
        elif is_annotation and name == _ENGINE_BACKWARD:
            yield self.backward_phases
        elif _ENGINE_LAYER.match(name):
            yield self.layer_forwards
        elif GC_NAME.search(name):
            yield self.gc_pauses
        elif _STEP.match(name):
            yield self.steps
        elif _OPTIMIZER_STEP.match(name):
            yield self.optimizer_steps
        elif _CHECKPOINT in name:
            yield self.checkpoint_backwards
        elif name.startswith(_EVALUATE):
            yield self.operation_backwards

    def _add_product(self, name: str, args: Mapping[str, Any]) -> None:
        """Add the FLOPs of a matrix product by the sizes of its operands, where recorded."""
        sizes: Any = args.get("Input Dims") or args.get("Input dims")
        key = external_id(args)
        # Of a product's numbers: a multiplication and an addition each.
        flops = 4 if _PACKED_TYPE in str(args.get("Input type")) else 2
        try:
            if name not in GROUPED_OPS:
                left, right = (sizes[position] for position in MATRIX_OPS[name])
                self.matrix_flops[key] = float(flops * prod(left) * right[-1])
                return
            left, right = sizes[0], sizes[1]
            rows = prod(left[:-1])
            if len(right) == 3 and rows and right[0]:
                self.matrix_flops[key] = float(flops * rows * left[-1] * right[-1])
                self.grouped_rows.append((float(rows), int(right[0])))
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            return

    def find_launches(self, correlations: Floats) -> tuple[Floats, Floats]:
        """Return when the calls of these correlations began and returned; NaN: not recorded."""
        table = np.frombuffer(self._launches, dtype=np.float64).reshape(-1, 3)
        if not len(table):
            nowhere = np.full(len(correlations), np.nan)
            return nowhere, nowhere
        # The last call of a correlation counts.
        order = np.argsort(table[:, 0], kind="stable")
        keys = table[order, 0]
        places = np.searchsorted(keys, correlations, side="right") - 1
        is_called = (places >= 0) & (keys[np.maximum(places, 0)] == correlations)
        calls = table[order[np.maximum(places, 0)]]
        return (
            np.where(is_called, calls[:, 1], np.nan),
            np.where(is_called, calls[:, 2], np.nan),
        )

    @property
    def launching_ranges(self) -> HostRanges:
        """Return the long ranges of the threads that launch; of all threads where none does."""
        table = np.frombuffer(self._ranges, dtype=np.float64).reshape(-1, 4)
        if self._launching:
            table = table[np.isin(table[:, 3], list(self._launching))]
        table = table[np.argsort(table[:, 1], kind="stable")]
        return HostRanges(
            names=tuple(map(escape_controls, self._range_names)),
            name_index=table[:, 0].astype(np.int64),
            start_s=table[:, 1],
            end_s=table[:, 2],
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


def read_span(event: Mapping[str, Any]) -> TimeSpan | None:
    """Return start and end of an event in seconds; None where they are no times."""
    try:
        start = float(event["ts"]) * US
        length = float(event.get("dur") or 0) * US
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not (abs(start) < _LATEST_S and length < _LONGEST_S):  # false for NaN, too
        return None
    return start, start + max(0.0, length)


def parse_event(event: Any) -> dict[str, Any] | None:
    """Parse a complete event: its times in seconds, its category in lower case.

    Return None for any other event, and for one whose times are not numbers.
    """
    if not isinstance(event, dict) or event.get("ph", "X") != "X":
        return None
    span = read_span(event)
    if span is None:
        return None
    args = event.get("args")
    return {
        **event,
        "name": str(event.get("name", "")),
        "cat": str(event.get("cat", "")).casefold(),
        "args": args if isinstance(args, dict) else {},
        "start": span[0],
        "end": span[1],
    }


def collect_host_events(events: Iterable[Mapping[str, Any]]) -> HostEvents:
    """Collect what the host did from parsed events."""
    host = HostEvents()
    for event in events:
        category = event["cat"]
        if category in RUNTIME_CATEGORIES or category in HOST_CATEGORIES:
            span = (event["start"], event["end"])
            host.add(category, event["name"], span, event["args"], thread_of(event))
    return host


def thread_of(event: Mapping[str, Any]) -> str:
    """Return the process and thread of an event."""
    return f"{event.get('pid')}/{event.get('tid')}"


def external_id(args: Mapping[str, Any]) -> float:
    """Return the id that ties a kernel to the operation that launched it; NaN: not recorded."""
    return to_key(args.get("External id", args.get("external id")))


def to_key(value: Any) -> float:
    """Return a number that ties events together; NaN where it is none."""
    if value.__class__ is int and abs(value) < _LARGEST_KEY:
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def read_payload_bytes(args: Mapping[str, Any]) -> float:
    """Return the bytes that the rank hands in to a collective."""
    dtype = str(args.get("dtype") or "").casefold()
    nbytes = 1 if dtype.startswith("float8") else _NBYTES.get(dtype, 4)
    try:
        return float(nbytes * to_int(args.get("In msg nelems")))
    except OverflowError:
        return 0.0


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Parse ranks as a list or as its text.

    A long list is printed with its middle left out, which says nothing.
    """
    return _ranks_in_text(str(value or ""))


@cache
def _ranks_in_text(text: str) -> tuple[int, ...]:
    return () if "..." in text else tuple(int(number) for number in re.findall(r"\d+", text))


def to_int(value: Any) -> int:
    """Return a whole number; 0 for what is none."""
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
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
