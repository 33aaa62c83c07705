"""The auxiliary losses of a router (docs/formulas.md 4), over all tokens or those that count.

Tokens that do not count are padding, and tokens whose target is masked: they take their experts,
and no loss or statistic of the router knows them. Shapes: T tokens of this rank, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.model.micro_batch import CountedTokens


class WeightedSum(torch.autograd.Function):
    """The sum of rows [T,N] times weights [T]; keeps the weights, which a micro-batch shares."""

    @staticmethod
    def forward(ctx: Any, rows_TN: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
        ctx.weights = weights_T
        return (rows_TN * weights_T[:, None]).sum(0)

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_N * ctx.weights[:, None].to(grad_N.dtype), None


def balance_loss(
    share: torch.Tensor,
    scores_TE: torch.Tensor,
    token_group: Group,
    counted: CountedTokens | None = None,
) -> torch.Tensor:
    """Return this rank's part of E * sum_i f_i P_i (docs/formulas.md 4).

    The ranks of `token_group` hold its tokens in equal numbers. f is the `share` of routed rows, of
    all tokens together [E] or of each token's sequence [T,E]; P the mean score.
    """
    tokens, experts = scores_TE.shape
    if counted is None:
        if share.dim() == 1:
            return experts * (share * scores_TE.mean(0)).sum() / token_group.size
        return experts * (share * scores_TE).sum() / (tokens * token_group.size)
    if share.dim() == 1:
        sums_E = WeightedSum.apply(scores_TE, counted.mask)
        return experts * (share * sums_E).sum() / counted.total
    sums_E = WeightedSum.apply(share * scores_TE, counted.sequence_weights)
    return experts * sums_E.sum() / counted.sequences


def z_loss(
    logits_TE: torch.Tensor, token_group: Group, counted: CountedTokens | None = None
) -> torch.Tensor:
    """Return this rank's part of the mean squared log-sum-exp of the router logits.

    See docs/formulas.md 4.
    """
    squares_T = torch.logsumexp(logits_TE, -1).square()
    if counted is None:
        return squares_T.mean() / token_group.size
    return WeightedSum.apply(squares_T[:, None], counted.mask).sum() / counted.total


def count_counted(experts_Tk: torch.Tensor, experts: int, counted: CountedTokens) -> torch.Tensor:
    """Count the rows of each expert [E] int64 among the tokens that count."""
    rows = counted.mask.long()[:, None].expand_as(experts_Tk)
    counts = torch.zeros(experts, dtype=torch.int64, device=experts_Tk.device)
    return counts.scatter_add_(0, experts_Tk.flatten(), rows.flatten())
