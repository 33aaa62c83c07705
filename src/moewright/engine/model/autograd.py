"""Differentiable operations that keep for backward exactly what the memory model says.

Each is an own autograd Function so that the saved tensors are the same on every device, and so that
the FLOPs of backward are booked to the module whose forward made them.

Shapes: T tokens, K width, R routed rows, F expert width, B batch, S sequence, H query heads, G key
heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from moewright.engine.comm.collectives import (
    Group,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
)
from moewright.engine.kernels.attention import (
    Segments,
    attention,
    attention_backward,
    varlen_attention,
    varlen_attention_backward,
)
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.observe.counters import Counters


class CountedFunction(torch.autograd.Function):
    """Remembers the module of the forward; `backward` of a subclass runs inside it."""

    @staticmethod
    def save_scope(ctx: Any, books: Counters) -> None:
        ctx.books, ctx.where = books, books.scope

    @staticmethod
    def compute_or_defer_grads(
        ctx: Any, inputs: slice, make: Callable[[], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor | None]:
        """make() now, or None for each of the weights, which are those `inputs` among the forward's
        tensors, if the schedule wants their gradients later.
        """

        def booked() -> Sequence[torch.Tensor]:
            with ctx.books.within(ctx.where):
                return make()

        return ctx.books.later.gradients(
            [GradientEdge(*edge) for edge in ctx.next_functions[inputs]], booked
        )


class RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dim, in fp32; keeps x and, if asked, one fp32
    number a row.

    With a group `across`, each of its ranks holds an equal part of the last dim, and the mean is
    over all of it. With `sharers`, which all have the same x, each makes the weight's gradient of
    its part of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        across: Group | None,
        sharers: Group | None,
        keep_scale: bool,
        kernels: KernelSet,
    ) -> torch.Tensor:
        ctx.eps, ctx.across, ctx.sharers, ctx.kernels = eps, across, sharers, kernels
        if across is None:
            out, scale = kernels.rms_norm(x, weight, eps)
        else:
            wide = x.float()
            scale = _scale(wide, eps, across)
            out = (wide * scale).to(x.dtype) * weight
        ctx.save_for_backward(x, weight, scale if keep_scale else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        count, mine = grad[..., 0].numel(), slice(None)
        if ctx.sharers is not None:
            mine = slice(
                *(count * i // ctx.sharers.size for i in (ctx.sharers.index, ctx.sharers.index + 1))
            )
        if ctx.across is None:
            made = ctx.kernels.norm_backward(grad, x, weight, ctx.eps, scale, mine)
            return *made, None, None, None, None, None
        normed, wide = x.float(), grad.float()
        normed = normed * (_scale(normed, ctx.eps, ctx.across) if scale is None else scale)
        grad_weight = (wide * normed).flatten(0, -2)[mine].sum(0)
        wide = wide * weight.float()
        grad_x = (wide - normed * _mean(wide * normed, ctx.across)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None, None, None


def _scale(wide: torch.Tensor, eps: float, across: Group) -> torch.Tensor:
    return torch.rsqrt(_mean(wide.square(), across) + eps)


def _mean(x: torch.Tensor, across: Group) -> torch.Tensor:
    """Over the last dim, which is kept as 1, and over the ranks that hold its parts."""
    return all_reduce(x.mean(-1, keepdim=True), across).div_(across.size)


class Rotary(torch.autograd.Function):
    """Rotary embedding of x [B,S,H,D], halves paired (i, i + D/2); cos and sin are [S, D/2] or [B,
    S, D/2] fp32.

    The backward is the rotation back, so nothing is kept but the table.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kernels: KernelSet
    ) -> torch.Tensor:
        ctx.angles, ctx.kernels = (cos, sin), kernels
        return kernels.rotate(x_BSHD, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.angles
        return ctx.kernels.rotate(grad, cos, -sin), None, None, None


class CausalAttention(CountedFunction):
    """Causal softmax attention of q [B,S,H,D] over k, v [B,S,G,D] -> [B,S,H,D], inside each run of
    tokens where `runs` are given, of the last `window` tokens each (0: all), beside sinks [H];
    keeps q, k, v, the output and LSE.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        runs: Segments | None,
        window: int,
        books: Counters,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, books)
        ctx.runs, ctx.window = runs, window
        if runs is None:
            out, rest = attention(q, k, v, window=window)
        else:
            out, rest = varlen_attention(q, k, v, runs, window=window)
        out, rest = apply_sinks(out, rest, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, *rest = ctx.saved_tensors
        of_sinks = compute_sinks_grad(grad, out, rest[0], sinks)
        with ctx.books.within(ctx.where):
            if ctx.runs is None:
                found = attention_backward(grad, q, k, v, out, tuple(rest), window=ctx.window)
            else:
                found = varlen_attention_backward(
                    grad, q, k, v, out, tuple(rest), ctx.runs, window=ctx.window
                )
            return *found, of_sinks, None, None, None


def apply_sinks(
    out: torch.Tensor, rest: tuple[torch.Tensor, ...], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attention [B,S,H,D] and its log-sum [B,H,S] (or [1,H,B*S]) when one more logit a head, with a
    value of zero, stands in each softmax. `rest` begins with the log-sum.
    """
    if sinks is None:
        return out, rest
    seen, *random = rest
    both = torch.logaddexp(seen, sinks.float()[:, None])
    share = torch.exp(seen - both).transpose(1, 2).reshape(*out.shape[:-1], 1)
    return (out.float() * share).to(out.dtype), (both, *random)


def compute_sinks_grad(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Of the sinks [H], given the output and log-sum that they are part of: minus their share of
    what each query gets from its output's gradient.
    """
    if sinks is None:
        return None
    share = torch.exp(sinks.float()[:, None] - lse).transpose(1, 2).reshape(out.shape[:-1])
    return -(share * (grad.float() * out.float()).sum(-1)).flatten(0, -2).sum(0).to(sinks.dtype)


class GatherKvHeads(torch.autograd.Function):
    """Keys and values [T,w] of a head cut over some ranks of a group -> of the whole head [T,D],
    for the queries here.

    Where there are more ranks than key heads, neighbours' queries read the same head. Each rank
    projects a part of it, and the parts are gathered, so that weights, their gradients and their
    products are cut like all others (as in Megatron-LM); nothing is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, k_Tw: torch.Tensor, v_Tw: torch.Tensor, group: Group, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = group.size // heads
        first = group.index // parts * parts
        ctx.group, ctx.mine = group, slice(first, first + parts)
        both = all_gather_rows(torch.cat((k_Tw, v_Tw), 1), group).unflatten(0, (group.size, -1))[
            ctx.mine
        ]
        k, v = (x.transpose(0, 1).flatten(1) for x in both.chunk(2, -1))
        return k, v

    @staticmethod
    def backward(
        ctx: Any, *grads_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        parts = ctx.mine.stop - ctx.mine.start
        mine = torch.cat([grad.unflatten(1, (parts, -1)) for grad in grads_TD], -1).transpose(0, 1)
        both = mine.new_zeros((ctx.group.size, *mine.shape[1:]))
        both[ctx.mine] = mine
        k, v = reduce_scatter_rows(both.flatten(0, 1), ctx.group).chunk(2, -1)
        return k, v, None, None


class Permute(torch.autograd.Function):
    """Copy each token to its routed rows: x [T,K] -> [R,K]; the transpose of SumSlots. Keeps
    `rows`.

    Row i holds token tokens[i]; slot j of token t is row rows[t,j], or R where the slot has none,
    which is nowhere so where `full`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        tokens_R: torch.Tensor,
        rows_Tk: torch.Tensor,
        full: bool,
        kernels: KernelSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_Tk)
        ctx.full, ctx.kernels = full, kernels
        return kernels.permute(x_TK, tokens_R)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (rows_Tk,) = ctx.saved_tensors
        return ctx.kernels.sum_slots(grad, rows_Tk, ctx.full), None, None, None, None


class Unpermute(torch.autograd.Function):
    """Sum each token's routed rows: [R,K] -> [T,K]; the transpose of Spread. Keeps `tokens`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RK: torch.Tensor,
        tokens_R: torch.Tensor,
        rows_Tk: torch.Tensor,
        full: bool,
        kernels: KernelSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens_R)
        ctx.kernels = kernels
        return kernels.unpermute(rows_RK, rows_Tk, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (tokens_R,) = ctx.saved_tensors
        return ctx.kernels.spread(grad, tokens_R), None, None, None, None


def count_ids(ids: torch.Tensor, extent: int) -> torch.Tensor:
    """How often each of 0..extent-1 stands in `ids`: [extent] int64, without torch.bincount's wait
    for the device."""
    flat = ids.flatten()
    counts = torch.zeros(extent, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))


class ReorderRows(torch.autograd.Function):
    """x.index_select(0, order) for a permutation; backward selects by its inverse, which is
    kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class SelectRows(torch.autograd.Function):
    """x.index_select(0, places), each place at most once, or its gradient is that of one time; the
    transpose of Place. Keeps `places`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.rows = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        return _spread_out(grad, places, ctx.rows), None


class ScatterRows(torch.autograd.Function):
    """Row i of x to row places[i] of `rows` rows, the others zero; the transpose of Select. Keeps
    `places`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return _spread_out(x, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


def _spread_out(x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_zeros((rows, *x.shape[1:])).index_copy_(0, places, x)
