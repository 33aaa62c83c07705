"""Gated activations between the two linears of an MLP or an expert, the weight of a routed row included.

Shapes: R rows, F width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moewright.engine.fused.seam import Kernels
from moewright.spec.model import ModelSpec

Activation = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # of x and the weights of its rows

# Of gpt-oss (its modeling code in transformers): the slope of the sigmoid, and what gate and up are clamped to.
_SLOPE, _LIMIT = 1.702, 7.0


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up * weight for x [R,2F] = (gate, up); `weight` [R] fp32 or None; keeps x and weight.

    Weighting here, before the second linear, spares keeping the experts' outputs (docs/formulas.md 7).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, kernels: Kernels) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels = kernels
        return kernels.swiglu(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return *ctx.kernels.swiglu_backward(grad, x, weight), None


class ClampedSwiGlu(torch.autograd.Function):
    """g * sigmoid(1.702 g) * (u + 1) * weight for x [R,2F] = (gate, up), g = min(gate, 7) and u = up within -7..7;
    `weight` [R] fp32 or None; keeps x and weight (gpt-oss).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        gate, up = x.float().chunk(2, -1)
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        out = torch.sigmoid(_SLOPE * gate).mul_(gate).mul_(up + 1)
        if weight is not None:
            out.mul_(weight[:, None])
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        whole_gate, whole_up = x.float().chunk(2, -1)
        gate, up = whole_gate.clamp(max=_LIMIT), whole_up.clamp(-_LIMIT, _LIMIT) + 1
        wide, sigmoid = grad.float(), torch.sigmoid(_SLOPE * gate)
        act, grad_weight = gate * sigmoid, None
        if weight is not None:
            grad_weight = (wide * act).mul_(up).sum(-1)
            wide = wide * weight[:, None]
        slope = sigmoid + _SLOPE * act * (1 - sigmoid)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        grad_gate.copy_(slope.mul_(up).mul_(wide).mul_(whole_gate <= _LIMIT))
        grad_up.copy_(act.mul_(wide).mul_(whole_up.abs() <= _LIMIT))
        return grad_x, grad_weight


def activation_of(model: ModelSpec, kernels: Kernels) -> Activation:
    """Of the model's family, whose config.json gives no other constants."""
    if model.family == "gpt_oss":
        return ClampedSwiGlu.apply
    return lambda x, weight: SwiGlu.apply(x, weight, kernels)
