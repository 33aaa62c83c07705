"""What a step would take if a part of it were faster, from one rank's trace.

The trace is a graph: the host launches one kernel after the other and waits where it synchronises;
a kernel begins when it has been launched, the one before it on its stream has ended, and what it
waits for on other streams too. Which kernels wait for which is not recorded. So each change has two
answers: `low_s` where a kernel waits for another stream only where its start shows it, and
`high_s` where it waits for all that had ended before it. Both replay the trace as it is where
nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np

from moewright.diagnosis.traces.capture import Capture, KernelKind, KernelTable
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.diagnosis.traces.trace_changes import HOST, NETWORK, TraceChange
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Collective
from moewright.spec.record import Record, Row

ALL_RANKS = -1  # as the rank of an answer: all ranks were replayed together
_SHOWN_S = 6e-6  # after the end of another stream's kernel, a start shows that it waited for that
_CLOCK_S = 1e-9  # of traces
_KINDS = tuple(KernelKind)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TraceWhatIf(Record):
    """The seconds of a step under a change, between two bounds, beside those that were measured.

    `replayed_s` is the step of the unchanged graph; `change` is in words, and `speeds` say how many
    times as fast a part is.
    """

    rank: int
    steps: int
    change: str
    speeds: Mapping[str, float]
    measured_s: float
    replayed_s: float
    low_s: float
    high_s: float

    def title(self) -> str:
        """Return the change."""
        return self.change

    def to_rows(self) -> list[Row]:
        """Return one row."""
        return [
            {
                "rank": self.rank,
                "measured_s": self.measured_s,
                "replayed_s": self.replayed_s,
                "low_s": self.low_s,
                "high_s": self.high_s,
            }
        ]


def replay_trace(capture: Capture, change: TraceChange) -> TraceWhatIf:
    """Replay the steps of a capture, unchanged and changed.

    Raises:
        BadInput: the trace marks no steps, or has no kernels in them, or it does not hold what the
            change needs.
    """
    if not capture.steps:
        rule = "marks no steps (ProfilerStep), without which nothing is replayed"
        nearest = "prof.step() after each step"
        raise BadInput(Reason(field=str(capture.path), rule=rule, nearest=nearest))
    for name, value in (("ep", change.ep), ("schedule", change.schedule)):
        if value:
            rule = "needs the traces of all ranks of a run of this engine, beside its plan.json"
            nearest = f"moewright plan --layout {name}={value}"
            raise BadInput(Reason(field=f"--what-if {name}", rule=rule, nearest=nearest))
    graph = _Graph(capture)
    if change.has_graphs:
        graph.check_captured(str(capture.path))
    count = len(capture.steps)
    return TraceWhatIf(
        rank=capture.rank,
        steps=count,
        change=change.title(),
        speeds=dict(change.speeds),
        measured_s=graph.measured_s / count,
        replayed_s=graph.replay(TraceChange(), waits_for_all=False) / count,
        low_s=graph.replay(change, waits_for_all=False) / count,
        high_s=graph.replay(replace(change, has_overlap=False), waits_for_all=True) / count,
    )


class _Graph:
    """The kernels and launches of the marked steps, in the order of their starts."""

    def __init__(self, capture: Capture) -> None:
        first_s, last_s = capture.steps[0][0], capture.steps[-1][1]
        table = capture.kernels
        launched_s = np.where(np.isnan(table.launched_s), table.start_s, table.launched_s)
        table = table.select((launched_s >= first_s) & (launched_s < last_s))
        if not len(table.start_s):
            rule = "has no kernels in its marked steps"
            raise BadInput(Reason(field=str(capture.path), rule=rule))
        if bool((table.launched_s == table.start_s).all()):  # operations of a CPU launch nothing
            table = replace(table, launched_s=np.full(len(table.start_s), np.nan))
        self._table = table
        self._first_s = first_s
        self._steps = capture.steps
        self._capture = capture
        self._mark_s = last_s
        self._last_s = max(last_s, float(table.end_s.max()))
        self._syncs = [(float(a), float(b)) for a, b in capture.syncs if first_s <= a < last_s]
        self._launches = list(_order_launches(table))
        self._before, self._shown, self._earlier = _find_waits(table)
        self._awaited = [self._find_awaited(sync) for sync in self._syncs]

    @property
    def measured_s(self) -> float:
        return self._last_s - self._first_s

    def _find_awaited(self, sync: tuple[float, float]) -> int:
        """Return the kernel whose end lets the host go on; -1: none does."""
        table = self._table
        launched = np.nan_to_num(table.launched_s, nan=inf)
        mask = (launched <= sync[0]) & (table.end_s <= sync[1] + _SHOWN_S)
        mask &= table.end_s > sync[0]
        if not mask.any():
            return -1
        return int(np.flatnonzero(mask)[np.argmax(table.end_s[mask])])

    def check_captured(self, path: str) -> None:
        """Refuse graphs of steps inside of which the host waits for the device."""
        for begin_s, end_s in self._captured_spans():
            waits = [sync for sync in self._syncs if begin_s <= sync[0] < end_s]
            if waits:
                rule = (
                    f"is not carried: the host waits for the device {len(waits)} times within a "
                    "step, which no graph can hold"
                )
                nearest = "host=inf, or a trace of static shapes"
                reason = Reason(field=f"--what-if graphs of {path}", rule=rule, nearest=nearest)
                raise BadInput(reason)

    def _captured_spans(self) -> list[tuple[float, float]]:
        """Return the time from the first launch of each step to its last.

        Where nothing is launched, as on a CPU, that from its first operation to its last.
        """
        launched_s = self._table.launched_s
        if not self._launches:
            launched_s = self._table.start_s
        spans = []
        for begin_s, end_s in self._steps:
            inside = launched_s[(launched_s >= begin_s) & (launched_s < end_s)]
            if len(inside):
                spans.append((float(inside.min()), float(inside.max())))
        return spans

    def replay(self, change: TraceChange, *, waits_for_all: bool) -> float:
        """Return the seconds of the steps; what a kernel waits for is as its start shows, or all.

        Events are taken in the order in which they were, so that all that one depends on is known.
        """
        table = self._table
        speeds = change.speeds
        lengths_s = self._scale_lengths(speeds)
        host_speed = speeds.get(HOST, 1.0)
        starts_s = np.zeros(len(lengths_s))
        ends_s = np.zeros(len(lengths_s))
        captured = self._captured_spans() if change.has_graphs else []
        host = _Host(self._first_s, self._syncs, host_speed, captured)
        aside = self._find_reductions() if change.has_overlap else frozenset[int]()
        launch = 0
        for kernel in range(len(lengths_s)):
            while (
                launch < len(self._launches)
                and self._launches[launch][0] <= (table.start_s[kernel])
            ):
                moment_s, owner = self._launches[launch]
                starts_s[owner] = host.go_to(moment_s, ends_s, table.end_s, self._awaited)
                launch += 1
            is_launched = isfinite(float(table.launched_s[kernel]))
            was_s = float(table.launched_s[kernel]) if is_launched else self._first_s
            ready_s = starts_s[kernel] if is_launched else self._first_s
            waits = list(self._earlier[kernel] if waits_for_all else self._shown[kernel])
            if self._before[kernel] >= 0:
                waits.append(self._before[kernel])
            for other in waits:
                was_s = max(was_s, float(table.end_s[other]))
                if kernel in aside or other not in aside:
                    ready_s = max(ready_s, ends_s[other])
            lag_s = max(0.0, float(table.start_s[kernel]) - was_s)
            if not is_launched:  # what the thread did between two operations
                lag_s /= host_speed
                if any(begin < table.start_s[kernel] <= end for begin, end in captured):
                    lag_s = 0.0
            starts_s[kernel] = ready_s + lag_s
            ends_s[kernel] = starts_s[kernel] + lengths_s[kernel]
        if self._launches:
            end_s = host.go_to(self._mark_s, ends_s, table.end_s, self._awaited)
        else:
            idle_s = max(0.0, self._mark_s - float(table.end_s.max()))
            end_s = float(ends_s.max()) + idle_s / host_speed
        return max(float(ends_s.max()), end_s) - self._first_s

    def _find_reductions(self) -> frozenset[int]:
        """Return the kernels that exchange gradients: nothing waits for them but the step's end."""
        table = self._table
        is_reduction = [
            channel.op in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
            and told.comm is CommClass.DP
            for channel, told in zip(
                self._capture.channels, classify_channels(self._capture, None), strict=True
            )
        ]
        if not any(is_reduction):
            rule = "is not carried: no exchange is known to be that of gradients"
            nearest = "network=inf"
            raise BadInput(Reason(field="--what-if overlap", rule=rule, nearest=nearest))
        mask = np.array([*is_reduction, False], dtype=bool)[table.channel_index]
        return frozenset(np.flatnonzero(mask).tolist())

    def _scale_lengths(self, speeds: Mapping[str, float]) -> np.ndarray:
        lengths_s = self._table.end_s - self._table.start_s
        for name, speed in speeds.items():
            kind = KernelKind.COMMUNICATION if name == NETWORK else name
            if kind in _KINDS:
                mask = self._table.has_kind(KernelKind(kind))
                lengths_s = np.where(mask, lengths_s / speed, lengths_s)
        return lengths_s


class _Host:
    """The host's clock: it runs between launches, and waits where it synchronised."""

    def __init__(
        self,
        first_s: float,
        syncs: list[tuple[float, float]],
        speed: float,
        captured: list[tuple[float, float]],
    ) -> None:
        self._was_s = first_s
        self._now_s = first_s
        self._syncs = syncs
        self._next = 0
        self._speed = speed
        self._captured = captured  # spans in which a graph launches, and the host nothing

    def go_to(
        self, moment_s: float, ends_s: np.ndarray, old_ends_s: np.ndarray, awaited: list[int]
    ) -> float:
        """Return when the host is where it was at a moment of the trace."""
        while self._next < len(self._syncs) and self._syncs[self._next][1] <= moment_s + _CLOCK_S:
            begin_s, end_s = self._syncs[self._next]
            kernel = awaited[self._next]
            self._next += 1
            if begin_s < self._was_s - _CLOCK_S:
                continue  # another thread waited meanwhile
            self._run_to(begin_s)
            if kernel < 0:
                self._run_to(end_s)
                continue
            after_s = max(0.0, end_s - float(old_ends_s[kernel]))
            self._now_s = max(self._now_s, float(ends_s[kernel])) + after_s
            self._was_s = end_s
        self._run_to(moment_s)
        return self._now_s

    def _run_to(self, moment_s: float) -> None:
        free_s = sum(
            max(0.0, min(moment_s, end_s) - max(self._was_s, begin_s))
            for begin_s, end_s in self._captured
        )
        self._now_s += max(0.0, moment_s - self._was_s - free_s) / self._speed
        self._was_s = max(self._was_s, moment_s)


def _order_launches(table: KernelTable) -> Iterator[tuple[float, int]]:
    """Yield the launches in the order of the host, each with its kernel."""
    for kernel in np.argsort(table.launched_s, kind="stable"):
        if isfinite(float(table.launched_s[kernel])):
            yield float(table.launched_s[kernel]), int(kernel)


def _find_waits(
    table: KernelTable,
) -> tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return, for each kernel, the one before it on its stream, and those of other streams.

    Of other streams these are the one whose end its start shows, and the last of each that had
    ended.
    """
    before: list[int] = []
    shown: list[tuple[int, ...]] = []
    earlier: list[tuple[int, ...]] = []
    last: dict[int, int] = {}  # of each stream, the kernel that began last
    ended: dict[int, list[int]] = {}
    for kernel, stream in enumerate(table.stream_index.tolist()):
        start_s = float(table.start_s[kernel])
        others = []
        for other, kernels in ended.items():
            if other == stream:
                continue
            done = [item for item in kernels[-2:] if table.end_s[item] <= start_s + _CLOCK_S]
            if done:
                others.append(done[-1])
        own = last.get(stream, -1)
        free_s = -inf if own < 0 else float(table.end_s[own])
        launched_s = float(table.launched_s[kernel])
        if isfinite(launched_s):
            free_s = max(free_s, launched_s)
        # Threads of a host hand work to each other, and take their time for it.
        reach_s = _SHOWN_S if isfinite(launched_s) else inf
        shows = [
            item
            for item in others
            if table.end_s[item] > free_s and start_s - table.end_s[item] <= reach_s
        ]
        before.append(own)
        shown.append(tuple(sorted(shows, key=lambda item: table.end_s[item])[-1:]))
        earlier.append(tuple(others))
        last[stream] = kernel
        ended.setdefault(stream, []).append(kernel)
    return before, shown, earlier
