"""Sparse attention: an indexer scores the keys of each query, and attention takes the best.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1); what an indexer computes is what transformers'
deepseek_v32 and glm_moe_dsa compute. It is whole on every TP rank, which chooses for the queries
of its own tokens; the keys it scores are gathered, and so is what it chose. So are they over CP
ranks, which exchange heads for tokens around attention: it has whole sequences then.

Shapes: t of the T tokens of the TP group are this rank's between blocks; Q the queries' latent, H
hidden; the rest as in kernels.sparse_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moewright.engine.comm.autograd_collectives import AllGatherRows
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.sparse_attention import (
    CHOOSE_KEYS,
    DIVERGE,
    SCORE_GRADIENTS,
    SPARSE_ATTENTION,
    SPARSE_ATTENTION_BACKWARD,
)
from moewright.engine.model.attention import MicroBatchContext
from moewright.engine.model.autograd import CountedFunction, LayerNorm, NormSettings
from moewright.engine.model.context_parallel import join_sequences, sum_and_split_sequences
from moewright.engine.model.layers import Vector, Weight, hidden_replica_group, project_replicated
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import trains_indexer
from moewright.rules.context_parallel import rank_positions
from moewright.spec.model import AttentionSpec, IndexerSpec

# The norm of the indexer's keys adds this whatever other norms add (DeepSeek-V3.2's code).
_KEY_EPS = 1e-6
# Of queries without a key, whose target is nothing.
_MIN_SHARE = 1e-30


class _KeyNorm(Weight):
    """A LayerNorm of the indexer's keys, with a bias."""

    def __init__(self, runtime: Runtime, width: int) -> None:
        super().__init__(runtime, width)
        self.bias = Vector(runtime, width)
        self._settings = NormSettings(
            eps=_KEY_EPS,
            kernels=runtime.kernels,
            keeps_scale=True,
            replica_group=hidden_replica_group(runtime),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None  # made above
        return LayerNorm.apply(x, self.weight, self.bias.weight, self._settings)


# Rows of this rank's tokens that are neighbours, and the first of them among all tokens.
Run = tuple[slice, int]
# The same with the length of sequences and the tokens of a key.
Places = tuple[tuple[slice, tuple[int, int, int]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexInputs:
    """What an indexer makes its scores of: [t,I,W], [T,W] and [t,I], and its choice [t,K].

    T counts the tokens of all CP ranks. `runs` are rows of neighbours among this rank's tokens, and
    the token at which each begins, in sequences of `seq_len`; a key is of `rate` tokens.
    """

    q_tIW: torch.Tensor
    k_TW: torch.Tensor
    heads_tI: torch.Tensor
    chosen_tK: torch.Tensor
    runs: tuple[Run, ...]
    seq_len: int
    counters: Counters
    rate: int

    @property
    def places(self) -> Places:
        """Where the queries of each run lie among all tokens, and the keys."""
        return tuple((rows, (first, self.seq_len, self.rate)) for rows, first in self.runs)

    @property
    def scores(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the scores of keys are made of."""
        return self.q_tIW, self.k_TW, self.heads_tI


class Indexer(nn.Module):
    """The chooser of keys: the queries' latent [t,Q] and hidden states [t,H] -> [B,S,K] int32.

    What it is given has no gradient. Its weights have that of its own objective alone. A key is of
    `_rate` tokens.
    """

    _rate = 1

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        attention = runtime.model.attention
        spec = attention.indexer
        if spec is None:
            raise ValueError("a layer that chooses keys needs attention.indexer")
        self._runtime = runtime
        self._spec = spec
        self._rotary_width = attention.qk_rope_head_dim
        self._is_trained = trains_indexer(runtime.workload)
        self.q: Weight
        self.heads: Weight
        self._build_weights(attention, spec)

    def forward(
        self, x_tQ: torch.Tensor, x_tH: torch.Tensor, context: MicroBatchContext
    ) -> tuple[torch.Tensor, IndexInputs]:
        with torch.set_grad_enabled(self._is_trained and torch.is_grad_enabled()):
            return self._choose(x_tQ.detach(), x_tH.detach(), context)

    def add_objective(
        self,
        out_tH: torch.Tensor,
        inputs: IndexInputs,
        sum_shares: Callable[[], torch.Tensor],
        context: MicroBatchContext,
    ) -> torch.Tensor:
        """Return attention's output, through which the gradients of the objective pass.

        `sum_shares` sums what the heads of this rank read of the chosen keys: [B,S,K]. The
        objective is the mean over tokens of the divergence of the scores from what attention
        reads, both over the chosen keys (DeepSeek-V3.2, equation 4), times train.indexer_coeff.
        """
        runtime = self._runtime
        if not self.q.is_trained:
            return out_tH
        if not self._is_trained:
            return ZeroGradients.apply(out_tH, *self._weights())
        if not torch.is_grad_enabled():
            return out_tH
        with torch.no_grad():
            shares = sum_shares().flatten(0, 1)
            total = len(shares)
            shares_TK = sum_and_split_sequences(runtime, shares)
            # Each TP rank has summed the shares of its own heads.
            target_tK = runtime.mesh.tensor_parallel.reduce(shares_TK)
            target_tK = target_tK / target_tK.sum(-1, keepdim=True).clamp(min=_MIN_SHARE)
            slopes_tK = _find_slopes(inputs, target_tK)
            weight = context.objective_weight * runtime.workload.loss.indexer_coeff
            if context.counted is None:
                slopes_tK *= weight / total
            else:
                slopes_tK *= context.counted.mask[:, None] * (weight / context.counted.total)
        return IndexerObjective.apply(out_tH, *inputs.scores, slopes_tK, inputs)

    def _weights(self) -> tuple[torch.Tensor, ...]:
        owners = (self.q, self.k, self.k_norm, self.k_norm.bias, self.heads)
        return tuple(owner.weight for owner in owners if owner is not None)

    def _choose(
        self, x_tQ: torch.Tensor, x_tH: torch.Tensor, context: MicroBatchContext
    ) -> tuple[torch.Tensor, IndexInputs]:
        runtime = self._runtime
        spec = self._spec
        tp = runtime.mesh.tensor_parallel
        first = 0
        if tp.sequence_parallel:
            first = tp.group.index * len(x_tH)
        own = slice(first, first + len(x_tH))
        own_context = context.select_tokens(own)
        seq_len = runtime.workload.seq_len
        q_tIW = project_replicated(runtime, x_tQ, self.q).unflatten(1, (spec.heads, spec.head_dim))
        q_tIW = self._rotate(q_tIW, own_context)
        k_TW = self._make_keys(x_tH, context, own_context)
        scale = (spec.heads * spec.head_dim) ** -0.5
        heads_tI = project_replicated(runtime, x_tH, self.heads).float() * scale
        bounds = context.bound_keys(self._rate)
        runs = _list_runs(runtime, own, context.sequences)
        with torch.no_grad():
            chosen_tK = _join(
                [
                    CHOOSE_KEYS(
                        q_tIW[rows],
                        k_TW,
                        heads_tI[rows],
                        (start, seq_len, self._rate),
                        spec.top_k,
                        bounds,
                    )
                    for rows, start in runs
                ]
            )
            chosen_TK = tp.gather(chosen_tK)
            chosen = join_sequences(runtime, chosen_TK)
        if chosen is chosen_TK:
            chosen_tK = chosen_TK[own]  # a part of what attention keeps
        inputs = IndexInputs(
            q_tIW=q_tIW,
            k_TW=k_TW,
            heads_tI=heads_tI,
            chosen_tK=chosen_tK,
            runs=runs,
            seq_len=seq_len,
            counters=runtime.counters,
            rate=self._rate,
        )
        return chosen.unflatten(0, (context.sequences, seq_len)), inputs

    def _build_weights(self, attention: AttentionSpec, spec: IndexerSpec) -> None:
        """Build the parameters, in the order of rules.shapes.mixers."""
        runtime = self._runtime
        hidden = runtime.model.hidden_size
        self.q = Weight(runtime, spec.heads * spec.head_dim, attention.q_lora_rank)
        self.k = Weight(runtime, spec.head_dim, hidden)
        self.k_norm = _KeyNorm(runtime, spec.head_dim)
        self.heads = Weight(runtime, spec.heads, hidden)

    def _make_keys(
        self, x_tH: torch.Tensor, context: MicroBatchContext, own: MicroBatchContext
    ) -> torch.Tensor:
        """Return the keys [T,W] of all tokens; `own` is the context of this rank's."""
        tp = self._runtime.mesh.tensor_parallel
        k_TW = self.k_norm(project_replicated(self._runtime, x_tH, self.k))
        k_TW = self._rotate(k_TW[:, None], own)[:, 0]
        # Without it every rank has the keys of all tokens.
        if tp.sequence_parallel:
            k_TW = AllGatherRows.apply(k_TW, tp.group)
        return join_sequences(self._runtime, k_TW)

    def _rotate(self, x_tIW: torch.Tensor, own: MicroBatchContext) -> torch.Tensor:
        """Rotate the first columns of each head by the positions of this rank's tokens."""
        widths = (self._rotary_width, x_tIW.shape[-1] - self._rotary_width)
        rotary, plain = x_tIW[None].split(widths, -1)
        return torch.cat((own.rotate(rotary, interleaved=self._spec.interleaved), plain), -1)[0]


def _list_runs(runtime: Runtime, own: slice, sequences: int) -> tuple[Run, ...]:
    """Return the runs of a rank's tokens, which are some of those that its TP group has."""
    seq_len = runtime.workload.seq_len
    cp = runtime.mesh.layout.cp
    parts = rank_positions(seq_len, cp, runtime.mesh.coordinate("cp"))
    runs: list[Run] = []
    row = -own.start  # where the next part begins among the rank's rows
    for sequence in range(sequences):
        for part in parts:
            begin, end = max(row, 0), min(row + len(part), own.stop - own.start)
            first = sequence * seq_len + part.start + begin - row
            row += len(part)
            if begin >= end:
                continue
            if runs and runs[-1][1] + begin - runs[-1][0].start == first:  # it goes on
                before, first = runs.pop()
                begin = before.start
            runs.append((slice(begin, end), first))
    return tuple(runs)


def _find_slopes(inputs: IndexInputs, target_tK: torch.Tensor) -> torch.Tensor:
    """Return the slopes [t,K] of the divergence from a target by the scores of chosen keys."""
    q_tIW, k_TW, heads_tI = inputs.scores
    return _join(
        [
            DIVERGE(
                q_tIW[rows], k_TW, heads_tI[rows], inputs.chosen_tK[rows], target_tK[rows], place
            )[1]
            for rows, place in inputs.places
        ]
    )


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


class ZeroGradients(ReleasingFunction):
    """x as it is; the gradients of weights that do not train are zeros.

    Ranks that reduce gradients in shards wait for one of every weight.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = (
            torch.zeros_like(weight) if is_needed else None
            for weight, is_needed in zip(ctx.weights, needed, strict=True)
        )
        return grad, *zeros


class IndexerObjective(CountedFunction):
    """x as it is; queries, keys and heads of an indexer get the gradients of its objective.

    Keeps these, the choice, and the slopes [t,K] of the objective by the scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        q_tIW: torch.Tensor,
        k_TW: torch.Tensor,
        heads_tI: torch.Tensor,
        slopes_tK: torch.Tensor,
        inputs: IndexInputs,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, inputs.counters)
        ctx.places = inputs.places
        ctx.save_for_backward(slopes_tK, q_tIW, k_TW, heads_tI, inputs.chosen_tK)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes, q, k, heads, chosen = ctx.saved_tensors
        with ctx.counters.scopes.enter(ctx.scope):
            parts = [
                SCORE_GRADIENTS(slopes[rows], q[rows], k, heads[rows], chosen[rows], place)
                for rows, place in ctx.places
            ]
        dq, dk, dheads = zip(*parts, strict=True)
        return grad, _join(list(dq)), sum(dk[1:], dk[0]), _join(list(dheads)), None, None


class SparseAttention(CountedFunction):
    """Softmax attention of q, k [B,S,H,D] and v [B,S,H,V] to chosen keys [B,S,K] -> [B,S,H,V].

    Keeps q, k, v, the choice, the output and the log-sum-exp. FLOPs as in the kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chosen: torch.Tensor,
        counted_width: int,
        counters: Counters,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, counters)
        ctx.counted_width = counted_width
        out, lse = SPARSE_ATTENTION(q, k, v, chosen, counted_width)
        ctx.save_for_backward(q, k, v, out, lse, chosen)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.counters.scopes.enter(ctx.scope):
            grads = SPARSE_ATTENTION_BACKWARD(grad, *ctx.saved_tensors, ctx.counted_width)
        return *grads, None, None, None
