"""Gated activations between the two linears of an MLP or an expert.

They include the weight of a routed row.

Shapes: R rows, F width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moewright.engine.kernels.fused.interface import KernelSet
from moewright.spec.model import ModelSpec

# Takes x and the weights of its rows.
Activation = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up * weight for x [R,2F] = (gate, up), or gpt-oss's `clamped` form of it.

    The form is that of KernelSet.swiglu; `weight` is [R] fp32 or None; keeps x and weight.
    Weighting here, before the second linear, spares keeping the experts' outputs (docs/formulas.md
    7).
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


def build_activation(model: ModelSpec, kernels: KernelSet) -> Activation:
    """Build the activation of the model's family, whose config.json gives no other constants."""
    clamped = model.family == "gpt_oss"
    return lambda x, weight: SwiGlu.apply(x, weight, kernels, clamped)
