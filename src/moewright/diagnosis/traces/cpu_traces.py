"""Traces of programs that computed on the CPU: operations stand for kernels, and what is between
them for idle time.

Over gloo a rank's thread blocks in a wait, which the engine records as a range that names the
group; of other programs the ranges of gloo's own threads tell how long a collective took, the wait
for late ranks in it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    KernelKind,
    KernelTableBuilder,
    collective_in_name,
    kernel_kind,
)
from moewright.diagnosis.traces.intervals import NO_INTERVALS
from moewright.diagnosis.traces.kineto_events import (
    GROUPED_OPS,
    MATRIX_OPS,
    collect_host_events,
    covers,
    find_rank,
    parse_ranks,
    read_payload_bytes,
    steps_between,
    to_int,
    to_intervals,
)
from moewright.spec.run import WAIT_RANGE_PREFIX

_GLOO = "gloo:"
_CALL = re.compile(
    r"^c10d::|^record_param_comms|^gloo:"
)  # launches of collectives: no work of their own
_LIBRARY = re.compile(r"^(?!autograd::|moewright::)\w+::")
_MATRIX = (KernelKind.GEMM, KernelKind.GROUPED_GEMM, KernelKind.ATTENTION)
_ENTRANCES = (
    "aten::matmul",
    "aten::scaled_dot_product_attention",
)  # named like one, and leading to one
_OUR_GROUPED = "moewright::group_by_group"
_NAMED_RANK = re.compile(r"rank (\d+)")  # engine.profile names processes so
_NOTE = "computed on the CPU: what is between its operations is the interpreter's, a sleep or a wait for a core"

_Event = Mapping[str, Any]


def read_cpu_captures(
    events: list[dict[str, Any]],
    raw: Iterable[Any],
    about: Mapping[str, Any],
    path: Path,
    place: int,
) -> Iterator[Capture]:
    """One for each process with operations; a file may hold several ranks."""
    processes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        processes[event.get("pid")].append(event)
    working = {
        pid: found
        for pid, found in processes.items()
        if any(each["cat"] == "cpu_op" for each in found)
    }
    names = _names(raw)
    for number, (pid, found) in enumerate(sorted(working.items(), key=lambda pair: str(pair[0]))):
        said = _NAMED_RANK.search(names.get(pid, ""))
        alone = find_rank(about, path, place) if len(working) == 1 else number
        yield _capture(found, about, path, int(said[1]) if said else alone)


def _names(raw: Iterable[Any]) -> dict[Any, str]:
    """What each process is called."""
    named = [each for each in raw if isinstance(each, dict) and each.get("name") == "process_name"]
    return {each.get("pid"): str((each.get("args") or {}).get("name", "")) for each in named}


def _capture(
    events: list[dict[str, Any]], about: Mapping[str, Any], path: Path, rank: int
) -> Capture:
    host, columns = collect_host_events(events), KernelTableBuilder()
    replays = host.recomputed
    for event, work in _operations(events):
        columns.add(
            name=event["name"],
            start_s=event["start"],
            end_s=event["end"],
            stream=str(event.get("tid", 0)),
            launched_s=event["start"],
            kind=work,
            flops=host.matrix_flops.get(
                event["args"].get("External id", event["args"].get("external id")), 0.0
            ),
            is_recompute=covers(replays, event["start"]),
        )
    for event, channel in _communication(events, about):
        columns.add(
            name=event["name"],
            start_s=event["start"],
            end_s=event["end"],
            stream=str(event.get("tid", 0)),
            launched_s=event["start"],
            kind=KernelKind.COMMUNICATION,
            channel_index=columns.channel_index(channel),
            payload_bytes=read_payload_bytes(_message(event["args"])),
        )
    return Capture(
        source=path.name,
        rank=rank,
        device="CPU",
        memory_bytes=0,
        allocated_bytes=0,
        reserved_bytes=0,
        kernels=columns.build(),
        streams=columns.streams,
        channels=columns.channels,
        steps=tuple(sorted(host.steps or steps_between(host.optimizer_steps))),
        syncs=NO_INTERVALS,  # nothing runs behind the host's back
        data_waits=to_intervals(host.data_waits),
        gc_pauses=to_intervals(host.gc_pauses),
        notes=(_NOTE,),
    )


def _operations(events: Iterable[_Event]) -> Iterator[tuple[_Event, KernelKind]]:
    """The outermost operations of torch's libraries: what a thread spends inside them is work.

    Passed through to what is inside: what is written in Python (autograd Functions, the engine's
    operations), where the interpreter runs too, and an operation that only leads to a matrix
    product or to attention.
    """
    threads: dict[Any, list[_Event]] = defaultdict(list)
    ours = {event.get("tid") for event in events if event["name"].startswith(_GLOO)}
    for event in events:
        if (
            event["cat"] == "cpu_op"
            and event.get("tid") not in ours
            and not _CALL.match(event["name"])
        ):
            threads[event.get("tid")].append(event)
    for found in threads.values():
        found.sort(key=lambda event: (event["start"], -event["end"]))
        leads = _leads(found)
        until, grouped_until = 0.0, 0.0
        for event, leading in zip(found, leads, strict=True):
            name = event["name"]
            if name == _OUR_GROUPED:
                grouped_until = event["end"]
            if event["start"] < until or leading or not _LIBRARY.match(name):
                continue
            until = event["end"]
            work = _work(name)
            yield (
                event,
                KernelKind.GROUPED_GEMM
                if work is KernelKind.GEMM and event["start"] < grouped_until
                else work,
            )


def _leads(found: list[_Event]) -> list[bool]:
    """Of each operation of a thread, in order of start: whether a matrix operation is inside of it,
    and it is none."""
    leads, around = [False] * len(found), list[int]()
    for place, event in enumerate(found):
        while around and found[around[-1]]["end"] <= event["start"]:
            around.pop()
        if _work(event["name"]) in _MATRIX:
            for outer in around:
                leads[outer] = (
                    _work(found[outer]["name"]) not in _MATRIX or found[outer]["name"] in _ENTRANCES
                )
        around.append(place)
    return leads


@cache
def _work(name: str) -> KernelKind:
    if name in MATRIX_OPS:
        return KernelKind.GEMM
    return KernelKind.GROUPED_GEMM if name in GROUPED_OPS else kernel_kind(name)


def _communication(
    events: Iterable[_Event], about: Mapping[str, Any]
) -> Iterator[tuple[_Event, CommChannel]]:
    """Waits that name their group; where there are none, the ranges of gloo's threads."""
    waits = [event for event in events if event["name"].startswith(WAIT_RANGE_PREFIX)]
    for event in waits:
        group = event["name"].removeprefix(WAIT_RANGE_PREFIX)
        yield event, CommChannel(op=None, group=group, description=group, kernel=event["name"])
    if waits:
        return
    ranks, size = _only_group(about)
    for event in events:
        if event["name"].startswith(_GLOO):
            op = collective_in_name(event["name"].removeprefix(_GLOO))
            yield event, CommChannel(op=op, ranks=ranks, size=size, kernel=event["name"])


def _only_group(about: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Ranks and size of the process group, where all that are listed are the same: a range does not
    name its own."""
    said = about.get("distributedInfo")
    listed = said.get("pg_config") if isinstance(said, dict) else None
    groups = {parse_ranks(each.get("ranks")) for each in listed or [] if isinstance(each, dict)}
    if len(groups) != 1:
        return (), 0
    (ranks,) = groups
    return ranks, len(ranks)


def _message(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first operand as the arguments of a collective that name its size."""
    try:
        dims, dtype = args["Input Dims"][0], str(args["Input type"][0])
    except (KeyError, IndexError, TypeError):
        return {}
    count = 1
    for dim in dims if isinstance(dims, list) else ():
        count *= to_int(dim)
    return {
        "dtype": _CALLED.get(dtype.removeprefix("c10::"), dtype.removeprefix("c10::")),
        "In msg nelems": count,
    }


_CALLED = {"long int": "long", "unsigned char": "byte", "signed char": "char"}
