"""The profiler's window: kernels, operations and module ranges of some steps, as Chrome traces that
Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from moewright.codec import read_json_data, write_text
from moewright.spec.workload import ProfileSpec

TRACE_FOLDER = "trace"
MERGED_FILE = "trace.json"
_TRACKS = 1000  # numbers of processes that a rank's trace may use


class ProfilerWindow:
    """Watches the steps of one rank; `module` gives the ranges their names."""

    def __init__(
        self,
        spec: ProfileSpec,
        run_dir: Path,
        *,
        rank: int,
        device: torch.device,
        module: torch.nn.Module,
    ) -> None:
        self._spec, self._run_dir, self._rank, self._device, self._module = (
            spec,
            run_dir,
            rank,
            device,
            module,
        )
        self._watches = spec.end > 0 and rank in spec.ranks
        self._profiler: profile | None = None
        self._hooks: list[Any] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the step of that number, from 1."""
        if not (self._watches and self._spec.start <= step < self._spec.end):
            yield
            return
        if self._profiler is None:
            self._begin()
        with record_function(f"ProfilerStep#{step}"):
            yield
        if step + 1 == self._spec.end:
            self.close()

    def close(self) -> None:
        """Write what has been recorded: also called when a run ends inside its window."""
        if self._profiler is None:
            return
        self._profiler.stop()
        for hook in self._hooks:
            hook.remove()
        folder = self._run_dir / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self._rank:05d}.json"
        self._profiler.export_chrome_trace(str(path))
        write_text(path, json.dumps(_label_with_rank(read_json_data(path), self._rank)))
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"memory{self._rank:05d}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = None

    def _begin(self) -> None:
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.memory._record_memory_history()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler = profile(activities=activities, record_shapes=True)
        for name, module in self._module.named_modules():
            if name:
                self._hooks += _add_range_hooks(module, name)
        self._profiler.start()


def _add_range_hooks(module: torch.nn.Module, name: str) -> tuple[Any, Any]:
    """Hooks that put a range around every forward of a module, replays among them."""
    open_ones: list[record_function] = []

    def before(*_: Any) -> None:
        opened = record_function(name)
        opened.__enter__()
        open_ones.append(opened)

    def after(*_: Any) -> None:
        if open_ones:
            open_ones.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(before), module.register_forward_hook(after)


def _label_with_rank(data: dict[str, Any], rank: int) -> dict[str, Any]:
    """The trace with its processes numbered and named by rank, so that ranks stand beside each
    other in one file."""
    numbers: dict[Any, int] = {}
    for event in data["traceEvents"]:
        if "pid" not in event:
            continue
        event["pid"] = numbers.setdefault(event["pid"], rank * _TRACKS + len(numbers))
        if event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
    return {**data, "distributedInfo": {**(data.get("distributedInfo") or {}), "rank": rank}}


def merge_traces(run_dir: Path) -> None:
    """One file of all ranks' traces, a track for each rank and stream; nothing where there are
    none."""
    paths = sorted((run_dir / TRACE_FOLDER).glob("rank*.json"))
    if paths:
        events = [event for path in paths for event in read_json_data(path)["traceEvents"]]
        write_text(
            run_dir / MERGED_FILE, json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
        )
