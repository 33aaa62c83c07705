"""The profiler: some steps' kernels, operations and module ranges, as traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from moewright.codec import read_json_data, write_text
from moewright.codec.run_files import MERGED_TRACE_FILE, TRACE_FOLDER
from moewright.engine.observe.counters import NoteActivity
from moewright.engine.torch_private import ProfilerConfig, record_memory, write_memory_snapshot
from moewright.spec.workload import ProfileSpec

# The numbers of processes that a rank's trace may use.
_PROCESS_NUMBERS_PER_RANK = 1000


class ProfilerWindow:
    """A window of steps that the profiler watches on one rank.

    `module` gives the ranges their names; `note` is told that a trace is written;
    `watches_all_threads`: passes run on several threads.
    """

    def __init__(
        self,
        spec: ProfileSpec,
        run_dir: Path,
        *,
        rank: int,
        device: torch.device,
        module: torch.nn.Module,
        note: NoteActivity,
        watches_all_threads: bool = False,
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._rank = rank
        self._module = module
        self._note = note
        self._watches_all_threads = watches_all_threads
        self._is_cuda = device.type == "cuda"
        self._is_active = spec.end > 0 and rank in spec.ranks
        self._profiler: profile | None = None
        self._hooks: list[Any] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Watch the step of that number (from 1), if it is in the window."""
        if not (self._is_active and self._spec.start <= step < self._spec.end):
            yield
            return
        if self._profiler is None:
            self._profiler = self._start()
        with record_function(f"ProfilerStep#{step}"):
            yield
        if step + 1 == self._spec.end:
            self.close()

    def close(self) -> None:
        """Write what has been recorded; also called when a run ends inside its window."""
        if self._profiler is None:
            return
        # First of all: a trace may take longer than a rank may be silent.
        self._note("writes its trace", is_slow=True)
        self._profiler.stop()
        for hook in self._hooks:
            hook.remove()
        folder = self._run_dir / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self._rank:05d}.json"
        self._profiler.export_chrome_trace(str(path))
        write_text(path, json.dumps(_label_with_rank(read_json_data(path), self._rank)))
        if self._is_cuda:
            write_memory_snapshot(folder / f"memory{self._rank:05d}.pickle")
            record_memory(enabled=False)
        self._profiler = None

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            record_memory(enabled=True)
            activities.append(ProfilerActivity.CUDA)
        # A backward beside a forward runs on a thread of its own (engine.comm.pass_turns).
        every_thread = ProfilerConfig(profile_all_threads=self._watches_all_threads)
        started = profile(
            activities=activities, record_shapes=True, experimental_config=every_thread
        )
        for name, module in self._module.named_modules():
            if name:
                self._hooks += _add_range_hooks(module, name)
        started.start()
        return started


def _add_range_hooks(module: torch.nn.Module, name: str) -> tuple[Any, Any]:
    """Add hooks that put a range around every forward of a module, recomputed ones included."""
    open_ranges: list[record_function] = []

    def before(*_: Any) -> None:
        opened = record_function(name)
        opened.__enter__()
        open_ranges.append(opened)

    def after(*_: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(before), module.register_forward_hook(after)


def _label_with_rank(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """Give the processes of a trace the rank's numbers and name, so that ranks can share a file."""
    numbers: dict[Any, int] = {}
    for event in trace["traceEvents"]:
        if "pid" not in event:
            continue
        number = rank * _PROCESS_NUMBERS_PER_RANK + len(numbers)
        event["pid"] = numbers.setdefault(event["pid"], number)
        if event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
    info = trace.get("distributedInfo") or {}
    return {**trace, "distributedInfo": {**info, "rank": rank}}


def merge_traces(run_dir: Path, note: NoteActivity) -> None:
    """Merge all ranks' traces into one file, a track for each rank and stream, if there are any.

    `note` is told first: files of many steps take longer than a rank may be silent.
    """
    paths = sorted((run_dir / TRACE_FOLDER).glob("rank*.json"))
    if paths:
        note("merges the traces of all ranks", is_slow=True)
        events = [event for path in paths for event in read_json_data(path)["traceEvents"]]
        write_text(
            run_dir / MERGED_TRACE_FILE,
            json.dumps({"displayTimeUnit": "ms", "traceEvents": events}),
        )
