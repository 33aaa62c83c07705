"""Activations between the two linears of an MLP or an expert.

They also multiply by the weight of a routed row.

Shapes: R rows, F width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.families.table import find_family
from moewright.spec.model import ModelSpec

# Takes x [R,2F], or [R,F] without a gate, and the weights [R] of its rows, None for ones.
Activation = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class ScaleRows(ReleasingFunction):
    """x * weight for rows x [R,H] and their weights [R] fp32; keeps both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (grad * weight[:, None]).to(x.dtype), (grad.float() * x.float()).sum(-1)


class SwiGlu(ReleasingFunction):
    """silu(gate) * up * weight for x [R,2F] = (gate, up), or gpt-oss's `clamped` form of it.

    The form is that of KernelSet.swiglu; `weight` is [R] fp32 or None; keeps x and weight.
    Because the weight is applied here, before the second linear, the experts' outputs need not be
    kept (docs/formulas.md 7).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        kernels: KernelSet,
        clamped: bool = False,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels = kernels
        ctx.clamped = clamped
        return kernels.swiglu(x, weight, clamped)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        return *ctx.kernels.swiglu_backward(grad, x, weight, ctx.clamped), None, None


class ClampedSwiGlu(ReleasingFunction):
    """silu(gate) * up * weight for x [R,2F] = (gate, up), in fp32; keeps x and weight [R] fp32.

    Gates are `limit` at most, and ups within it (DeepSeek-V4); beyond, neither has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, limit: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.limit = limit
        gate, up = x.float().chunk(2, -1)
        active = F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
        return _weigh_rows(active, weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        raw_gate, raw_up = x.float().chunk(2, -1)
        gate, up = raw_gate.clamp(max=ctx.limit), raw_up.clamp(-ctx.limit, ctx.limit)
        active = F.silu(gate)
        wide_grad = grad.float()
        grad_weight = None
        if weight is not None:
            grad_weight = (wide_grad * active * up).sum(-1)
            wide_grad = wide_grad * weight[:, None]
        grad_gate = torch.ops.aten.silu_backward(wide_grad * up, gate)
        # As torch's clamp, which passes the gradient at the limit itself.
        grad_gate.mul_(raw_gate <= ctx.limit)
        grad_up = (wide_grad * active).mul_(raw_up.abs() <= ctx.limit)
        return torch.cat((grad_gate, grad_up), -1).to(x.dtype), grad_weight, None


def _weigh_rows(active: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows in place by their weights, where they have any."""
    return active if weight is None else active.mul_(weight[:, None])


class SquaredRelu(ReleasingFunction):
    """relu(x)^2 * weight for x [R,F], in fp32; `weight` is [R] fp32 or None; keeps x and weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        active = torch.relu(x.float()).square_()
        return _weigh_rows(active, weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        positive = torch.relu(x.float())
        # relu(x)^2 has the slope 2 relu(x); the factor comes below.
        slope = positive * grad
        if weight is None:
            return slope.mul_(2).to(x.dtype), None
        grad_weight = (slope * positive).sum(-1)
        return slope.mul_(2 * weight[:, None]).to(x.dtype), grad_weight


def build_activation(model: ModelSpec, kernels: KernelSet) -> Activation:
    """Build the activation of the model's family.

    The constants of the clamped form are fixed: no config.json of its family gives others.
    """
    if not model.gated:
        return SquaredRelu.apply
    if model.activation_limit:
        limit = model.activation_limit
        return lambda x, weight: ClampedSwiGlu.apply(x, weight, limit)
    clamped = find_family(model.family).has_clamped_swiglu
    return lambda x, weight: SwiGlu.apply(x, weight, kernels, clamped)
