"""How the loss falls along each gradient, in one process, beside what the gradient says of it.

A backward that is wrong in every layout alike differs between none of them. But a gradient says how
fast the loss falls along it: by its size. So the weights that have one name in all layers are moved
along their gradient, both ways, and the losses that a step reports are taken there. The experts of
every token stay those of the first pass, for a choice has no gradient.

What is left of the difference, of a step's length and of rounding, is measured: half the length
makes a quarter of the first, and twice the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch.autograd.graph import GradientEdge

from moewright.engine.checkpoint import LocalShard
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.pipeline.executor import ChunkResult, Key
from moewright.engine.run.micro_batch_passes import (
    MicroBatchPasses,
    PassSteps,
    run_as_is,
)
from moewright.engine.run.step import forward_backward
from moewright.engine.run.train_state import TrainState
from moewright.rules.shapes.param import name_in_layer

# How much of the loss the first, longest move is to take off.
_SHARE_OF_LOSS = 0.02
# No move is longer than this share of the weights, or of weights this large where they are zero: a
# gradient of rounding alone would move them anywhere.
_SHARE_OF_WEIGHTS = 0.1
_ZERO_WEIGHT = 0.01
_SHORTER = 4.0  # times, where a move is too long for what it measures
_LENGTHS = 4
# A slope this sure is not measured by shorter moves.
_SURE = 1e-3
# The losses of tokens are sums in fp32, of which the last bits are lost, over the loss.
_LOST_OF_LOSS = 2.0**-22
# What an indexer learns is no part of the losses that a step reports.
_UNREPORTED = ".indexer."


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """How far a figure is from what it must be, over the size of that.

    `name` is of parameters, of a slope as they are called in their layers. `rounding` is what
    rounding makes of the difference, and of a slope the length of the moves.
    """

    name: str
    difference: float
    rounding: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForwardOnly:
    """The forward passes of micro-batches, which no backward follows."""

    passes: MicroBatchPasses

    def forward(self, key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        return self.passes.forward(key, hidden)

    def backward(
        self,
        key: Key,
        roots: Sequence[GradientEdge],
        grads: Sequence[torch.Tensor | None],
        split: bool,
    ) -> None:
        pass

    def weight_grad(self, key: Key) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moved:
    """Master weights, what they were, and the direction in which they move."""

    weight: torch.Tensor
    before: torch.Tensor
    direction: torch.Tensor


def measure_slopes(state: TrainState, beat: Callable[[int], None]) -> Iterator[Deviation]:
    """Yield the slope of the loss of the first step along each gradient that is not zero.

    The state is that of one process in fp32, and keeps its weights. `beat` is called with each
    slope, so that many are not taken for a hang.
    """
    loss = _sum_losses(state, run_as_is)
    weights = {_key(shard): shard for shard in state.optimizer.local_shards()}
    pairs: dict[str, list[tuple[LocalShard, torch.Tensor]]] = defaultdict(list)
    for shard in state.optimizer.gradient_shards():
        name = shard.name.removeprefix("grad/")
        if _UNREPORTED not in name:
            pairs[name_in_layer(name)].append((weights[name, shard.offsets], shard.tensor.clone()))
    for number, (name, parts) in enumerate(pairs.items(), 1):
        beat(number)
        size = float(sum(gradient.double().square().sum() for _, gradient in parts)) ** 0.5
        if size:
            moved = [
                _Moved(weight=shard.tensor, before=shard.tensor.clone(), direction=gradient / size)
                for shard, gradient in parts
            ]
            yield _measure_slope(state, name, moved, loss=loss, size=size)


def _measure_slope(
    state: TrainState, name: str, moved: Sequence[_Moved], *, loss: float, size: float
) -> Deviation:
    """Measure one slope by shorter and shorter moves, until what they leave open is little."""

    def slope_over(length: float) -> float:
        ahead = _loss_at(state, moved, length)
        behind = _loss_at(state, moved, -length)
        return (ahead - behind) / (2 * length)

    best = Deviation(name=name, difference=inf, rounding=inf)
    length = min(_SHARE_OF_LOSS * loss / (2 * size), _SHARE_OF_WEIGHTS * _weight_size(moved))
    for _ in range(_LENGTHS):
        whole, half = slope_over(length), slope_over(length / 2)
        # Of the square of the length nothing is left in this.
        slope = (4 * half - whole) / 3
        lost = _LOST_OF_LOSS * loss / (length * size)
        rounding = abs(half - whole) / size + lost
        if rounding < best.rounding:
            best = Deviation(name=name, difference=abs(slope / size - 1), rounding=rounding)
        if rounding <= _SURE or lost > rounding / 2:
            break
        length /= _SHORTER
    return best


def _weight_size(moved: Sequence[_Moved]) -> float:
    squares = sum(float(part.before.double().square().sum()) for part in moved)
    zeros = _ZERO_WEIGHT**2 * sum(part.before.numel() for part in moved)
    return float(max(squares, zeros) ** 0.5)


def _loss_at(state: TrainState, moved: Sequence[_Moved], length: float) -> float:
    """Return the losses of the first step with weights moved so far; they go back again."""
    for part in moved:
        part.weight.copy_(part.before + length * part.direction)
    state.optimizer.all_gather_params()
    loss = _sum_losses(state, lambda passes: _ForwardOnly(passes=passes))
    for part in moved:
        part.weight.copy_(part.before)
    state.optimizer.all_gather_params()
    return loss


def _sum_losses(state: TrainState, wrap: Callable[[MicroBatchPasses], PassSteps]) -> float:
    clock = build_phase_clock(state.runtime.device)
    result = forward_backward(state, clock, step=1, wrap=wrap)
    return result.loss + result.aux_loss


def _key(shard: LocalShard) -> tuple[str, tuple[int, ...]]:
    return shard.name, shard.offsets
