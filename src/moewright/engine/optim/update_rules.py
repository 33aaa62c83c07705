"""Update rules: how a shard of master weights takes its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from moewright.engine.optim.moments import split_into_pieces
from moewright.engine.optim.optimizer_states import OptimizerStates, UpdateRange
from moewright.rules.batch_rampup import wsd_decay_steps
from moewright.spec.workload import LrDecay, OptimizerSpec

# The learning rate of a step.


def learning_rate(spec: OptimizerSpec, *, steps: int, step: int) -> float:
    """Return the learning rate of update `step` (from 1).

    It rises linearly for `warmup_steps`, falls to the floor, `min_lr_fraction` of the peak, at
    `decay_steps` (at the end of the run, `steps`, where that is 0), and stays there. It falls along
    a cosine, in a line, or (WSD, arXiv 2404.06395) in a line over the last steps alone.
    """
    if step <= spec.warmup_steps:
        # Never with 0 steps of warm-up: updates count from 1.
        return spec.lr * step / spec.warmup_steps
    floor = spec.lr * spec.min_lr_fraction
    end = spec.decay_steps or steps
    length = end - spec.warmup_steps
    if spec.lr_decay is LrDecay.WSD:
        length = wsd_decay_steps(spec, steps)
    # Lengths of 0 are those of a warm-up that ends with the run.
    progress = min(1.0, max(0.0, (step - (end - length)) / max(1, length)))
    if spec.lr_decay is LrDecay.COSINE:
        return floor + (spec.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (spec.lr - floor) * (1 - progress)


class UpdateRule(Protocol):
    """A rule that updates the ranges `owned` of a shard, after `updates_done` updates."""

    def __call__(
        self,
        states: OptimizerStates,
        grads: torch.Tensor,
        owned: Sequence[UpdateRange],
        spec: OptimizerSpec,
        *,
        lr: float,
        weight_decay: float,
        updates_done: int,
    ) -> None: ...


def adamw_update(
    states: OptimizerStates,
    grads: torch.Tensor,
    owned: Sequence[UpdateRange],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    updates_done: int,
) -> None:
    """Apply AdamW with decoupled weight decay (Loshchilov and Hutter 2019).

    It computes in fp32, whatever the moments are stored in.
    """
    is_narrow = states.exp_avg.is_narrow or states.exp_avg_sq.is_narrow
    # One fused call for all: fp32 moments are updated where they lie.
    batches = [[(part.shard_slice, part.moment_slice) for part in owned]]
    if is_narrow:
        batches = [[block] for block in split_ranges(owned)]
    for batch in batches:
        exp_avgs = [states.exp_avg.read(moments) for _, moments in batch]
        exp_avg_sqs = [states.exp_avg_sq.read(moments) for _, moments in batch]
        adamw(
            [states.master[block] for block, _ in batch],
            [grads[block] for block, _ in batch],
            exp_avgs,
            exp_avg_sqs,
            [],  # max_exp_avg_sqs, which only amsgrad has
            # A count for each part, for the kernel adds one to each; made at once.
            list(grads.new_full((len(batch),), updates_done, dtype=torch.float32).unbind()),
            fused=True,
            amsgrad=False,
            beta1=spec.beta1,
            beta2=spec.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=spec.eps,
            maximize=False,
        )
        for (_, moments), exp_avg, exp_avg_sq in zip(batch, exp_avgs, exp_avg_sqs, strict=True):
            states.exp_avg.write(moments, exp_avg)
            states.exp_avg_sq.write(moments, exp_avg_sq)


def split_ranges(owned: Sequence[UpdateRange]) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of the ranges, each with where its moments are."""
    for part in owned:
        yield from zip(
            split_into_pieces(part.start, part.numel),
            split_into_pieces(part.moment_start, part.numel),
            strict=True,
        )


def sgd_update(
    states: OptimizerStates,
    grads: torch.Tensor,
    owned: Sequence[UpdateRange],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    updates_done: int,
) -> None:
    """Apply w -= lr * (gradient + weight_decay * w).

    Its loss curve shows a wrong gradient scale, which AdamW's hides.
    """
    for part in owned:
        block = part.shard_slice
        states.master[block].mul_(1 - lr * weight_decay).sub_(grads[block], alpha=lr)
