"""The sparse mixer: experts chosen one after the other, each weighed by a softmax of its own.

The form of Phi-3.5-MoE's inference (Liu et al., arXiv 2409.12136, without its sampling). Shapes: T
tokens, E experts, k choices.
"""

from __future__ import annotations

from typing import Any

import torch


class SparseMixer(torch.autograd.Function):
    """Logits [T,E] -> experts [T,k] int64, their weights [T,k] and the softmax of all [T,E].

    A choice is the highest logit that is left, or the forced one; its weight is its part of the
    softmax over those left that lie less than 2 eps below the highest, relative to the larger of
    their size and the highest. Keeps logits, experts and the softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        top_k: int,
        eps: float,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.eps = eps
        left = logits_TE.clone()
        experts, weights = [], []
        for choice in range(top_k):
            chosen = left.argmax(-1, keepdim=True)
            if forced_Tk is not None:
                chosen = forced_Tk[:, choice : choice + 1]
            weights.append(_weigh(logits_TE, left, chosen, eps).gather(1, chosen))
            experts.append(chosen)
            left.scatter_(1, chosen, -torch.inf)
        scores = torch.softmax(logits_TE, -1)
        experts_Tk = torch.cat(experts, 1) if forced_Tk is None else forced_Tk
        ctx.mark_non_differentiable(experts_Tk)
        ctx.save_for_backward(logits_TE, experts_Tk, scores)
        return experts_Tk, torch.cat(weights, 1), scores

    @staticmethod
    def backward(
        ctx: Any, _: torch.Tensor, grad_weights: torch.Tensor, grad_scores: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_TE, experts_Tk, scores = ctx.saved_tensors
        grad = torch.ops.aten._softmax_backward_data(grad_scores, scores, -1, scores.dtype)
        left = logits_TE.clone()
        for chosen, grad_weight in zip(
            experts_Tk.split(1, 1), grad_weights.split(1, 1), strict=True
        ):
            shares = _weigh(logits_TE, left, chosen, ctx.eps)
            slope = grad_weight * shares.gather(1, chosen)
            grad.sub_(shares.mul_(slope)).scatter_add_(1, chosen, slope)
            left.scatter_(1, chosen, -torch.inf)
        return grad, None, None, None


def _weigh(
    logits_TE: torch.Tensor, left_TE: torch.Tensor, chosen_T1: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the softmax [T,E] of the logits that are left and near enough to the highest.

    The chosen one always counts.
    """
    highest = left_TE.amax(-1, keepdim=True)
    size = torch.maximum(logits_TE.abs(), highest)
    is_low = ((highest - logits_TE) / size > 2 * eps).scatter_(1, chosen_T1, False)
    return torch.softmax(left_TE.masked_fill(is_low, -torch.inf), -1)
