"""Update rules: how a shard of master weights takes its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from moewright.engine.optim.optimizer_states import OptimizerStates, OwnedRange
from moewright.spec.workload import OptimizerSpec

# Narrow moments are updated so many elements at a time, so that their fp32 copies stay small.
_BLOCK_NUMEL = 1 << 20


class UpdateRule(Protocol):
    """A rule that updates the ranges `owned` of a shard, after `updates_done` updates."""

    def __call__(
        self,
        states: OptimizerStates,
        grads: torch.Tensor,
        owned: Sequence[OwnedRange],
        spec: OptimizerSpec,
        *,
        lr: float,
        weight_decay: float,
        updates_done: int,
    ) -> None: ...


def adamw_update(
    states: OptimizerStates,
    grads: torch.Tensor,
    owned: Sequence[OwnedRange],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    updates_done: int,
) -> None:
    """Apply AdamW with decoupled weight decay (Loshchilov and Hutter 2019).

    It computes in fp32, whatever the moments are stored in.
    """
    is_narrow = states.exp_avg.dtype != torch.float32
    batches = [[(part.shard_slice, part.moment_slice) for part in owned]]
    if is_narrow:
        batches = [[block] for block in _split(owned)]
    for batch in batches:
        stored_avgs = [states.exp_avg[moments] for _, moments in batch]
        stored_avg_sqs = [states.exp_avg_sq[moments] for _, moments in batch]
        exp_avgs = [stored.float() for stored in stored_avgs]
        exp_avg_sqs = [stored.float() for stored in stored_avg_sqs]
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
        if is_narrow:
            for stored, moment in zip(
                (*stored_avgs, *stored_avg_sqs), (*exp_avgs, *exp_avg_sqs), strict=True
            ):
                stored.copy_(moment)


def _split(owned: Sequence[OwnedRange]) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of the ranges, each with where its moments are."""
    for part in owned:
        for first in range(0, part.numel, _BLOCK_NUMEL):
            last = min(first + _BLOCK_NUMEL, part.numel)
            yield (
                slice(part.start + first, part.start + last),
                slice(part.moment_start + first, part.moment_start + last),
            )


def sgd_update(
    states: OptimizerStates,
    grads: torch.Tensor,
    owned: Sequence[OwnedRange],
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
