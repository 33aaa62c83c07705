"""The auxiliary losses of a router (docs/formulas.md 4), over all tokens or those that count.

Shapes: T tokens of this rank, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.graph_nodes import ReleasingFunction

SCORE_SUM_EPS = 1e-20  # added to a sum of independent scores, which may all be zero

Shares = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLossTerms:
    """What the losses of a router are made of, beside its scores.

    `coefficients` are those of the balance losses over the micro-batch, each sequence and the
    global batch, then of the z loss; `shares` of routed rows [E], [T,E] and [E] belong to the
    first three, None to one that is off. Where `is_normalized`, a token's scores are divided by
    their sum. `ranks` hold the micro-batch in equal numbers of tokens. Where not all tokens count,
    `mask` [T] is 1 for each that does, `sequence_weights` [T] are the same over the number that
    count in its sequence, and `total` tokens count in all `sequences`, on all ranks.
    """

    coefficients: tuple[float, float, float, float]
    shares: Shares
    is_normalized: bool
    ranks: int
    mask: torch.Tensor | None = None
    sequence_weights: torch.Tensor | None = None
    total: int = 0
    sequences: int = 0


class WeightedSum(ReleasingFunction):
    """The sum of rows [T,N] times weights [T]; keeps the weights, which a micro-batch shares."""

    @staticmethod
    def forward(ctx: Any, rows_TN: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
        ctx.weights = weights_T
        return (rows_TN * weights_T[:, None]).sum(0)

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_N * ctx.weights[:, None].to(grad_N.dtype), None


def router_losses(
    logits_TE: torch.Tensor, scores_TE: torch.Tensor, terms: RouterLossTerms
) -> torch.Tensor:
    """Return this rank's parts of the four losses, fp32, in the order of their coefficients."""
    *balance_coefficients, z_coefficient = terms.coefficients
    if terms.is_normalized and any(share is not None for share in terms.shares):
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + SCORE_SUM_EPS)
    zero = logits_TE.new_zeros(())
    losses = [
        zero if share is None else coefficient * _balance_loss(share, scores_TE, terms)
        for coefficient, share in zip(balance_coefficients, terms.shares, strict=True)
    ]
    z_part = _z_loss(logits_TE, terms) if z_coefficient else zero
    losses.append(z_coefficient * z_part)
    return torch.stack(losses).float()


def _balance_loss(
    share: torch.Tensor, scores_TE: torch.Tensor, terms: RouterLossTerms
) -> torch.Tensor:
    """Return this rank's part of E * sum_i f_i P_i (docs/formulas.md 4).

    f is the `share` of routed rows, of all tokens together [E] or of each token's sequence [T,E]; P
    the mean score.
    """
    tokens, experts = scores_TE.shape
    if terms.mask is None or terms.sequence_weights is None:
        if share.dim() == 1:
            return experts * (share * scores_TE.mean(0)).sum() / terms.ranks
        return experts * (share * scores_TE).sum() / (tokens * terms.ranks)
    if share.dim() == 1:
        sums_E = WeightedSum.apply(scores_TE, terms.mask)
        return experts * (share * sums_E).sum() / terms.total
    sums_E = WeightedSum.apply(share * scores_TE, terms.sequence_weights)
    return experts * sums_E.sum() / terms.sequences


def _z_loss(logits_TE: torch.Tensor, terms: RouterLossTerms) -> torch.Tensor:
    """Return this rank's part of the mean squared log-sum-exp of the router logits."""
    squares_T = torch.logsumexp(logits_TE, -1).square()
    if terms.mask is None:
        return squares_T.mean() / terms.ranks
    return WeightedSum.apply(squares_T[:, None], terms.mask).sum() / terms.total
