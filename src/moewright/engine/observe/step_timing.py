"""What a step costs this rank beside its phases: waits for peers, time without a core, garbage
collection."""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from moewright.rules.grid import group_ranks
from moewright.spec.layout import Layout
from moewright.spec.ledger import StepPhase, TimeRow
from moewright.spec.run import WAIT_RANGE_PREFIX, DeviceSample, GroupWait, HostTime, RankTiming

CallsByGroup = Mapping[
    str, Sequence[int]
]  # microseconds of every wait of a step, by group, in the order of the calls
STEPS_KEPT = 8  # newest settled steps whose single calls are kept
CALLS_KEPT = 4096  # of a group; of steps with more, none are
_PAIRWISE_GROUPS = ("pp",)  # neighbours send to each other; the group never meets

_SCHEDULER = Path(
    "/proc/thread-self/schedstat"
)  # ns on a core, ns ready without one, slices (Linux: sched-stats.rst)


class _SchedulerClock:
    """Of the thread that makes it: seconds on a core, and ready without one; the second is 0 where
    the kernel does not tell."""

    def __init__(self) -> None:
        self._file = _SCHEDULER.open("rb", buffering=0) if os.access(_SCHEDULER, os.R_OK) else None

    def read(self) -> tuple[float, float]:
        if self._file is None:
            return time.thread_time(), 0.0
        running, queued, _ = os.pread(self._file.fileno(), 80, 0).split()
        return int(running) * 1e-9, int(queued) * 1e-9


class WaitClock:
    """Seconds blocked on the collectives of each group since the last `take`, less those in which
    this rank was ready and had no core. Where a device runs collectives, the host does not block
    and a wait of it says nothing: `blocking` False keeps none.
    """

    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking
        self._scheduler = _SchedulerClock()
        self._spent: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self, group: str) -> Iterator[None]:
        if not self._blocking:
            yield
            return
        started, (_, queued) = time.perf_counter(), self._scheduler.read()
        try:
            with (
                record_function(WAIT_RANGE_PREFIX + group)
                if profiler._is_profiler_enabled
                else nullcontext()
            ):
                yield
        finally:
            self._spent[group].append(
                time.perf_counter() - started - (self._scheduler.read()[1] - queued)
            )

    def take(self) -> tuple[tuple[GroupWait, ...], CallsByGroup]:
        """Sums by group, and the calls they are made of."""
        calls = {
            group: [round(1e6 * seconds) for seconds in spent]
            for group, spent in self._spent.items()
        }
        found = tuple(
            GroupWait(group=group, seconds=sum(spent))
            for group, spent in sorted(self._spent.items())
        )
        self._spent.clear()
        return found, calls


class StepTimer:
    """Watches a session's steps; `settled` steps go into its medians."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._scheduler = _SchedulerClock()
        self._collecting_s, self._collection_began = 0.0, 0.0
        self._phases: dict[StepPhase, list[float]] = defaultdict(list)
        self._waits: dict[str, list[float]] = defaultdict(list)
        self._hosts: list[HostTime] = []
        self._calls: deque[CallsByGroup] = deque(maxlen=STEPS_KEPT)
        gc.callbacks.append(self._on_garbage_collection)

    def close(self) -> None:
        gc.callbacks.remove(self._on_garbage_collection)

    def _on_garbage_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
        else:
            self._collecting_s += time.thread_time() - self._collection_began

    def begin_step(self, waits: WaitClock) -> None:
        """A step starts; what was waited for since the last one, in an evaluation say, is not of
        it."""
        waits.take()
        self._collecting_s = 0.0
        self._started = self._scheduler.read()

    def end_step(self, phases: tuple[TimeRow, ...], waits: tuple[GroupWait, ...]) -> HostTime:
        """It is over."""
        running, queued = (
            now - then for now, then in zip(self._scheduler.read(), self._started, strict=True)
        )
        spent = running + queued + sum(wait.seconds for wait in waits)
        return HostTime(
            running_s=running,
            queued_s=queued,
            collecting_s=self._collecting_s,
            asleep_s=max(0.0, sum(row.seconds for row in phases) - spent),
        )

    def add_steady_step(
        self,
        phases: tuple[TimeRow, ...],
        waits: tuple[GroupWait, ...],
        calls: CallsByGroup,
        host: HostTime,
    ) -> None:
        """Take a step into the medians."""
        self._calls.append(
            {group: spent for group, spent in calls.items() if len(spent) <= CALLS_KEPT}
        )
        for row in phases:
            self._phases[row.phase].append(row.seconds)
        for wait in waits:
            self._waits[wait.group].append(wait.seconds)
        self._hosts.append(host)

    @property
    def recent_calls(self) -> tuple[CallsByGroup, ...]:
        """Of the newest settled steps."""
        return tuple(self._calls)

    def build_rank_pace(self) -> RankTiming:
        """Medians: what other programs take from a few steps is not in them."""
        hosts = self._hosts or [HostTime()]
        return RankTiming(
            rank=self._rank,
            steps=len(self._hosts),
            phases=tuple(
                TimeRow(phase=phase, seconds=median(seen)) for phase, seen in self._phases.items()
            ),
            waits=tuple(
                GroupWait(group=group, seconds=median(seen)) for group, seen in self._waits.items()
            ),
            host=HostTime(
                running_s=median(host.running_s for host in hosts),
                queued_s=median(host.queued_s for host in hosts),
                collecting_s=median(host.collecting_s for host in hosts),
                asleep_s=median(host.asleep_s for host in hosts),
            ),
        )


def add_links(
    layout: Layout, paces: Sequence[RankTiming], calls: Sequence[Sequence[CallsByGroup]]
) -> tuple[RankTiming, ...]:
    """The paces of all ranks in order, with their links, from the calls of the same steps on every
    rank.

    A collective ends for all when the last rank has come and the bytes are through. The rank that
    waits least for it came last, and what it waits is the call; its peers wait as long, and for it
    before. Medians over steps.
    """
    return tuple(replace(pace, links=_measure_links(layout, pace, calls)) for pace in paces)


def _measure_links(
    layout: Layout, pace: RankTiming, calls: Sequence[Sequence[CallsByGroup]]
) -> tuple[GroupWait, ...]:
    found = []
    for wait in pace.waits:
        if wait.group in _PAIRWISE_GROUPS:
            continue
        members = [calls[rank] for rank in group_ranks(layout, wait.group, pace.rank)]
        steps = [
            [step.get(wait.group, ()) for step in together]
            for together in zip(*members, strict=True)
        ]
        shortest = [
            sum(min(call) for call in zip(*each, strict=True)) * 1e-6
            for each in steps
            if each[0] and len({len(spent) for spent in each}) == 1
        ]
        if shortest:
            found.append(GroupWait(group=wait.group, seconds=min(median(shortest), wait.seconds)))
    return tuple(found)


def sample_device(device: torch.device) -> DeviceSample | None:
    """Of a GPU, where its driver's library is installed; None elsewhere."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    try:
        share = torch.cuda.utilization(device) / 100
    except (
        ModuleNotFoundError,
        RuntimeError,
    ):  # nvidia-ml-py is not here, or the driver does not answer
        return None
    peak = torch.cuda.max_memory_allocated(device)
    return DeviceSample(resident_share=share, used_bytes=total - free, peak_allocated_bytes=peak)
