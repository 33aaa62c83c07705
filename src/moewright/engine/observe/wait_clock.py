"""How long this rank waits for its peers, and how long it was ready to run and had no core."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch.autograd import profiler
from torch.profiler import record_function

from moewright.spec.run import WAIT_RANGE_PREFIX, GroupWait

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

    @contextmanager
    def measure(self, group: str) -> Iterator[None]:
        """Count the time inside as one wait for `group`."""
        if not self._blocking:
            yield
            return
        started = time.perf_counter()
        scheduler = self._find_scheduler()
        _, queued_before = scheduler.read()
        is_profiled = profiler._is_profiler_enabled
        try:
            with record_function(WAIT_RANGE_PREFIX + group) if is_profiled else nullcontext():
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
