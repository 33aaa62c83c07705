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

from moewright.diagnosis.traces.capture import Capture, Channel, Columns, Work, op_of, work_of
from moewright.diagnosis.traces.host_events import (
    GROUPED,
    PRODUCTS,
    between,
    host_of,
    inside,
    payload_of,
    rank_of,
    ranks_of,
    spans_of,
    whole,
)
from moewright.diagnosis.traces.spans import NONE
from moewright.spec.run import WAIT_RANGE

_GLOO = "gloo:"
_CALL = re.compile(
    r"^c10d::|^record_param_comms|^gloo:"
)  # launches of collectives: no work of their own
_LIBRARY = re.compile(r"^(?!autograd::|moewright::)\w+::")
_MATRIX = (Work.GEMM, Work.GROUPED_GEMM, Work.ATTENTION)
_ENTRANCES = (
    "aten::matmul",
    "aten::scaled_dot_product_attention",
)  # named like one, and leading to one
_OUR_GROUPED = "moewright::group_by_group"
_NAMED_RANK = re.compile(r"rank (\d+)")  # engine.profile names processes so
_NOTE = "computed on the CPU: what is between its operations is the interpreter's, a sleep or a wait for a core"

_Event = Mapping[str, Any]


def host_captures(
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
        alone = rank_of(about, path, place) if len(working) == 1 else number
        yield _capture(found, about, path, int(said[1]) if said else alone)


def _names(raw: Iterable[Any]) -> dict[Any, str]:
    """What each process is called."""
    named = [each for each in raw if isinstance(each, dict) and each.get("name") == "process_name"]
    return {each.get("pid"): str((each.get("args") or {}).get("name", "")) for each in named}


def _capture(
    events: list[dict[str, Any]], about: Mapping[str, Any], path: Path, rank: int
) -> Capture:
    host, columns = host_of(events), Columns()
    replays = host.replayed
    for event, work in _operations(events):
        columns.add(
            name=event["name"],
            start_s=event["start"],
            end_s=event["end"],
            stream=str(event.get("tid", 0)),
            launched_s=event["start"],
            work=work,
            flops=host.products.get(
                event["args"].get("External id", event["args"].get("external id")), 0.0
            ),
            replayed=inside(replays, event["start"]),
        )
    for event, channel in _communication(events, about):
        columns.add(
            name=event["name"],
            start_s=event["start"],
            end_s=event["end"],
            stream=str(event.get("tid", 0)),
            launched_s=event["start"],
            work=Work.COMMUNICATION,
            channel=columns.channel(channel),
            payload=payload_of(_message(event["args"])),
        )
    return Capture(
        source=path.name,
        rank=rank,
        device="CPU",
        memory_bytes=0,
        allocated_bytes=0,
        reserved_bytes=0,
        kernels=columns.kernels(),
        streams=columns.streams,
        channels=columns.channels,
        steps=tuple(sorted(host.steps or between(host.optimizer))),
        syncs=NONE,  # nothing runs behind the host's back
        loading=spans_of(host.loading),
        collecting=spans_of(host.collecting),
        notes=(_NOTE,),
    )


def _operations(events: Iterable[_Event]) -> Iterator[tuple[_Event, Work]]:
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
                Work.GROUPED_GEMM if work is Work.GEMM and event["start"] < grouped_until else work,
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
def _work(name: str) -> Work:
    if name in PRODUCTS:
        return Work.GEMM
    return Work.GROUPED_GEMM if name in GROUPED else work_of(name)


def _communication(
    events: Iterable[_Event], about: Mapping[str, Any]
) -> Iterator[tuple[_Event, Channel]]:
    """Waits that name their group; where there are none, the ranges of gloo's threads."""
    waits = [event for event in events if event["name"].startswith(WAIT_RANGE)]
    for event in waits:
        group = event["name"].removeprefix(WAIT_RANGE)
        yield event, Channel(op=None, group=group, description=group, kernel=event["name"])
    if waits:
        return
    ranks, size = _only_group(about)
    for event in events:
        if event["name"].startswith(_GLOO):
            op = op_of(event["name"].removeprefix(_GLOO))
            yield event, Channel(op=op, ranks=ranks, size=size, kernel=event["name"])


def _only_group(about: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Ranks and size of the process group, where all that are listed are the same: a range does not
    name its own."""
    said = about.get("distributedInfo")
    listed = said.get("pg_config") if isinstance(said, dict) else None
    groups = {ranks_of(each.get("ranks")) for each in listed or [] if isinstance(each, dict)}
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
        count *= whole(dim)
    return {
        "dtype": _CALLED.get(dtype.removeprefix("c10::"), dtype.removeprefix("c10::")),
        "In msg nelems": count,
    }


_CALLED = {"long int": "long", "unsigned char": "byte", "signed char": "char"}
