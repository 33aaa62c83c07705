"""How busy a rank's device is in a step, and how much of its memory is taken."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from moewright.spec.run import DeviceSample

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
        share = running_s / (step_s * torch.get_num_threads()) if step_s else 0.0
        used_bytes = 0
        if _MEMORY_FILE.exists():
            pages = int(_MEMORY_FILE.read_bytes().split()[1])
            used_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        return DeviceSample(
            resident_share=min(1.0, share), used_bytes=used_bytes, peak_allocated_bytes=0
        )


def _sample_gpu(device: torch.device) -> DeviceSample | None:
    free, total = torch.cuda.mem_get_info(device)
    try:
        share = torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):
        # nvidia-ml-py is not installed, or the driver does not answer.
        return None
    peak = torch.cuda.max_memory_allocated(device)
    return DeviceSample(resident_share=share, used_bytes=total - free, peak_allocated_bytes=peak)
