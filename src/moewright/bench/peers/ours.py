"""The engine in the contest: one process, no feature on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moewright.bench.peers.contest import (
    MODEL,
    WORKLOAD,
    ContestPart,
    ContestRequest,
    Turn,
    draw_hidden,
    draw_tokens,
    parse_request,
    take_turns,
)
from moewright.engine.data.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import TrainState, train_step
from moewright.engine.runtime import Runtime
from moewright.spec.layout import Layout

_KINDS = {
    "products": ("mm", "_linear_", "group_by_group"),
    "attention": ("attention",),
    "optimizer": ("adamw", "_norm"),
}
_REST = "element by element"
_LAYOUT = Layout(world_size=1, mbs=WORKLOAD.global_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestTokens:
    """The contest's tokens as the engine asks for them."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        return build_micro_batch(run, *draw_tokens(step - 1), None)


def build_contest_state(how: ContestRequest) -> TrainState:
    """Model and optimizer for the asked precision."""
    work = replace(WORKLOAD, precision=how.dtype)
    device = torch.device("cpu")
    return build_train_state(
        MODEL,
        work,
        _LAYOUT,
        ContestTokens(),
        rank=0,
        device=device,
        initial_value=draw_initial_value,
    )


def build_turn(how: ContestRequest) -> Turn:
    """One training step, or one pass of the first MoE layer."""
    made = build_contest_state(how)
    if how.part is ContestPart.STEP:

        def step(number: int) -> Callable[[], float]:
            return lambda: (
                train_step(
                    made,
                    step=number + 1,
                    lr=WORKLOAD.optimizer.lr,
                    stop_requested=False,
                    count_ledger=False,
                ).loss
            )

        return step
    layer: Any = made.model.layers["0"].moe

    def once(number: int) -> Callable[[], float]:
        x, grad = draw_hidden(number, how.torch_dtype)
        leaf: Any = x.requires_grad_()
        made.optimizer.begin_step(1)  # gradients are the first of their step

        def run() -> float:
            out, _, _ = layer(leaf, None, None)
            out.backward(grad)
            return float(leaf.grad.norm())

        return run

    return once


def profile_turn(run: Callable[[], float]) -> Mapping[str, float]:
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
    take_turns(build_turn(parse_request()), profile_turn)
