"""The update of weights beside AdamW as it is written, in one process.

An update that is wrong in every layout alike differs between none of them: a correction of young
moments that stays, norms that decay, a gradient that is not clipped. So the weights are updated
once more, by the formulas of the paper in fp64, from the gradients that training reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from moewright.engine.checkpoint import LocalShard
from moewright.engine.run.loss_slopes import Deviation
from moewright.spec.workload import Dtype, MatrixUpdate, OptimizerSpec, Workload

# Master weights are rounded to fp32 in every update: by up to half a unit in the last place.
_HALF_UNIT = 2.0**-24
# As in torch's clip_grad_norm_.
_CLIP_EPS = 1e-6


def repeats_update(workload: Workload) -> bool:
    """Tell whether AdamW updates all weights, with moments that are kept as they are."""
    spec = workload.optimizer
    is_exact = spec.moment_dtypes == (Dtype.FP32, Dtype.FP32)
    return spec.matrix_update is MatrixUpdate.ADAMW and is_exact


@dataclass(kw_only=True, slots=True)
class _Weight:
    """A master weight and its moments in fp64, and where it began."""

    value: torch.Tensor
    start: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    decays: bool


class WrittenUpdates:
    """AdamW by algorithm 2 of Loshchilov and Hutter (2019), with the norm clipped before.

    Matrices decay, of however many experts, and neither vectors nor biases.
    """

    def __init__(self, spec: OptimizerSpec, weights: Sequence[LocalShard]) -> None:
        self._spec = spec
        self._steps = 0
        self._weights: dict[tuple[str, tuple[int, ...]], _Weight] = {}
        for shard in weights:
            value = shard.tensor.double()
            self._weights[shard.name, shard.offsets] = _Weight(
                value=value.clone(),
                start=value.clone(),
                first=torch.zeros_like(value),
                second=torch.zeros_like(value),
                decays=len(shard.global_shape) > 1 and not shard.name.endswith(".bias"),
            )

    def update(self, gradients: Sequence[LocalShard], lr: float) -> None:
        """Do an update with gradients as they were reduced, named "grad/" + name."""
        spec = self._spec
        self._steps += 1
        norm = sqrt(sum(float(shard.tensor.double().square().sum()) for shard in gradients))
        scale = 1.0
        if spec.clip_norm:
            scale = min(1.0, spec.clip_norm / (norm + _CLIP_EPS))
        for shard in gradients:
            weight = self._weights[shard.name.removeprefix("grad/"), shard.offsets]
            gradient = shard.tensor.double() * scale
            weight.first = spec.beta1 * weight.first + (1 - spec.beta1) * gradient
            weight.second = spec.beta2 * weight.second + (1 - spec.beta2) * gradient.square()
            first = weight.first / (1 - spec.beta1**self._steps)
            second = weight.second / (1 - spec.beta2**self._steps)
            decay = spec.weight_decay if weight.decays else 0.0
            weight.value = weight.value - lr * (
                first / (second.sqrt() + spec.eps) + decay * weight.value
            )

    def compare(self, weights: Sequence[LocalShard]) -> Iterator[Deviation]:
        """Yield how far weights are from these, over the way that they have gone."""
        for shard in weights:
            weight = self._weights[shard.name, shard.offsets]
            moved = float((weight.value - weight.start).norm())
            if not moved:
                continue
            yield Deviation(
                name=shard.name,
                difference=float((shard.tensor.double() - weight.value).norm()) / moved,
                rounding=_HALF_UNIT * self._steps * float(weight.value.norm()) / moved,
            )
