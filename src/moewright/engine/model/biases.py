"""Biases of linear layers, which keep no tensor for backward that is not kept anyway.

Shapes: T tokens, R routed rows, N width, E experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.graph_nodes import ReleasingFunction


class AddBias(ReleasingFunction):
    """y [T,N] + bias [N].

    The ranks of `replica_group` all have the same y; each computes the bias's gradient of a part of
    the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, y_TN: torch.Tensor, bias_N: torch.Tensor, replica_group: Group | None
    ) -> torch.Tensor:
        ctx.replica_group = replica_group
        ctx.dtype = bias_N.dtype
        return y_TN + bias_N

    @staticmethod
    def backward(ctx: Any, grad_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows = grad_TN
        if ctx.replica_group is not None:
            rows = grad_TN.tensor_split(ctx.replica_group.size)[ctx.replica_group.index]
        return grad_TN, rows.sum(0, dtype=torch.float32).to(ctx.dtype), None


class AddBiasInPlace(AddBias):
    """The bias added into y itself, which nothing else reads: logits are too large to be copied."""

    @staticmethod
    def forward(
        ctx: Any, y_TN: torch.Tensor, bias_N: torch.Tensor, replica_group: Group | None
    ) -> torch.Tensor:
        ctx.replica_group = replica_group
        ctx.dtype = bias_N.dtype
        # autograd has to know that this input is changed in place.
        ctx.mark_dirty(y_TN)
        return y_TN.add_(bias_N)


class AddExpertBias(ReleasingFunction):
    """y [R,N] + weight * bias[e] in columns [first, first + n), for rows sorted by expert e.

    bias [E,n], weight [R] fp32 or None, `ends` [E] int32 running ends of the experts' rows. Keeps
    bias, weight and ends.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y_RN: torch.Tensor,
        bias_En: torch.Tensor,
        weight_R: torch.Tensor | None,
        ends_E: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(bias_En, weight_R, ends_E)
        ctx.columns = slice(first, first + bias_En.shape[1])
        out = y_RN.clone()
        bias_Rn = _bias_of_rows(bias_En, ends_E, len(y_RN))
        if weight_R is not None:
            bias_Rn = bias_Rn * weight_R[:, None]
        out[:, ctx.columns] += bias_Rn.to(out.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad_RN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bias_En, weight_R, ends_E = ctx.saved_tensors
        rows = grad_RN[:, ctx.columns].float()
        grad_weight = None
        if weight_R is not None:
            grad_weight = (rows * _bias_of_rows(bias_En, ends_E, len(rows))).sum(-1)
            rows = rows * weight_R[:, None]
        counts = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
        # An expert without rows gets `initial`; `unsafe` leaves out a check that reads lengths on
        # the host.
        grad_bias = torch.segment_reduce(
            rows.contiguous(), "sum", lengths=counts, axis=0, initial=0, unsafe=True
        )
        return grad_RN, grad_bias.to(bias_En.dtype), grad_weight, None, None


def _bias_of_rows(bias_En: torch.Tensor, ends_E: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bias of each row's expert, in fp32."""
    row_numbers = torch.arange(rows, dtype=ends_E.dtype, device=ends_E.device)
    # On the right: row `end` of an expert is the first of the next one.
    return bias_En.float().index_select(0, torch.searchsorted(ends_E, row_numbers, right=True))
