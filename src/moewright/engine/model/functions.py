"""Differentiable operations that keep for backward exactly what the memory model says.

Each is an own autograd Function so that the saved tensors are the same on every device, and so that the FLOPs of
backward are booked to the module whose forward made them.

Shapes: T tokens, K in, N out, R routed rows, E local experts, F expert width, V vocabulary, B batch, S sequence,
H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from moewright.engine.books import Books
from moewright.engine.kernels import attention, attention_backward, grouped_matmul, matmul

_LOSS_ROWS = 512  # rows of logits widened to fp32 at a time


class _Booked(torch.autograd.Function):
    """Remembers the module of the forward; `backward` of a subclass runs inside it."""

    @staticmethod
    def remember(ctx: Any, books: Books) -> None:
        ctx.books, ctx.module = books, books.module


class Linear(_Booked):
    """y [T,N] = x [T,K] w^T, w [N,K]; keeps x."""

    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, w_NK: torch.Tensor, books: Books) -> torch.Tensor:
        _Booked.remember(ctx, books)
        ctx.save_for_backward(x_TK, w_NK)
        return matmul(x_TK, w_NK.T)

    @staticmethod
    def backward(ctx: Any, g_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_TK, w_NK = ctx.saved_tensors
        with ctx.books.within(ctx.module):
            return matmul(g_TN, w_NK), matmul(g_TN.T, x_TK), None


class RouterLinear(_Booked):
    """Router logits [T,E] in fp32 from activations and weights of the compute dtype; keeps x as it came."""

    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, w_EK: torch.Tensor, books: Books) -> torch.Tensor:
        _Booked.remember(ctx, books)
        ctx.save_for_backward(x_TK, w_EK)
        return torch.mm(x_TK.float(), w_EK.float().T)

    @staticmethod
    def backward(ctx: Any, g_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_TK, w_EK = ctx.saved_tensors
        with ctx.books.within(ctx.module):
            grad_x, grad_w = torch.mm(g_TE, w_EK.float()), torch.mm(g_TE.T, x_TK.float())
        return grad_x.to(x_TK.dtype), grad_w.to(w_EK.dtype), None


class GroupedLinear(_Booked):
    """y [R,N]: rows of expert e times w[e]^T, w [E,N,K]; `ends` [E] int32 running ends of the groups; keeps x."""

    @staticmethod
    def forward(ctx: Any, x_RK: torch.Tensor, w_ENK: torch.Tensor, ends_E: torch.Tensor, books: Books) -> torch.Tensor:
        _Booked.remember(ctx, books)
        ctx.save_for_backward(x_RK, w_ENK, ends_E)
        return grouped_matmul(x_RK, w_ENK.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, g_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x_RK, w_ENK, ends_E = ctx.saved_tensors
        g_RN = g_RN.contiguous()
        with ctx.books.within(ctx.module):
            return grouped_matmul(g_RN, w_ENK, ends_E), grouped_matmul(g_RN.T, x_RK, ends_E), None, None


class RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dim, in fp32; keeps x and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide.mul_(scale) if wide is not x else wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        wide = grad.float()
        grad_weight = (wide * normed).flatten(0, -2).sum(0)
        wide = wide * weight.float()
        grad_x = (wide - normed * (wide * normed).mean(-1, keepdim=True)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class Rotary(torch.autograd.Function):
    """Rotary embedding of x [B,S,H,D], halves paired (i, i + D/2); `angles` is (cos, sin), each [S, D/2] fp32.

    The backward is the rotation back, so nothing is kept but the table.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.angles = (cos, sin)
        return _rotate(x_BSHD, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.angles
        return _rotate(grad, cos, -sin), None, None


def _rotate(x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x_BSHD.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BSHD.dtype)


class CausalAttention(_Booked):
    """Causal softmax attention of q [B,S,H,D] over k, v [B,S,G,D] -> [B,S,H,D]; keeps q, k, v, the output and LSE."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, books: Books) -> torch.Tensor:
        _Booked.remember(ctx, books)
        out, rest = attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, out, *rest = ctx.saved_tensors
        with ctx.books.within(ctx.module):
            return (*attention_backward(grad, q, k, v, out, tuple(rest)), None)


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up * weight for x [R,2F] = (gate, up); `weight` [R] fp32 or None; keeps x and weight.

    Weighting here, before the second linear, spares keeping the experts' outputs (docs/formulas.md 7).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        gate, up = x.float().chunk(2, -1)
        out = torch.nn.functional.silu(gate).mul_(up)
        if weight is not None:
            out.mul_(weight[:, None])
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        gate, up = x.float().chunk(2, -1)
        wide = grad.float()
        sigmoid = torch.sigmoid(gate)
        act = gate * sigmoid
        grad_weight = None
        if weight is not None:
            grad_weight = (wide * act).mul_(up).sum(-1)
            wide = wide * weight[:, None]
        slope = sigmoid.add_(act * (1 - sigmoid))
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        grad_gate.copy_(slope.mul_(up).mul_(wide))
        grad_up.copy_(act.mul_(wide))
        return grad_x, grad_weight


class Spread(torch.autograd.Function):
    """Copy each token to its routed rows: x [T,K] -> [T*k,K]; the transpose of Gather. Keeps `inverse`.

    Row i holds token order[i] // top_k; `inverse` is the inverse permutation of `order`.
    """

    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return _spread(x_TK, order, top_k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse, ctx.top_k), None, None, None


class Gather(torch.autograd.Function):
    """Sum each token's routed rows: [T*k,K] -> [T,K]; the transpose of Spread. Keeps `order`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _gather(rows, inverse, top_k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return _spread(grad, order, ctx.top_k), None, None, None


def _spread(x_TK: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    return x_TK.index_select(0, order // top_k)


def _gather(rows: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
    # A sum over a token's own k rows in their fixed order: deterministic, unlike a scatter-add.
    return rows.index_select(0, inverse).unflatten(0, (-1, top_k)).sum(1)


class Reorder(torch.autograd.Function):
    """x.index_select(0, order) for a permutation; backward selects by its inverse, which is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Embed(torch.autograd.Function):
    """Rows of w [V,K] by token id; the gradient is summed in fp32, since frequent tokens sum thousands of rows."""

    @staticmethod
    def forward(ctx: Any, ids_T: torch.Tensor, w_VK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids_T)
        ctx.like = (w_VK.shape, w_VK.dtype)
        return w_VK.index_select(0, ids_T)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids_T,) = ctx.saved_tensors
        shape, dtype = ctx.like
        summed = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        return None, summed.index_add_(0, ids_T, grad.float()).to(dtype)


class CrossEntropy(torch.autograd.Function):
    """Negative log-likelihood [T] fp32 of targets [T] under logits [T,V]; 0 where the target is negative. Keeps logits.

    Softmax is taken in fp32 over a few rows at a time, so no fp32 copy of all logits ever exists.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits_TV, targets_T)
        parts = []
        for rows, targets in zip(logits_TV.split(_LOSS_ROWS), targets_T.split(_LOSS_ROWS), strict=True):
            log_probs = torch.log_softmax(rows.float(), -1)
            parts.append(-log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0])
        return torch.cat(parts).masked_fill_(targets_T < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_TV, targets_T = ctx.saved_tensors
        grad_T = grad_T.masked_fill(targets_T < 0, 0.0)
        out = torch.empty_like(logits_TV)
        pieces = (x.split(_LOSS_ROWS) for x in (logits_TV, targets_T, grad_T, out))
        for rows, targets, grad, part in zip(*pieces, strict=True):
            probs = torch.softmax(rows.float(), -1)
            probs.scatter_add_(1, targets.clamp(min=0)[:, None], probs.new_full((len(targets), 1), -1.0))
            part.copy_(probs.mul_(grad[:, None]))
        return out, None
