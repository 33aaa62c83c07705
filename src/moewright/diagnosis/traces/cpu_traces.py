"""Traces of programs that computed on the CPU.

Operations are read as kernels, and the time between them as idle time. Over gloo a rank's thread
blocks while it waits; the engine records such a wait as a range that names the group. In traces of
other programs, the ranges of gloo's own threads say how long a collective took, including the wait
for late ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf, nan, prod
from pathlib import Path
from typing import Any

from moewright.codec.files import as_table
from moewright.diagnosis.traces.capture import (
    Capture,
    CollectiveCall,
    CommChannel,
    KernelKind,
    KernelRow,
    KernelTableBuilder,
    Message,
    collective_in_name,
    kernel_kind,
)
from moewright.diagnosis.traces.comm_classes import find_trainer_marks
from moewright.diagnosis.traces.intervals import NO_INTERVALS
from moewright.diagnosis.traces.kineto_events import (
    GROUPED_OPS,
    MATRIX_OPS,
    collect_host_events,
    covers,
    external_id,
    find_rank,
    parse_ranks,
    read_payload_bytes,
    steps_between,
    to_int,
    to_intervals,
)
from moewright.spec.run import (
    BEGIN_RANGE_PREFIX,
    CALL_MARK,
    GRADIENT_RANGE_PREFIX,
    REDUCE_RANGE_PREFIX,
    WAIT_RANGE_PREFIX,
)

_GLOO = "gloo:"
_SEND = "c10d::send"
_RECEIVE = "c10d::recv_"
_GLOO_RECEIVE = "gloo:recv"
_GLOO_MESSAGES = ("gloo:send", _GLOO_RECEIVE)
# Launches of collectives: no work of their own.
_CALL = re.compile(r"^c10d::|^record_param_comms|^gloo:")
_LIBRARY = re.compile(r"^(?!autograd::|moewright::)\w+::")
_MATRIX = (KernelKind.GEMM, KernelKind.GROUPED_GEMM, KernelKind.ATTENTION)
# Operations that are named like matrix operations and only lead to one.
_ENTRANCES = ("aten::matmul", "aten::scaled_dot_product_attention")
_ENGINE_GROUPED = "moewright::group_by_group"
_NAMED_RANK = re.compile(r"rank (\d+)")  # as the engine's profiler names processes
_NOTE = (
    "computed on the CPU: gaps between its operations are the interpreter's, a sleep or a wait "
    "for a core"
)
_C10_NAMES = {"long int": "long", "unsigned char": "byte", "signed char": "char"}

_Event = Mapping[str, Any]


def read_cpu_captures(
    events: list[dict[str, Any]],
    raw_events: Iterable[Any],
    metadata: Mapping[str, Any],
    path: Path,
    index: int,
) -> Iterator[Capture]:
    """Yield a capture for each process with operations; a file may hold several ranks.

    `events` are parsed, `raw_events` as they stand in the file, `index` is that of the file.
    """
    events_of_process: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        events_of_process[event.get("pid")].append(event)
    working = {
        pid: process_events
        for pid, process_events in events_of_process.items()
        if any(event["cat"] == "cpu_op" for event in process_events)
    }
    names = _process_names(raw_events)
    processes = sorted(working.items(), key=lambda pair: str(pair[0]))
    for number, (pid, process_events) in enumerate(processes):
        named = _NAMED_RANK.search(names.get(pid, ""))
        if named:
            rank = int(named[1])
        elif len(processes) == 1:
            rank = find_rank(metadata, path, index)
        else:
            rank = number
        yield _build_capture(process_events, metadata, path, rank)


def _process_names(raw_events: Iterable[Any]) -> dict[Any, str]:
    """Return what each process is called."""
    names = {}
    for event in raw_events:
        if isinstance(event, dict) and event.get("name") == "process_name":
            names[event.get("pid")] = str((event.get("args") or {}).get("name", ""))
    return names


def _build_capture(
    events: list[dict[str, Any]], metadata: Mapping[str, Any], path: Path, rank: int
) -> Capture:
    host = collect_host_events(events)
    recomputed = host.recomputed
    builder = KernelTableBuilder()
    for event, kind in _operations(events):
        row = KernelRow(
            name=event["name"],
            start_s=event["start"],
            end_s=event["end"],
            stream=_stream(event),
            launched_s=event["start"],
            kind=kind,
            flops=host.matrix_flops.get(external_id(event["args"]), 0.0),
            is_recompute=covers(recomputed, event["start"]),
        )
        builder.add(row)
    for event, channel in _communication(events, metadata):
        row = KernelRow(
            name=channel.kernel,
            start_s=event["start"],
            end_s=event["end"],
            stream=_stream(event),
            launched_s=event["start"],
            kind=KernelKind.COMMUNICATION,
            channel_index=builder.channel_index(channel),
            payload_bytes=read_payload_bytes(_message_args(event["args"])),
        )
        builder.add(row)
    steps = host.steps or steps_between(host.optimizer_steps)
    return Capture(
        path=path,
        rank=rank,
        device="CPU",
        memory_bytes=0,
        allocated_bytes=0,
        reserved_bytes=0,
        kernels=builder.build(),
        streams=builder.streams,
        channels=builder.channels,
        steps=tuple(sorted(steps)),
        first_s=min(event["start"] for event in events),
        syncs=NO_INTERVALS,  # nothing runs behind the host's back
        data_waits=to_intervals(host.data_waits),
        gc_pauses=to_intervals(host.gc_pauses),
        host_ranges=host.launching_ranges,
        trainer_marks=find_trainer_marks(host.names, builder.channels),
        messages=tuple(_messages(events)),
        calls=tuple(_list_calls(events)),
        notes=(_NOTE,),
    )


def _stream(event: _Event) -> str:
    return str(event.get("tid", 0))


def _operations(events: Sequence[_Event]) -> Iterator[tuple[_Event, KernelKind]]:
    """Yield the outermost operations of torch's libraries, whose time counts as work.

    Two kinds of operation are replaced by those inside them: operations written in Python (autograd
    Functions, the engine's own), whose time includes the interpreter's, and operations that only
    lead to a matrix product or to attention.
    """
    gloo_threads = {
        event.get("tid")
        for event in events
        # Messages are sent and received by the thread that asks; collectives have their own.
        if event["name"].startswith(_GLOO) and event["name"] not in _GLOO_MESSAGES
    }
    threads: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        is_compute = event["cat"] == "cpu_op" and not _CALL.match(event["name"])
        if is_compute and event.get("tid") not in gloo_threads:
            threads[event.get("tid")].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["start"], -event["end"]))
        yield from _outermost_operations(thread)


def _outermost_operations(thread: Sequence[_Event]) -> Iterator[tuple[_Event, KernelKind]]:
    """Yield the outermost operations of one thread, sorted by start, the enclosing one first."""
    busy_until = 0.0
    grouped_until = 0.0
    for event, is_entrance in zip(thread, _find_entrances(thread), strict=True):
        name = event["name"]
        if name == _ENGINE_GROUPED:
            grouped_until = event["end"]
        if event["start"] < busy_until or is_entrance or not _LIBRARY.match(name):
            continue
        busy_until = event["end"]
        kind = _operation_kind(name)
        if kind is KernelKind.GEMM and event["start"] < grouped_until:
            kind = KernelKind.GROUPED_GEMM
        yield event, kind


def _find_entrances(thread: Sequence[_Event]) -> list[bool]:
    """Return for each operation whether it only leads to a matrix operation inside of it."""
    is_entrance = [False] * len(thread)
    enclosing = list[int]()
    for index, event in enumerate(thread):
        while enclosing and thread[enclosing[-1]]["end"] <= event["start"]:
            enclosing.pop()
        if _operation_kind(event["name"]) in _MATRIX:
            for outer in enclosing:
                name = thread[outer]["name"]
                is_entrance[outer] = name in _ENTRANCES or _operation_kind(name) not in _MATRIX
        enclosing.append(index)
    return is_entrance


@cache
def _operation_kind(name: str) -> KernelKind:
    if name in MATRIX_OPS:
        return KernelKind.GEMM
    return KernelKind.GROUPED_GEMM if name in GROUPED_OPS else kernel_kind(name)


def _communication(
    events: Iterable[_Event], metadata: Mapping[str, Any]
) -> Iterator[tuple[_Event, CommChannel]]:
    """Yield the waits that name their group; without any, the ranges of gloo's threads."""
    waits = [event for event in events if event["name"].startswith(WAIT_RANGE_PREFIX)]
    for event in waits:
        group = event["name"].removeprefix(WAIT_RANGE_PREFIX).partition(CALL_MARK)[0]
        kernel = WAIT_RANGE_PREFIX + group
        yield event, CommChannel(op=None, group=group, description=group, kernel=kernel)
    if waits:
        return
    ranks = _ranks_of_only_group(metadata)
    for event in events:
        if event["name"].startswith(_GLOO):
            op = collective_in_name(event["name"].removeprefix(_GLOO))
            yield event, CommChannel(op=op, ranks=ranks, size=len(ranks), kernel=event["name"])


def _messages(events: Iterable[_Event]) -> Iterator[Message]:
    """Yield the messages between two ranks: when a send began, and when what was received came.

    The range of gloo's that follows a call to receive lasts until the message is there.
    """
    pending: list[int] = []
    for event in sorted(events, key=lambda event: event["start"]):
        name = event["name"]
        if name in (_SEND, _RECEIVE):
            try:
                peer = to_int(event["args"]["Concrete Inputs"][2])
            except (KeyError, IndexError, TypeError):
                continue
            if name == _SEND:
                yield Message(is_send=True, peer=peer, moment_s=event["start"])
            else:
                pending.append(peer)
        elif name == _GLOO_RECEIVE and pending:
            yield Message(is_send=False, peer=pending.pop(0), moment_s=event["end"])


def _list_calls(events: Iterable[_Event]) -> Iterator[CollectiveCall]:
    """Yield the collectives that the engine marks: their begins, waits, and gradients.

    Calls of a group are numbered, again from 0 after CALL_NUMBERS: a wait is for the latest of its
    number. A bucket's gradients are there when the last one before its reduction was added.
    """
    begins: list[tuple[str, float, float]] = []  # group, begin, gradients
    waits_s: dict[int, float] = {}
    latest: dict[str, int] = {}
    gradients_s: dict[str, float] = {}
    reduced, reduced_until_s = "", -inf
    for event in sorted(events, key=lambda event: (event["start"], -event["end"])):
        prefix, _, name = event["name"].partition(":")
        prefix += ":"
        if prefix == GRADIENT_RANGE_PREFIX:
            gradients_s[name] = event["end"]
        elif prefix == REDUCE_RANGE_PREFIX:
            reduced, reduced_until_s = name, event["end"]
        elif prefix == BEGIN_RANGE_PREFIX:
            ready_s = nan
            if event["start"] < reduced_until_s:
                ready_s = gradients_s.pop(reduced, nan)
            latest[name] = len(begins)
            begins.append((name.partition(CALL_MARK)[0], event["start"], ready_s))
        elif prefix == WAIT_RANGE_PREFIX and name in latest:
            waits_s[latest.pop(name)] = event["start"]
    for number, (group, begin_s, ready_s) in enumerate(begins):
        wait_s = waits_s.get(number, inf)
        yield CollectiveCall(group=group, begin_s=begin_s, wait_s=wait_s, gradients_s=ready_s)


def _ranks_of_only_group(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the process group, where all groups that are listed have the same.

    Otherwise nothing is known: a range of gloo does not name its own group.
    """
    distributed = metadata.get("distributedInfo")
    listed = as_table(distributed).get("pg_config")
    groups = {parse_ranks(group.get("ranks")) for group in listed or [] if isinstance(group, dict)}
    return groups.pop() if len(groups) == 1 else ()


def _message_args(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first operand as the arguments of a collective that name its size."""
    try:
        dims = args["Input Dims"][0]
        dtype = str(args["Input type"][0]).removeprefix("c10::")
    except (KeyError, IndexError, TypeError):
        return {}
    count = prod(to_int(dim) for dim in dims) if isinstance(dims, list) else 1
    return {"dtype": _C10_NAMES.get(dtype, dtype), "In msg nelems": count}
