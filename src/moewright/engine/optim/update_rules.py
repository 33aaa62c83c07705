"""Update rules: how a shard of a bucket's master weights takes its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from moewright.spec.workload import OptimizerSpec

_PIECE = 1 << 20


class OptimizerStates(Protocol):
    """Master weights and moments of a rank's part of a bucket, or of one parameter: flat, of one
    length."""

    @property
    def master(self) -> torch.Tensor: ...
    @property
    def exp_avg(self) -> torch.Tensor: ...
    @property
    def exp_avg_sq(self) -> torch.Tensor: ...


class UpdateRule(Protocol):
    """One update of the elements at `places` of a bucket's shard; `done` updates were made before
    it."""

    def __call__(
        self,
        bucket: OptimizerStates,
        grads: torch.Tensor,
        places: Sequence[slice],
        spec: OptimizerSpec,
        *,
        lr: float,
        weight_decay: float,
        done: int,
    ) -> None: ...


def adamw_update(
    bucket: OptimizerStates,
    grads: torch.Tensor,
    places: Sequence[slice],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    done: int,
) -> None:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), in fp32 whatever the moments
    are stored in."""
    narrow = bucket.exp_avg.dtype != torch.float32
    if narrow:  # a piece at a time, so that their fp32 copies stay small
        places = [
            slice(at, min(at + _PIECE, p.stop))
            for p in places
            for at in range(p.start, p.stop, _PIECE)
        ]
    for some in [[p] for p in places] if narrow else [list(places)]:
        stored = [moment[p] for moment in (bucket.exp_avg, bucket.exp_avg_sq) for p in some]
        moments = [moment.float() for moment in stored]
        _adamw(bucket, grads, some, moments, spec, lr=lr, weight_decay=weight_decay, done=done)
        if narrow:
            for moment, value in zip(stored, moments, strict=True):
                moment.copy_(value)


def _adamw(
    bucket: OptimizerStates,
    grads: torch.Tensor,
    places: Sequence[slice],
    moments: Sequence[torch.Tensor],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    done: int,
) -> None:
    """`moments`: the first and then the second fp32 moments of all places."""
    adamw(
        [bucket.master[p] for p in places],
        [grads[p] for p in places],
        list(moments[: len(places)]),
        list(moments[len(places) :]),
        [],
        [torch.tensor(float(done), device=grads.device) for _ in places],
        fused=True,
        amsgrad=False,
        beta1=spec.beta1,
        beta2=spec.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=spec.eps,
        maximize=False,
    )


def sgd_update(
    bucket: OptimizerStates,
    grads: torch.Tensor,
    places: Sequence[slice],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    done: int,
) -> None:
    """w -= lr * (gradient + weight_decay * w). Its curve shows a wrong gradient scale, which
    AdamW's hides."""
    for place in places:
        bucket.master[place].mul_(1 - lr * weight_decay).sub_(grads[place], alpha=lr)
