"""Gated activations between the two linears of an MLP or an expert, the weight of a routed row included.

Shapes: R rows, F width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from moewright.spec.model import ModelSpec

# Of gpt-oss (its modeling code in transformers): the slope of the sigmoid, and what gate and up are clamped to.
_SLOPE, _LIMIT = 1.702, 7.0


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up * weight for x [R,2F] = (gate, up); `weight` [R] fp32 or None; keeps x and weight.

    Weighting here, before the second linear, spares keeping the experts' outputs (docs/formulas.md 7).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty((len(x), x.shape[1] // 2))
        for part in _parts(x):
            gate, up = x[part].float().chunk(2, -1)
            act = F.silu(gate).mul_(up)
            if weight is not None:
                act.mul_(weight[part, None])
            out[part] = act
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = None if weight is None else torch.empty_like(weight)
        for part in _parts(x):
            gate, up = x[part].float().chunk(2, -1)
            wide, act = grad[part].float(), F.silu(gate)
            if grad_weight is not None:
                grad_weight[part] = (wide * act).mul_(up).sum(-1)
                wide = wide * weight[part, None]
            grad_gate, grad_up = grad_x[part].chunk(2, -1)
            grad_up.copy_(act.mul_(wide))
            grad_gate.copy_(torch.ops.aten.silu_backward(wide * up, gate))
        return grad_x, grad_weight


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


def activation_of(model: ModelSpec) -> type[SwiGlu | ClampedSwiGlu]:
    """Of the model's family, whose config.json gives no other constants."""
    return ClampedSwiGlu if model.family == "gpt_oss" else SwiGlu


def _parts(x: torch.Tensor) -> Iterator[slice]:
    """Rows to work on at a time: on a CPU so many as stay in its cache from one operation to the next, in few parts."""
    step = max(512, -(-len(x) // 32)) if x.device.type == "cpu" else max(1, len(x))
    return (slice(start, start + step) for start in range(0, len(x), step))
