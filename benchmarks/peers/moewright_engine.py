"""The engine in the contest: one process, no feature on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.peers.protocol import (
    ContestPart,
    ContestRequest,
    TimedWork,
    Turn,
    draw_hidden,
    draw_tokens,
    parse_request,
    take_turns,
)
from benchmarks.workloads import CONTEST_MODEL, CONTEST_WORKLOAD
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.layout import Layout

# Kinds of work by what the names of torch's operations contain.
_KINDS = {
    "products": ("mm", "_linear_", "group_by_group"),
    "attention": ("attention",),
    "optimizer": ("adamw", "_norm"),
}
_OTHER_KIND = "element by element"
_LAYOUT = Layout(world_size=1, mbs=CONTEST_WORKLOAD.global_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestTokens:
    """A source of the contest's tokens, as the engine asks for them."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return the batch of a step, which is one micro-batch."""
        return build_micro_batch(run, *draw_tokens(step - 1), None)


def build_state(request: ContestRequest) -> TrainState:
    """Build model and optimizer for the precision asked for."""
    return build_train_state(
        Job(
            model=CONTEST_MODEL,
            workload=replace(CONTEST_WORKLOAD, precision=request.dtype),
            layout=_LAYOUT,
        ),
        ContestTokens(),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_initial_value,
    )


def build_turn(request: ContestRequest) -> Turn:
    """Build the engine's turn: one training step, or one pass of the first MoE layer."""
    state = build_state(request)
    if request.part is ContestPart.STEP:
        return _build_step(state)
    layer: Any = state.model.layers["0"].moe

    def turn(number: int) -> TimedWork:
        x, grad = draw_hidden(number, request.torch_dtype)
        leaf: Any = x.requires_grad_()
        # Gradients are the first of their step: they are written, not added.
        state.optimizer.begin_step(1)

        def run_layer() -> float:
            out, _, _ = layer(leaf, None, None)
            out.backward(grad)
            return float(leaf.grad.norm())

        return run_layer

    return turn


def _build_step(state: TrainState) -> Turn:
    def turn(number: int) -> TimedWork:
        def run_step() -> float:
            result = train_step(
                state,
                step=number + 1,
                lr=CONTEST_WORKLOAD.optimizer.lr,
                stop_requested=False,
                count_ledger=False,
            )
            return result.backward.loss

        return run_step

    return turn


def profile_turn(work: TimedWork) -> Mapping[str, float]:
    """Return the seconds of a turn by kind of torch operation, and the host's outside of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        work()
        wall_s = time.perf_counter() - started
    seconds = dict.fromkeys((*_KINDS, _OTHER_KIND), 0.0)
    for row in profile.key_averages():
        if "::" in row.key:
            seconds[_kind_of_operation(row.key)] += row.self_cpu_time_total * 1e-6
    return {**seconds, "outside of torch": wall_s - sum(seconds.values())}


def _kind_of_operation(name: str) -> str:
    for kind, words in _KINDS.items():
        if any(word in name for word in words):
            return kind
    return _OTHER_KIND


if __name__ == "__main__":
    keep_freed_memory()  # as every rank does
    take_turns(build_turn(parse_request()), profile_turn)
