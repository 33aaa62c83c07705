"""The clock of a step by its phases, and the meter of how busy and full its device is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from moewright.engine.torch_private import is_profiling
from moewright.spec.ledger import StepPhase, TimeRow
from moewright.spec.run import DeviceSample
from moewright.spec.units import divide

# Pages of this process in memory are the second number (Linux: proc.rst).
_MEMORY_FILE = Path("/proc/self/statm")


class DeviceMeter:
    """A meter of a rank's device: of a CPU by the accounts of this process, of a GPU by its driver.

    A GPU has samples where its driver's library is installed (nvidia-ml-py).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = (time.perf_counter(), time.process_time())

    def begin_step(self) -> None:
        """Start a step."""
        self._started = (time.perf_counter(), time.process_time())

    def end_step(self) -> DeviceSample | None:
        """End a step, and return a sample of it; None where nothing tells."""
        if self._device.type == "cuda":
            return _sample_gpu(self._device)
        return self._sample_process()

    def _sample_process(self) -> DeviceSample:
        started, started_running = self._started
        step_s = time.perf_counter() - started
        running_s = time.process_time() - started_running
        # process_time sums over all threads of the process.
        share = divide(running_s, step_s * torch.get_num_threads())
        used_bytes = 0
        if _MEMORY_FILE.exists():
            pages = int(_MEMORY_FILE.read_bytes().split()[1])
            used_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        return DeviceSample(
            # Threads beside torch's count too.
            resident_share=min(1.0, share),
            used_bytes=used_bytes,
            peak_allocated_bytes=0,
        )


def _sample_gpu(device: torch.device) -> DeviceSample | None:
    # Of the whole device, as other processes on it fill it too.
    free, total = torch.cuda.mem_get_info(device)
    try:
        share = torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):
        # nvidia-ml-py is not installed, or the driver does not answer.
        return None
    peak = torch.cuda.max_memory_allocated(device)
    return DeviceSample(resident_share=share, used_bytes=total - free, peak_allocated_bytes=peak)


class Stamps(Protocol):
    """A source of moments, between which a clock counts seconds once all have passed."""

    def take(self) -> Any: ...
    def seconds(self, start: Any, stop: Any) -> float: ...
    def wait(self, last: Any) -> None: ...


class HostStamps:
    """The moments of the host, which are those of a CPU's work."""

    def take(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self, last: float) -> None:
        pass


class DeviceStamps:
    """The moments at which a GPU comes to a place of its stream.

    The host only launches its work: by the host's clock a phase would last as long as its launches.
    """

    def take(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return 1e-3 * float(start.elapsed_time(stop))

    def wait(self, last: torch.cuda.Event) -> None:
        last.synchronize()


def build_phase_clock(device: torch.device) -> PhaseClock:
    """Build the clock of a step on a device."""
    return PhaseClock(DeviceStamps() if device.type == "cuda" else HostStamps())


class PhaseClock:
    """A clock that splits the time since it was made into phases, which do not nest.

    Where two passes take turns, `change_to` says which phase goes on.
    """

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._spans: list[tuple[StepPhase, Any, Any]] = []
        self._started = stamps.take()
        self._phase: StepPhase | None = None
        self._phase_started = self._started

    def change_to(self, phase: StepPhase | None) -> None:
        """Count the time from now on to a phase; None: to none."""
        now = self._stamps.take()
        if self._phase is not None:
            self._spans.append((self._phase, self._phase_started, now))
        self._phase = phase
        self._phase_started = now

    @contextmanager
    def phase(self, phase: StepPhase) -> Iterator[None]:
        """Count the time inside to a phase, and name it in a profile."""
        self.change_to(phase)
        try:
            with record_function(phase) if is_profiling() else nullcontext():
                yield
        finally:
            self.change_to(None)

    def time_rows(self) -> tuple[TimeRow, ...]:
        """Return the seconds of each phase, which sum to the time since the start.

        Time outside of every phase is OTHER. It waits for the device's work.
        """
        stopped = self._stamps.take()
        # The last is enough: a stream comes to its events in order.
        self._stamps.wait(stopped)
        spent = dict.fromkeys(StepPhase, 0.0)
        for phase, start, stop in self._spans:
            spent[phase] += self._stamps.seconds(start, stop)
        elapsed = self._stamps.seconds(self._started, stopped)
        spent[StepPhase.OTHER] = elapsed - sum(spent.values())
        return tuple(TimeRow(phase=phase, seconds=seconds) for phase, seconds in spent.items())
