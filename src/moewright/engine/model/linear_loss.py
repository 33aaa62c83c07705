"""The head's product and its loss in one, for recompute=loss: logits are made a few columns at a
time, twice.

A piece is some rows of the projection, so some columns of the logits. Cut that way a piece's part
of the weight's gradient is whole at once, and what is summed over pieces is as wide as the hidden
state, not as the vocabulary. Shapes: t of the T tokens of the group are this rank's between blocks;
K width, V this rank's rows of the projection, P those of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moewright.engine.comm.collectives import all_reduce
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.matmul import accumulate_matmul, matmul
from moewright.engine.model.autograd import CountedFunction
from moewright.engine.model.vocab_parallel import VocabShard
from moewright.engine.observe.counters import Counters


def _pieces(part: VocabShard, rows: int, most: int) -> Iterator[tuple[slice, VocabShard]]:
    """Of so many `rows` of the projection, padding among them, `most` at a time; and the ids of
    each piece."""
    for start in range(0, rows, most):
        stop = min(start + most, rows)
        inside = max(0, min(part.size, stop) - start)
        yield slice(start, stop), replace(part, start=part.start + start, size=inside)


class LinearCrossEntropy(CountedFunction):
    """Negative log-likelihood [T] fp32 of targets [T] under logits x w^T, x [t,K] and w [V,K]; 0
    where the target is negative.

    No more than `most` columns of the logits are there at once. Keeps x as it came, the targets and
    the log of the partition sum [T]. The weight's gradient comes with that of x, also where a
    schedule would have it later: it would need all logits a third time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_tK: torch.Tensor,
        w_VK: torch.Tensor,
        targets_T: torch.Tensor,
        part: VocabShard,
        most: int,
        books: Counters,
        kernels: KernelSet,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, books)
        ctx.part, ctx.most, ctx.kernels = part, most, kernels
        x_TK = part.tp.gather(x_tK)
        top = torch.full((len(targets_T),), -torch.inf, device=x_TK.device)
        sums = torch.zeros(
            2, len(targets_T), device=x_TK.device
        )  # of exp(logit - top), and of the target's logit
        for rows, piece in _pieces(part, len(w_VK), most):
            # Padding is multiplied as in a product with all rows, so that every rank of the group
            # does the same.
            logits_TP = matmul(x_TK, w_VK[rows].T)[:, : piece.size]
            if not piece.size:
                continue
            higher = torch.maximum(top, logits_TP.amax(-1).float())
            sums[0].mul_((top - higher).exp_()).add_(kernels.sum_exp(logits_TP, higher))
            top = higher
            sums[1].add_(piece.target_logits(logits_TP, targets_T))
        highest = all_reduce(top.clone(), part.group, maximum=True)
        sums[0].mul_((top - highest).exp_())
        partition, chosen = all_reduce(sums, part.group)
        log_sum = highest.add_(partition.log_())
        ctx.save_for_backward(x_tK, w_VK, targets_T, log_sum)
        return (log_sum - chosen).masked_fill_(targets_T < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_tK, w_VK, targets_T, log_sum = ctx.saved_tensors
        grad_T = grad_T.masked_fill(targets_T < 0, 0.0)
        with ctx.books.within(ctx.where):
            x_TK = ctx.part.tp.whole(x_tK)
            grad_TK = torch.zeros(x_TK.shape, dtype=torch.float32, device=x_TK.device)
            grad_VK = torch.empty_like(w_VK)
            for rows, piece in _pieces(ctx.part, len(w_VK), ctx.most):
                w_PK = w_VK[rows]
                logits_TP, columns = matmul(x_TK, w_PK.T), piece.local_columns(targets_T)
                grad_TP = ctx.kernels.losses_backward(
                    grad_T, logits_TP, columns, log_sum, piece.size
                )
                accumulate_matmul(grad_TK, grad_TP, w_PK)
                grad_VK[rows] = matmul(grad_TP.T, x_TK)
            grad_tK = ctx.part.tp.summed(grad_TK.to(x_tK.dtype))
        return grad_tK, grad_VK, None, None, None, None, None
