"""What the logs of Megatron-LM, Megatron Bridge and torchtitan lack, written by each rank.

This file imports nothing of moewright: copy it beside a launch script and call one of

    import step_recorder
    step_recorder.record_megatron("records")   # before pretrain(...)
    step_recorder.record_bridge("records")     # before the recipe is run
    step_recorder.record_torchtitan("records") # before the trainer is made

`moewright watch records` reads what it writes: `rank00000.jsonl` of each rank, a line a step with
the seconds of the step, of the call that trains and of waiting for data, of garbage collection,
what the allocator holds and held at most, and every `probe_every` steps the seconds of a product
that all ranks do alike, which tells a slow device. With `experts=True` it counts, every
`probe_every` steps, the tokens that routers sent to each expert.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

FORMAT = 1  # of the file, which the reader checks
_PROBE_SIZE = 2048  # a product that fills a GPU, in under a millisecond
_ROUTER = "Router"  # how the classes of routers end, of all three trainers


class StepRecorder:
    """A writer of one rank's steps; `step` is called after each of them."""

    def __init__(self, folder: str | Path, *, rank: int | None = None, probe_every: int = 100):
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        path = Path(folder) / f"rank{self.rank:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line by line: a run that is killed leaves all its steps.
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._probe_every = probe_every
        self._last_s = time.perf_counter()
        self._data_s = 0.0
        self._gc_s = 0.0
        self._gc_started_s = 0.0
        self._experts: dict[str, Any] = {}
        self._counting = False
        self._steps = 0
        gc.callbacks.append(self._on_gc)

    def close(self) -> None:
        """Write no more."""
        gc.callbacks.remove(self._on_gc)
        self._file.close()

    def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_started_s = time.perf_counter()
        else:
            self._gc_s += time.perf_counter() - self._gc_started_s

    def time_data(self, iterator: Any) -> Any:
        """Return an iterator, or a list of them, whose waiting is counted as that for data."""
        if isinstance(iterator, list):
            return [self.time_data(item) for item in iterator]
        # None is a rank that reads no data; the other is wrapped already.
        if iterator is None or hasattr(type(iterator), "recorded_next"):
            return iterator
        kind = type(iterator)
        members = {"__next__": _make_next(kind.__next__, self), "recorded_next": kind.__next__}
        try:  # of the same type still, which Megatron-LM asks for
            iterator.__class__ = type(kind.__name__, (kind,), members)
        except TypeError:  # a generator, or another type of Python's own
            return _TimedIterator(iterator, self)
        return iterator

    def add_data_wait(self, seconds: float) -> None:
        """Count seconds of waiting for data."""
        self._data_s += seconds

    def count_experts(self, model: Any) -> None:
        """Count what the routers of a model, or of a list of its chunks, send to each expert."""
        chunks = model if isinstance(model, list | tuple) else [model]
        for number, chunk in enumerate(chunks):
            for name, module in chunk.named_modules():
                if type(module).__name__.endswith(_ROUTER):
                    module.register_forward_hook(self._make_hook(f"{number}.{name}"))

    def _make_hook(self, name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            # A count is a kernel more in each layer: only in the steps that want it.
            if not self._counting:
                return
            tokens = _count_tokens(output)
            if tokens is not None:
                before = self._experts.get(name)
                # Added on the device, which the host waits for once a step.
                self._experts[name] = tokens if before is None else before + tokens

        return hook

    def step(self, number: int, *, call_s: float = 0.0) -> None:
        """Write the step that is over; `call_s` is what the call took that trained it."""
        now_s = time.perf_counter()
        record: dict[str, Any] = {
            "format": FORMAT,
            "rank": self.rank,
            "recorded_step": number,
            "step_s": round(now_s - self._last_s, 9),
            "call_s": round(call_s, 9),
            "data_s": round(self._data_s, 9),
            "gc_s": round(self._gc_s, 9),
        }
        # Not imported here: only a trainer brings it.
        torch = sys.modules.get("torch")
        has_device = torch is not None and torch.cuda.is_available()
        if torch is not None and has_device:
            record["allocated_bytes"] = torch.cuda.memory_allocated()
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            record["reserved_bytes"] = torch.cuda.max_memory_reserved()
        self._steps += 1
        if torch is not None and self._steps % self._probe_every == 0:
            record["probe_s"] = _probe(torch, "cuda" if has_device else "cpu")
        if self._experts:
            record["expert_tokens"] = {
                name: [int(count) for count in tokens.tolist()]
                for name, tokens in self._experts.items()
            }
            self._experts = {}
        self._counting = (self._steps + 1) % self._probe_every == 0
        self._file.write(json.dumps(record) + "\n")
        # After the probe and the writing, which are of no step.
        self._data_s = self._gc_s = 0.0
        self._last_s = time.perf_counter()


def _make_next(take: Callable[[Any], Any], recorder: StepRecorder) -> Callable[[Any], Any]:
    """Return what takes the next item, and counts the time that it takes."""

    def timed(iterator: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return take(iterator)
        finally:
            recorder.add_data_wait(time.perf_counter() - started_s)

    return timed


class _TimedIterator:
    """An iterator whose waiting is counted."""

    def __init__(self, iterator: Any, recorder: StepRecorder):
        self._iterator = iterator
        self._take = _make_next(next, recorder)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._take(self._iterator)


def _count_tokens(output: Any) -> Any:
    """Return tokens an expert, of what a router has returned; None where that is not known.

    Megatron-LM's returns probabilities and a map of booleans, tokens by experts; torchtitan's the
    scores and numbers of the chosen experts, and the scores of all; before, it ended with counts.
    """
    if not isinstance(output, tuple) or len(output) < 2:
        return None
    chosen, last = output[1].detach(), output[-1].detach()
    if chosen.ndim == 2 and str(chosen.dtype) == "torch.bool":
        return chosen.sum(dim=0)
    if len(output) >= 3 and last.ndim == 1:
        return last.clone()
    if len(output) >= 3 and last.ndim == 2 and not chosen.is_floating_point():
        return chosen.flatten().bincount(minlength=last.shape[1])
    return None


def _probe(torch: Any, device: str) -> float:
    """Return the seconds of a product that is the same on each rank, the least of three."""
    size = _PROBE_SIZE if device == "cuda" else _PROBE_SIZE // 8
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    factor = torch.ones(size, size, device=device, dtype=dtype)
    least_s = float("inf")
    for _ in range(3):
        # What a step left running is not of the product.
        if device == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        torch.mm(factor, factor)
        if device == "cuda":
            torch.cuda.synchronize()
        least_s = min(least_s, time.perf_counter() - started_s)
    return round(least_s, 9)


_DATA_PLACE = 1  # of the iterator of batches, among the arguments of each `train_step`


def _record_steps(
    owner: Any,
    recorder: StepRecorder,
    find_number: Callable[[tuple[Any, ...], dict[str, Any], int], int],
    *,
    find_model: Callable[[tuple[Any, ...]], Any],
    experts: bool,
) -> None:
    """Replace `train_step` of a trainer by one that records the step too."""
    train_step = owner.train_step
    state = {"calls": 0}

    def recorded(*args: Any, **options: Any) -> Any:
        # The model is there when the first step is called.
        if experts and not state["calls"]:
            recorder.count_experts(find_model(args))
        number = find_number(args, options, state["calls"])
        state["calls"] += 1
        timed = list(args)
        if len(timed) > _DATA_PLACE:
            timed[_DATA_PLACE] = recorder.time_data(timed[_DATA_PLACE])
        started_s = time.perf_counter()
        result = train_step(*timed, **options)
        recorder.step(number, call_s=time.perf_counter() - started_s)
        return result

    owner.train_step = recorded


def record_megatron(
    folder: str | Path, *, experts: bool = False, probe_every: int = 100
) -> StepRecorder:
    """Record the steps of Megatron-LM's `pretrain`."""
    training = import_module("megatron.training.training")

    def number(_args: tuple[Any, ...], options: dict[str, Any], calls: int) -> int:
        if options.get("iteration") is not None:
            return int(options["iteration"]) + 1
        # The arguments have the step that the run began at.
        return int(getattr(training.get_args(), "iteration", 0)) + calls + 1

    recorder = StepRecorder(folder, probe_every=probe_every)
    _record_steps(training, recorder, number, find_model=lambda args: args[2], experts=experts)
    return recorder


def record_bridge(
    folder: str | Path, *, experts: bool = False, probe_every: int = 100
) -> StepRecorder:
    """Record the steps of Megatron Bridge's trainer."""
    training = import_module("megatron.bridge.training.train")

    def number(args: tuple[Any, ...], options: dict[str, Any], calls: int) -> int:
        for value in (*args, *options.values()):
            state = getattr(value, "train_state", None)
            if state is not None:
                return int(state.step) + 1
        return calls + 1

    recorder = StepRecorder(folder, probe_every=probe_every)
    _record_steps(training, recorder, number, find_model=lambda args: args[2], experts=experts)
    return recorder


def record_torchtitan(
    folder: str | Path, *, experts: bool = False, probe_every: int = 100
) -> StepRecorder:
    """Record the steps of torchtitan's Trainer."""
    try:
        trainer = import_module("torchtitan.trainer").Trainer
    except ImportError:  # before it moved
        trainer = import_module("torchtitan.train").Trainer
    recorder = StepRecorder(folder, probe_every=probe_every)
    _record_steps(
        trainer,
        recorder,
        lambda args, _options, _calls: int(args[0].step),
        find_model=lambda args: args[0].model_parts,
        experts=experts,
    )
    return recorder
