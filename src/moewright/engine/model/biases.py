"""Biases of linear layers. They keep nothing for backward that others do not keep anyway.

Shapes: T tokens, N width.
"""

from __future__ import annotations

from typing import Any

import torch

from moewright.engine.collectives import Group


class AddBias(torch.autograd.Function):
    """y [T,N] + bias [N]; `sharers`, which all have the same y, each make the bias's gradient of a part of the rows."""

    @staticmethod
    def forward(ctx: Any, y_TN: torch.Tensor, bias_N: torch.Tensor, sharers: Group | None) -> torch.Tensor:
        ctx.sharers = sharers
        return y_TN + bias_N

    @staticmethod
    def backward(ctx: Any, grad_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows = grad_TN
        if ctx.sharers is not None:
            rows = grad_TN.tensor_split(ctx.sharers.size)[ctx.sharers.index]
        return grad_TN, rows.sum(0, dtype=torch.float32).to(grad_TN.dtype), None
