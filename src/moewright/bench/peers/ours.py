"""The engine in the contest: one process, no feature on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moewright.bench.peers.contest import (
    MODEL,
    WORK,
    Asked,
    Part,
    Turn,
    asked,
    hidden,
    take_turns,
    tokens,
)
from moewright.engine.data.batch import Batch, batch_here
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.model.transformer import initial_value
from moewright.engine.run.build import trainee
from moewright.engine.run.step import Trainee, train_step
from moewright.engine.runtime import Runtime
from moewright.spec.layout import Layout

_KINDS = {
    "products": ("mm", "_linear_", "group_by_group"),
    "attention": ("attention",),
    "optimizer": ("adamw", "_norm"),
}
_REST = "element by element"
_LAYOUT = Layout(world_size=1, mbs=WORK.global_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """The contest's tokens as the engine asks for them."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> Batch:
        return batch_here(run, *tokens(step - 1), None)


def job(how: Asked) -> Trainee:
    """Model and optimizer for the asked precision."""
    work = replace(WORK, precision=how.dtype)
    device = torch.device("cpu")
    return trainee(MODEL, work, _LAYOUT, _Tokens(), rank=0, device=device, initial=initial_value)


def turn(how: Asked) -> Turn:
    """One training step, or one pass of the first MoE layer."""
    made = job(how)
    if how.part is Part.STEP:

        def step(number: int) -> Callable[[], float]:
            return lambda: (
                train_step(
                    made, step=number + 1, lr=WORK.optimizer.lr, stop_asked=False, counted=False
                ).loss
            )

        return step
    layer: Any = made.model.layers["0"].moe

    def once(number: int) -> Callable[[], float]:
        x, grad = hidden(number, how.torch_dtype)
        leaf: Any = x.requires_grad_()
        made.optimizer.begin(1)  # gradients are the first of their step

        def run() -> float:
            out, _, _ = layer(leaf, None, None)
            out.backward(grad)
            return float(leaf.grad.norm())

        return run

    return once


def split(run: Callable[[], float]) -> Mapping[str, float]:
    """Seconds of a turn by kind of torch operation, and the host's outside of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        run()
        wall = time.perf_counter() - started
    found = dict.fromkeys((*_KINDS, _REST), 0.0)
    for row in profile.key_averages():
        if "::" in row.key:
            kind = next(
                (kind for kind, words in _KINDS.items() if any(word in row.key for word in words)),
                _REST,
            )
            found[kind] += row.self_cpu_time_total * 1e-6
    return {**found, "outside of torch": wall - sum(found.values())}


if __name__ == "__main__":
    keep_freed_memory()  # as every rank does
    take_turns(turn(asked()), split)
