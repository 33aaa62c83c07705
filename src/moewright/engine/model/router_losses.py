"""What the losses and statistics of a router count: all tokens, or those that count.

Tokens that do not count are padding, and tokens whose target is masked: they take their experts,
and no loss or statistic of the router knows them. Shapes: T tokens of this rank, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moewright.engine.kernels.fused.router_losses import RouterLossTerms
from moewright.engine.model.micro_batch import CountedTokens
from moewright.spec.model import ScoreFunction
from moewright.spec.workload import LossSpec


def aux_loss_coefficients(loss: LossSpec) -> tuple[float, float, float, float]:
    """Return the coefficients of a router's auxiliary losses, in the order of these losses.

    They are of the balance losses over the micro-batch, each sequence and the global batch, then of
    the z loss.
    """
    return loss.aux_coeff, loss.seq_aux_coeff, loss.global_aux_coeff, loss.z_coeff


def loss_terms(
    loss: LossSpec,
    score: ScoreFunction,
    shares: tuple[torch.Tensor, ...],
    *,
    ranks: int,
    counted: CountedTokens | None,
) -> RouterLossTerms:
    """Return what a router's losses are made of; `shares` are those of the losses that are on.

    `ranks` hold the micro-batch in equal numbers of tokens.
    """
    coefficients = aux_loss_coefficients(loss)
    rest = iter(shares)
    first, second, third = (next(rest) if c else None for c in coefficients[:3])
    terms = RouterLossTerms(
        coefficients=coefficients,
        shares=(first, second, third),
        is_normalized=not score.is_distribution,
        ranks=ranks,
    )
    if counted is None:
        return terms
    return replace(
        terms,
        mask=counted.mask,
        sequence_weights=counted.sequence_weights,
        total=counted.total,
        sequences=counted.sequences,
    )


def count_counted(experts_Tk: torch.Tensor, experts: int, counted: CountedTokens) -> torch.Tensor:
    """Count the rows of each expert [E] int64 among the tokens that count."""
    rows = counted.mask.long()[:, None].expand_as(experts_Tk)
    counts = torch.zeros(experts, dtype=torch.int64, device=experts_Tk.device)
    return counts.scatter_add_(0, experts_Tk.flatten(), rows.flatten())
