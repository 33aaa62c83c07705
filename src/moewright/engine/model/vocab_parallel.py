"""Embedding and loss over a vocabulary that is sharded over the tensor-parallel group.

A rank holds V rows of the table, from `start` on; where the group does not divide the vocabulary
the last V - size rows are padding, which no token id names and which gets no probability.

Shapes: t of the T tokens of the group are this rank's between blocks; K width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.comm.collectives import Group, TensorParallel, all_reduce
from moewright.engine.kernels.fused.interface import KernelSet


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """This rank's ids [start, start + size) and the ranks over which the vocabulary is sharded."""

    tp: TensorParallel
    start: int
    size: int

    @property
    def group(self) -> Group:
        return self.tp.group

    def local_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each id's row on this rank, 0 for ids of other ranks, and a mask of the latter."""
        elsewhere = (ids < self.start) | (ids >= self.start + self.size)
        return (ids - self.start).masked_fill(elsewhere, 0), elsewhere

    def local_columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the column of each id in this rank's logits, -1 for ids of other ranks."""
        columns, elsewhere = self.local_rows(ids)
        return columns.masked_fill_(elsewhere, -1)

    def target_logits(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """Return each target's logit [T] fp32, 0 where another rank has it."""
        columns, elsewhere = self.local_rows(targets_T)
        return logits_TV.gather(1, columns[:, None])[:, 0].float().masked_fill_(elsewhere, 0.0)


class VocabParallelEmbedding(torch.autograd.Function):
    """Rows of the table by ids [T] -> [t,K]; keeps the ids.

    The gradient is summed in fp32, since frequent tokens sum thousands of rows.
    """

    @staticmethod
    def forward(
        ctx: Any, ids_T: torch.Tensor, w_VK: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        ctx.save_for_backward(ids_T)
        ctx.table_shape = w_VK.shape
        ctx.table_dtype = w_VK.dtype
        ctx.shard = shard
        if shard.group.size == 1:
            return w_VK.index_select(0, ids_T)
        rows, elsewhere = shard.local_rows(ids_T)
        return shard.tp.reduce(w_VK.index_select(0, rows).masked_fill_(elsewhere[:, None], 0.0))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        grad = shard.tp.gather(grad).float()
        if shard.group.size > 1:
            rows, elsewhere = shard.local_rows(rows)
            grad = grad.masked_fill(elsewhere[:, None], 0.0)
        summed = torch.zeros(ctx.table_shape, dtype=torch.float32, device=grad.device)
        return None, summed.index_add_(0, rows, grad).to(ctx.table_dtype), None


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Negative log-likelihood [T] fp32 of targets [T] under logits [T,V].

    It is 0 where the target is negative. Softmax is taken in fp32 over a few rows at a time. Keeps
    logits, targets and, when the vocabulary is sharded, the log of the partition sum [T].
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        shard: VocabShard,
        kernels: KernelSet,
    ) -> torch.Tensor:
        ctx.shard = shard
        ctx.kernels = kernels
        if shard.group.size == 1:
            ctx.save_for_backward(logits_TV, targets_T)
            losses = kernels.cross_entropy(logits_TV, targets_T)
        else:
            log_sum, target_logits = _sum_partition(
                logits_TV[:, : shard.size], targets_T, shard, kernels
            )
            ctx.save_for_backward(logits_TV, targets_T, log_sum)
            losses = log_sum - target_logits
        return losses.masked_fill_(targets_T < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_TV, columns_T, *sharded = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        grad_T = grad_T.masked_fill(columns_T < 0, 0.0)
        log_sum = None
        if sharded:
            (log_sum,) = sharded
            columns_T = shard.local_columns(columns_T)
        grad_TV = ctx.kernels.cross_entropy_backward(
            grad_T, logits_TV, columns_T, log_sum, shard.size
        )
        return grad_TV, None, None, None


def _sum_partition(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, shard: VocabShard, kernels: KernelSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log sum_v exp(logit) over the whole vocabulary, and the target's logit, both [T] fp32.

    This takes two all-reduces.
    """
    max_logit = torch.full((len(targets_T),), -torch.inf, device=logits_TV.device)
    if shard.size:
        max_logit = logits_TV.amax(-1).float()
    all_reduce(max_logit, shard.group, maximum=True)
    sums = torch.zeros(2, len(targets_T), device=logits_TV.device)
    if shard.size:
        sums[0] = kernels.sum_exp(logits_TV, max_logit)
        sums[1] = shard.target_logits(logits_TV, targets_T)
    partition, target_logits = all_reduce(sums, shard.group)
    return max_logit.add_(partition.log_()), target_logits
