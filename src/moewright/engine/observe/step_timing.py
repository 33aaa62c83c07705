"""What a step costs a rank besides its phases: waits, time without a core, garbage collection."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from torch.profiler import record_function

from moewright.engine.torch_private import is_profiling
from moewright.rules.grid import group_ranks
from moewright.spec.layout import Layout
from moewright.spec.ledger import StepPhase, TimeRow
from moewright.spec.run import (
    BEGIN_RANGE_PREFIX,
    CALL_MARK,
    CALL_NUMBERS,
    WAIT_RANGE_PREFIX,
    DeviceSample,
    GroupWait,
    HostTime,
    RankTiming,
)

# Microseconds of every wait of a step, by group, in the order of the calls.
CallsByGroup = Mapping[str, Sequence[int]]

# Nanoseconds on a core, nanoseconds ready without one, time slices (Linux: sched-stats.rst).
_SCHEDULER_FILE = Path("/proc/thread-self/schedstat")


class SchedulerClock:
    """A clock of the thread that creates it, read from the statistics of Linux's scheduler."""

    def __init__(self) -> None:
        self._file = None
        if os.access(_SCHEDULER_FILE, os.R_OK):
            self._file = _SCHEDULER_FILE.open("rb", buffering=0)

    def read(self) -> tuple[float, float]:
        """Return the seconds on a core, and those ready without one (0 where not told)."""
        if self._file is None:
            return time.thread_time(), 0.0
        # From the start each time, which makes the kernel write the file anew.
        running_ns, queued_ns, _ = os.pread(self._file.fileno(), 80, 0).split()
        return int(running_ns) * 1e-9, int(queued_ns) * 1e-9


class WaitClock:
    """A clock of the time that this rank is blocked on the collectives of each group.

    Time in which the rank was ready and had no core does not count. Where a device runs the
    collectives, the host does not block and a wait of it says nothing: with `blocking` False the
    clock stands still.
    """

    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking
        # A clock for each thread: a backward beside a forward has one of its own.
        self._thread = threading.local()
        self._waits: dict[str, list[float]] = defaultdict(list)
        self._begun: dict[str, int] = defaultdict(int)

    def begin_call(self, group: str) -> str:
        """Note in a trace that a collective begins; return what its wait is marked with."""
        if not self._blocking:
            return ""
        mark = f"{CALL_MARK}{self._begun[group]}"
        self._begun[group] = (self._begun[group] + 1) % CALL_NUMBERS
        with self.open_range(BEGIN_RANGE_PREFIX + group + mark):
            pass
        return mark

    def open_range(self, name: str) -> AbstractContextManager[object]:
        """Return a range of a trace for what is inside; nothing where no trace needs it."""
        return record_function(name) if self._blocking and is_profiling() else nullcontext()

    @contextmanager
    def measure(self, group: str, mark: str = "") -> Iterator[None]:
        """Count the time inside as one wait for `group`, for the call of a mark in traces."""
        if not self._blocking:
            yield
            return
        started = time.perf_counter()
        scheduler = self._find_scheduler()
        _, queued_before = scheduler.read()
        try:
            with self.open_range(WAIT_RANGE_PREFIX + group + mark):
                yield
        finally:
            elapsed = time.perf_counter() - started
            _, queued_after = scheduler.read()
            self._waits[group].append(elapsed - (queued_after - queued_before))

    def _find_scheduler(self) -> SchedulerClock:
        """Return the clock of the thread that runs."""
        if not hasattr(self._thread, "scheduler"):
            self._thread.scheduler = SchedulerClock()
        scheduler: SchedulerClock = self._thread.scheduler
        return scheduler

    def take(self) -> tuple[tuple[GroupWait, ...], CallsByGroup]:
        """Return the waits since the last `take`: their sums by group, and every call."""
        sums = tuple(
            GroupWait(group=group, seconds=sum(waits))
            for group, waits in sorted(self._waits.items())
        )
        calls = {
            group: [round(1e6 * seconds) for seconds in waits]
            for group, waits in self._waits.items()
        }
        self._waits.clear()
        return sums, calls


# The newest steady steps whose single calls are kept.
STEPS_KEPT = 8
# The most calls of a group that are kept of one step; where a step has more, none is kept.
CALLS_KEPT = 4096
# Groups in which only neighbours send to each other: no call has all ranks of the group.
_PAIRWISE_GROUPS = ("pp",)


class StepTimer:
    """A timer of a session's steps; the steady steps go into its medians."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._scheduler = SchedulerClock()
        self._started_s = 0.0
        self._started_host = (0.0, 0.0)
        self._gc_s = 0.0
        self._gc_started = 0.0
        self._phases: dict[StepPhase, list[float]] = defaultdict(list)
        self._waits: dict[str, list[float]] = defaultdict(list)
        self._hosts: list[HostTime] = []
        self._devices: list[DeviceSample] = []
        self._calls: deque[CallsByGroup] = deque(maxlen=STEPS_KEPT)
        gc.callbacks.append(self._on_garbage_collection)

    def close(self) -> None:
        """Stop watching the garbage collector."""
        gc.callbacks.remove(self._on_garbage_collection)

    def _on_garbage_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._gc_started = time.thread_time()
        else:
            self._gc_s += time.thread_time() - self._gc_started

    def begin_step(self, wait_clock: WaitClock) -> None:
        """Start a step; waits since the last one, in an evaluation for example, are dropped."""
        wait_clock.take()
        self._gc_s = 0.0
        self._started_s = time.perf_counter()
        self._started_host = self._scheduler.read()

    def end_step(self, waits: tuple[GroupWait, ...]) -> HostTime:
        """End a step of so many waits, and return where the host's time of it went."""
        started_running, started_queued = self._started_host
        running, queued = self._scheduler.read()
        step_s = time.perf_counter() - self._started_s
        running_s = running - started_running
        queued_s = queued - started_queued
        accounted_s = running_s + queued_s + sum(wait.seconds for wait in waits)
        return HostTime(
            running_s=running_s,
            queued_s=queued_s,
            collecting_s=self._gc_s,
            # The clocks are not read at one moment, so that little time may come out negative.
            asleep_s=max(0.0, step_s - accounted_s),
        )

    def add_steady_step(
        self,
        phases: tuple[TimeRow, ...],
        waits: tuple[GroupWait, ...],
        calls: CallsByGroup,
        host: HostTime,
        device: DeviceSample | None,
    ) -> None:
        """Take a step into the medians."""
        if device is not None:
            self._devices.append(device)
        self._calls.append(
            {group: waited for group, waited in calls.items() if len(waited) <= CALLS_KEPT}
        )
        for row in phases:
            self._phases[row.phase].append(row.seconds)
        for wait in waits:
            self._waits[wait.group].append(wait.seconds)
        self._hosts.append(host)

    @property
    def recent_calls(self) -> tuple[CallsByGroup, ...]:
        """The waits of every call of the newest steady steps."""
        return tuple(self._calls)

    def build_rank_timing(self) -> RankTiming:
        """Build the medians over the steady steps, which a few disturbed steps do not move."""
        hosts = self._hosts or [HostTime()]
        return RankTiming(
            rank=self._rank,
            steps=len(self._hosts),
            phases=tuple(
                TimeRow(phase=phase, seconds=median(seconds))
                for phase, seconds in self._phases.items()
            ),
            waits=tuple(
                GroupWait(group=group, seconds=median(seconds))
                for group, seconds in self._waits.items()
            ),
            host=HostTime(
                running_s=median(host.running_s for host in hosts),
                queued_s=median(host.queued_s for host in hosts),
                collecting_s=median(host.collecting_s for host in hosts),
                asleep_s=median(host.asleep_s for host in hosts),
            ),
            device=self._build_sample(),
        )

    def _build_sample(self) -> DeviceSample | None:
        if not self._devices:
            return None
        return DeviceSample(
            resident_share=median(sample.resident_share for sample in self._devices),
            used_bytes=max(sample.used_bytes for sample in self._devices),
            peak_allocated_bytes=max(sample.peak_allocated_bytes for sample in self._devices),
        )


def add_links(
    layout: Layout, timings: Sequence[RankTiming], calls: Sequence[Sequence[CallsByGroup]]
) -> tuple[RankTiming, ...]:
    """Add to each rank's timing the part of its waits that the links took (median over steps).

    `timings` and `calls` have all ranks in order; `calls` are those of the same steps on every
    rank. A collective ends for all when the last rank has come and the bytes are through. The rank
    that waits least in a call came last, so its wait is the time of the call itself. Its peers wait
    as long, and before that for this rank.
    """
    return tuple(replace(timing, links=_measure_links(layout, timing, calls)) for timing in timings)


def _measure_links(
    layout: Layout, timing: RankTiming, calls: Sequence[Sequence[CallsByGroup]]
) -> tuple[GroupWait, ...]:
    links = []
    for wait in timing.waits:
        if wait.group in _PAIRWISE_GROUPS:
            continue
        members = [calls[rank] for rank in group_ranks(layout, wait.group, timing.rank)]
        link_seconds = []
        for step in zip(*members, strict=True):  # the same step on every member
            waits_by_rank = [rank_calls.get(wait.group, ()) for rank_calls in step]
            call_counts = {len(waits) for waits in waits_by_rank}
            if len(call_counts) == 1 and waits_by_rank[0]:
                shortest_us = sum(min(call) for call in zip(*waits_by_rank, strict=True))
                link_seconds.append(shortest_us * 1e-6)
        if link_seconds:
            seconds = min(median(link_seconds), wait.seconds)
            links.append(GroupWait(group=wait.group, seconds=seconds))
    return tuple(links)
