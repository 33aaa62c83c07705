"""The vocabulary over a tensor-parallel group: embedding, loss, and the head with its loss.

Embedding and loss over a vocabulary that is sharded over the tensor-parallel group. A rank holds V
rows of the table, from `start` on; where the group does not divide the vocabulary the last V - size
rows are padding, which no token id names and which gets no probability.

The output projection and its cross-entropy in one operation, for recompute=loss. Logits are
computed a few columns at a time, once in forward and once more in backward. A chunk is some rows of
the projection, so some columns of the logits. Split that way, a chunk's part of the weight's
gradient is complete at once, and the sum over chunks is as wide as the hidden state, not as the
vocabulary.

Shapes: t of the T tokens of the group are this rank's between blocks; K width, V this rank's rows
of the projection, P the rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from moewright.engine.comm.collectives import Group, TensorParallel, all_reduce
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.matmul import accumulate_matmul, matmul
from moewright.engine.model.autograd import CountedFunction


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


class VocabParallelEmbedding(ReleasingFunction):
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
        # One rank has the row of a token and the others zeros, so that the sum is the row.
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


class VocabParallelCrossEntropy(ReleasingFunction):
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
    # The last ranks may hold nothing but padding.
    if shard.size:
        max_logit = logits_TV.amax(-1).float()
    all_reduce(max_logit, shard.group, maximum=True)
    # Both in one tensor, for one all-reduce.
    sums = torch.zeros(2, len(targets_T), device=logits_TV.device)
    if shard.size:
        sums[0] = kernels.sum_exp(logits_TV, max_logit)
        sums[1] = shard.target_logits(logits_TV, targets_T)
    partition, target_logits = all_reduce(sums, shard.group)
    return max_logit.add_(partition.log_()), target_logits


def _split_shard(shard: VocabShard, rows: int, max_rows: int) -> Iterator[tuple[slice, VocabShard]]:
    """Yield chunks of at most `max_rows` rows of the projection, each with its part of the shard.

    `rows` counts the padding too.
    """
    for start in range(0, rows, max_rows):
        stop = min(start + max_rows, rows)
        size = max(0, min(shard.size, stop) - start)
        yield slice(start, stop), replace(shard, start=shard.start + start, size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedLossSettings:
    """The shard of the vocabulary, the columns of logits at a time, and the kernels for them."""

    shard: VocabShard
    max_columns: int
    kernels: KernelSet


class LinearCrossEntropy(CountedFunction):
    """Negative log-likelihood [T] fp32 of targets [T] under logits x w^T + b.

    x is [t,K], w [V,K] and b [V] or None.

    It is 0 where the target is negative. No more than `max_columns` columns of the logits exist at
    once. Keeps x [t,K], the targets and the log of the partition sum [T]. The weight's gradient is
    computed with that of x, also under a schedule that defers weight gradients: deferred, it would
    need all logits a third time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_tK: torch.Tensor,
        w_VK: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        settings: ChunkedLossSettings,
    ) -> torch.Tensor:
        shard = settings.shard
        CountedFunction.save_scope(ctx, shard.group.counters)
        ctx.settings = settings
        x_TK = shard.tp.gather(x_tK)
        tokens = len(targets_T)
        local_max = torch.full((tokens,), -torch.inf, device=x_TK.device)
        # The sum of exp(logit - max), and the target's logit.
        sums = torch.zeros(2, tokens, device=x_TK.device)
        for rows, chunk in _split_shard(shard, len(w_VK), settings.max_columns):
            # Padding rows are multiplied too, as in a product without chunks, so that every rank of
            # the group does the same work.
            logits_TP = _multiply(x_TK, w_VK, bias_V, rows)[:, : chunk.size]
            if not chunk.size:
                continue
            new_max = torch.maximum(local_max, logits_TP.amax(-1).float())
            # The running sum is one of exp(logit - old maximum); at first that factor is exp(-inf).
            rescaling = (local_max - new_max).exp_()
            sums[0].mul_(rescaling).add_(settings.kernels.sum_exp(logits_TP, new_max))
            local_max = new_max
            sums[1].add_(chunk.target_logits(logits_TP, targets_T))
        # A copy: the rank's own maximum is what its sum refers to.
        global_max = all_reduce(local_max.clone(), shard.group, maximum=True)
        # A rank of padding alone has -inf here, and adds 0.
        sums[0].mul_((local_max - global_max).exp_())
        partition, target_logits = all_reduce(sums, shard.group)
        log_sum = global_max.add_(partition.log_())
        ctx.save_for_backward(x_tK, w_VK, bias_V, targets_T, log_sum)
        return (log_sum - target_logits).masked_fill_(targets_T < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_tK, w_VK, bias_V, targets_T, log_sum = ctx.saved_tensors
        settings: ChunkedLossSettings = ctx.settings
        shard = settings.shard
        grad_T = grad_T.masked_fill(targets_T < 0, 0.0)
        with ctx.counters.scopes.enter(ctx.scope):
            x_TK = shard.tp.gather(x_tK)
            grad_TK = torch.zeros(x_TK.shape, dtype=torch.float32, device=x_TK.device)
            # Not zeros: each chunk writes rows of its own, and together they are all.
            grad_VK = torch.empty_like(w_VK) if ctx.needs_input_grad[1] else None
            grad_V = None
            if bias_V is not None and ctx.needs_input_grad[2]:
                grad_V = torch.empty_like(bias_V)
            for rows, chunk in _split_shard(shard, len(w_VK), settings.max_columns):
                logits_TP = _multiply(x_TK, w_VK, bias_V, rows)
                columns = chunk.local_columns(targets_T)
                grad_TP = settings.kernels.cross_entropy_backward(
                    grad_T, logits_TP, columns, log_sum, chunk.size
                )
                accumulate_matmul(grad_TK, grad_TP, w_VK[rows])
                if grad_VK is not None:
                    grad_VK[rows] = matmul(grad_TP.T, x_TK)
                if grad_V is not None:
                    grad_V[rows] = grad_TP.sum(0, dtype=torch.float32)
            grad_tK = shard.tp.reduce(grad_TK.to(x_tK.dtype))
        return grad_tK, grad_VK, grad_V, None, None


def _multiply(
    x_TK: torch.Tensor, w_VK: torch.Tensor, bias_V: torch.Tensor | None, rows: slice
) -> torch.Tensor:
    """Return the logits of some rows of the projection."""
    logits_TP = matmul(x_TK, w_VK[rows].T)
    if bias_V is None:
        return logits_TP
    return logits_TP.add_(bias_V[rows])
