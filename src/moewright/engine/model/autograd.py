"""Differentiable operations that keep for backward exactly what the memory model says.

Each is an autograd Function of its own, so that the saved tensors are the same on every device and
the FLOPs of backward are counted to the module that ran the forward.

Shapes: T tokens, K width, B batch, S sequence, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from moewright.engine.comm.collectives import (
    Group,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.attention import (
    AttentionMask,
    AttentionState,
    attention,
    attention_backward,
)
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.memory.weight_gradients import ComputeGrads, Operands
from moewright.engine.observe.counters import Counters


class CountedFunction(ReleasingFunction):
    """An autograd Function whose backward is counted to the module that ran its forward."""

    @staticmethod
    def save_scope(ctx: Any, counters: Counters) -> None:
        """Remember the module that runs now; `backward` runs inside `ctx.scope`."""
        ctx.counters = counters
        ctx.scope = counters.scopes.current

    @staticmethod
    def compute_or_defer_grads(
        ctx: Any, inputs: slice, operands: Operands, compute: ComputeGrads
    ) -> Sequence[torch.Tensor | None]:
        """Return compute(operands), or None for each weight whose gradient is wanted later.

        `inputs` selects the weights among the forward's tensor arguments; `ctx.weight_grads` is the
        store that keeps a deferred `compute`, which must hold no other tensor than `operands`.
        """
        counters, scope = ctx.counters, ctx.scope

        def compute_in_scope(operands: Operands) -> Sequence[torch.Tensor]:
            with counters.scopes.enter(scope):
                return compute(operands)

        edges = [GradientEdge(*edge) for edge in ctx.next_functions[inputs]]
        with counters.scopes.enter(scope):
            return ctx.weight_grads.compute_or_defer(edges, operands, compute_in_scope)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSettings:
    """The settings that define an RMSNorm besides its weight.

    Each rank of `shard_group` holds an equal part of the last dim, and the mean is over the whole
    dim. The ranks of `replica_group` all have the same x; each computes the weight's gradient from
    its part of the rows. With `keeps_scale` the scale of each row, one fp32 number, is kept for
    backward. With `zero_centered` the product is with 1 + weight, in fp32.
    """

    eps: float
    kernels: KernelSet
    keeps_scale: bool = False
    shard_group: Group | None = None
    replica_group: Group | None = None
    zero_centered: bool = False


class RmsNorm(ReleasingFunction):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dim, in fp32; w None for ones.

    Keeps x and, if asked, one fp32 number a row.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, trained: torch.Tensor | None, settings: NormSettings
    ) -> torch.Tensor:
        ctx.settings = settings
        weight = _norm_factor(x, trained, settings)
        if settings.shard_group is None:
            out, scale = settings.kernels.rms_norm(x, weight, settings.eps)
        else:
            wide = x.float()
            scale = _norm_scale(wide, settings.eps, settings.shard_group)
            out = ((wide * scale).to(x.dtype) * weight).to(x.dtype)
        ctx.save_for_backward(x, trained, scale if settings.keeps_scale else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, trained, scale = ctx.saved_tensors
        settings: NormSettings = ctx.settings
        weight = _norm_factor(x, trained, settings)
        weight_rows = slice(None)
        if settings.replica_group is not None:
            weight_rows = split_rows(grad[..., 0].numel(), settings.replica_group)
        if settings.shard_group is None:
            grad_x, grad_weight = settings.kernels.rms_norm_backward(
                grad, x, weight, settings.eps, scale, weight_rows
            )
            return grad_x, _weight_gradient(grad_weight, trained), None
        wide = x.float()
        if scale is None:
            scale = _norm_scale(wide, settings.eps, settings.shard_group)
        normed = wide * scale
        wide_grad = grad.float()
        grad_weight = (wide_grad * normed).flatten(0, -2)[weight_rows].sum(0)
        grad_normed = wide_grad * weight.float()
        mean = _mean(grad_normed * normed, settings.shard_group)
        grad_x = (grad_normed - normed * mean).mul_(scale)
        return grad_x.to(x.dtype), _weight_gradient(grad_weight, trained), None


def _weight_gradient(grad: torch.Tensor, trained: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient in the weight's own dtype; None of a norm whose weight is fixed."""
    return None if trained is None else grad.to(trained.dtype)


class LayerNorm(ReleasingFunction):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over the last dim, in fp32.

    By torch's own kernel on every device. Keeps x and, if asked, two fp32 numbers a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        settings: NormSettings,
    ) -> torch.Tensor:
        ctx.settings = settings
        ctx.dtypes = weight.dtype, bias.dtype
        factor = _norm_factor(x, weight, settings).to(weight.dtype)
        out, mean, scale = _layer_norm(x, factor, bias, settings.eps)
        statistics = (mean, scale) if settings.keeps_scale else ()
        ctx.save_for_backward(x, weight, bias, *statistics)
        return out

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, bias, *statistics = ctx.saved_tensors
        settings: NormSettings = ctx.settings
        factor = _norm_factor(x, weight, settings).to(weight.dtype)
        if not statistics:
            _, *statistics = _layer_norm(x, factor, bias, settings.eps)
        shape = x.shape[-1:]
        wide = _wide_on_cpu(grad.contiguous()), _wide_on_cpu(x)
        rows = [tensor.flatten(0, -2) for tensor in (*wide, *statistics)]
        weights = [_wide_on_cpu(tensor) for tensor in (factor, bias)]
        (grad_rows, x_rows, *statistic_rows) = rows
        # Twice: x has a gradient in all rows, the weights from this rank's part of them.
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_rows, x_rows, shape, *statistic_rows, *weights, [True, False, False]
        )
        if settings.replica_group is not None:
            part = split_rows(len(x_rows), settings.replica_group)
            grad_rows, x_rows, *statistic_rows = (tensor[part] for tensor in rows)
        _, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_rows, x_rows, shape, *statistic_rows, *weights, [False, True, True]
        )
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            grad_x.view(x.shape).to(x.dtype),
            grad_weight.to(weight_dtype),
            grad_bias.to(bias_dtype),
            None,
        )


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normed x, and the fp32 mean and reciprocal deviation [...,1] of its rows."""
    out, mean, scale = torch.native_layer_norm(
        x, x.shape[-1:], _wide_on_cpu(weight), _wide_on_cpu(bias), eps
    )
    # A CPU's and a GPU's are fp32 already; torch's tensors without data have them in x's dtype.
    return out, mean.float(), scale.float()


def _wide_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp32 on CPUs, whose kernels reduce and keep statistics in its dtype."""
    if tensor.device.type == "cpu":
        return tensor.float()
    return tensor


def _norm_factor(
    x: torch.Tensor, trained: torch.Tensor | None, settings: NormSettings
) -> torch.Tensor:
    """Return what the normed x is multiplied by."""
    if trained is None:
        return x.new_ones(x.shape[-1])
    if settings.zero_centered:
        return 1 + trained.float()
    return trained


def split_rows(rows: int, group: Group) -> slice:
    """Return this rank's part of the rows."""
    return slice(rows * group.index // group.size, rows * (group.index + 1) // group.size)


def _norm_scale(wide: torch.Tensor, eps: float, shard_group: Group) -> torch.Tensor:
    return torch.rsqrt(_mean(wide.square(), shard_group) + eps)


def _mean(x: torch.Tensor, shard_group: Group) -> torch.Tensor:
    """Return the mean over the last dim, which is kept as 1, and over the ranks that hold parts."""
    # The ranks have equal parts, so that the mean of their means is that of all.
    return all_reduce(x.mean(-1, keepdim=True), shard_group).div_(shard_group.size)


class Rotary(ReleasingFunction):
    """The rotary embedding of x [B,S,H,D], which rotates columns i and i + D/2 as a pair.

    cos and sin are [S, D/2] or [B, S, D/2] fp32. Backward rotates by the opposite angles, so only
    the table is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kernels: KernelSet
    ) -> torch.Tensor:
        ctx.angles = cos, sin
        ctx.kernels = kernels
        return kernels.rotate(x_BSHD, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.angles
        return ctx.kernels.rotate(grad, cos, -sin), None, None, None


class CausalAttention(CountedFunction):
    """Softmax attention of q [B,S,H,D] over k, v [B,S,G,D] -> [B,S,H,D], with sinks [H].

    Keeps q, k, v, the output and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: AttentionMask,
        counters: Counters,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, counters)
        ctx.mask = mask
        out, state = apply_sinks(*attention(q, k, v, mask), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, *state = ctx.saved_tensors
        grad_sinks = compute_sinks_grad(grad, out, state[0], sinks)
        with ctx.counters.scopes.enter(ctx.scope):
            grads = attention_backward(grad, q, k, v, out, tuple(state), ctx.mask)
        return *grads, grad_sinks, None, None


def apply_sinks(
    out: torch.Tensor, state: AttentionState, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, AttentionState]:
    """Add the sinks to finished attention: one more logit a head, whose value vector is zero.

    `out` is [B,S,H,D]; `state` begins with its log-sum-exp [B,H,S] (or [1,H,B*S]).
    """
    if sinks is None:
        return out, state
    lse, *random_state = state
    new_lse = torch.logaddexp(lse, sinks.float()[:, None])
    share = torch.exp(lse - new_lse).transpose(1, 2).reshape(*out.shape[:-1], 1)
    return (out.float() * share).to(out.dtype), (new_lse, *random_state)


def compute_sinks_grad(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of the sinks [H]; `out` and `lse` already include the sinks.

    It is minus the sum over queries of the sink's probability times the dot product grad * out.
    """
    if sinks is None:
        return None
    sink_probs = torch.exp(sinks.float()[:, None] - lse).transpose(1, 2).reshape(out.shape[:-1])
    dots = (grad.float() * out.float()).sum(-1)
    return -(sink_probs * dots).flatten(0, -2).sum(0).to(sinks.dtype)


class SigmoidGate(ReleasingFunction):
    """y = x sigmoid(gate), elementwise and in fp32; keeps x and the gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        return torch.sigmoid(gate.float()).mul_(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate.float())
        grad_x = sigmoid * grad
        grad_gate = (1 - sigmoid).mul_(grad_x).mul_(x)
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype)


class GatherKvHeads(ReleasingFunction):
    """A gather of the parts [T,w] of a key and value head that ranks share -> whole heads [T,D].

    Where a group has more ranks than key heads, the queries of neighbouring ranks attend the same
    head. Each of these ranks projects a part of it, and the parts are gathered, so that weights,
    their gradients and their products are sharded like all others (as in Megatron-LM). Nothing is
    kept for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, k_Tw: torch.Tensor, v_Tw: torch.Tensor, group: Group, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ranks_per_head = group.size // heads
        first = group.index // ranks_per_head * ranks_per_head
        ctx.group = group
        ctx.head_ranks = slice(first, first + ranks_per_head)
        # Side by side, so that one collective moves both.
        gathered = all_gather_rows(torch.cat((k_Tw, v_Tw), 1), group)
        head_parts = gathered.unflatten(0, (group.size, -1))[ctx.head_ranks]
        k, v = (x.transpose(0, 1).flatten(1) for x in head_parts.chunk(2, -1))
        return k, v

    @staticmethod
    def backward(
        ctx: Any, *grads_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        ranks_per_head = ctx.head_ranks.stop - ctx.head_ranks.start
        head_parts = [grad.unflatten(1, (ranks_per_head, -1)) for grad in grads_TD]
        head_grads = torch.cat(head_parts, -1).transpose(0, 1)
        # The sum is over the whole group: ranks of other heads add zeros.
        grads = head_grads.new_zeros((ctx.group.size, *head_grads.shape[1:]))
        grads[ctx.head_ranks] = head_grads
        k, v = reduce_scatter_rows(grads.flatten(0, 1), ctx.group).chunk(2, -1)
        return k, v, None, None
