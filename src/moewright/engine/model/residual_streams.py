"""Parallel residual streams: hyper-connections on the manifold of doubly stochastic matrices.

Xie et al., arXiv 2512.24880, as transformers' deepseek_v4 computes them. Before a block its input
is a weighted sum of the streams; after it, every stream is a mix of all streams and a multiple of
the block's output. The weights come from the streams themselves, through a norm, a projection and
a few iterations of Sinkhorn and Knopp, in fp32.

Shapes: t tokens of this rank between blocks, N streams of width H, side by side in x [t, N H];
M = N (N + 2) weights a token: N to collapse, N to expand, N x N to mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.matmul import matmul
from moewright.engine.model.autograd import CountedFunction, split_rows
from moewright.engine.model.layers import Vector, Weight, hidden_replica_group
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import Module


@dataclass(frozen=True, kw_only=True, slots=True)
class _StreamSettings:
    """What defines the weights of streams besides parameters.

    The ranks of `replica_group` all have the same x; each computes the gradients of parameters from
    its part of the rows. `collapses_only`: there are weights to collapse alone.
    """

    streams: int
    iterations: int
    eps: float
    norm_eps: float
    collapses_only: bool
    counters: Counters
    replica_group: Group | None


class StreamMix(Weight):
    """The weights with which a block reads the streams, and with which they go on.

    `collapses_only`: those of the model's end, where the streams become one.
    """

    def __init__(self, runtime: Runtime, *, collapses_only: bool = False) -> None:
        model = runtime.model
        self.ledger_module = Module.HEAD if collapses_only else Module.NORM
        streams = model.residual_streams
        outputs = streams if collapses_only else (2 + streams) * streams
        super().__init__(runtime, outputs, streams * model.hidden_size)
        self.bias = Vector(runtime, outputs)
        self.scale = Vector(runtime, 1 if collapses_only else 3)
        self._scopes = runtime.counters.scopes
        self._settings = _StreamSettings(
            streams=streams,
            iterations=model.stream_iterations,
            eps=model.stream_eps,
            norm_eps=model.norm_eps,
            collapses_only=collapses_only,
            counters=runtime.counters,
            replica_group=hidden_replica_group(runtime),
        )

    def collapse(self, x_tNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of a block [t,H], and the weights [t,M] fp32 for `expand`."""
        assert self.bias is not None  # made above
        with self._scopes.enter(self.ledger_module):
            weights_tM = _ComputeWeights.apply(
                x_tNH, self.weight, self.bias.weight, self.scale.weight, self._settings
            )
            return _Collapse.apply(x_tNH, weights_tM, self._settings.streams), weights_tM

    def expand(
        self, x_tNH: torch.Tensor, out_tH: torch.Tensor, weights_tM: torch.Tensor
    ) -> torch.Tensor:
        """Return the streams after a block with this output."""
        with self._scopes.enter(self.ledger_module):
            return _Expand.apply(x_tNH, out_tH, weights_tM, self._settings.streams)


class _ComputeWeights(CountedFunction):
    """The weights [t,M] fp32 of x [t,NH]: projected, scaled and shifted, bounded and balanced.

    Keeps x, what is projected [t,M] and one number a row, fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_tK: torch.Tensor,
        weight_MK: torch.Tensor,
        bias_M: torch.Tensor,
        scale: torch.Tensor,
        settings: _StreamSettings,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, settings.counters)
        ctx.settings = settings
        wide = x_tK.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + settings.norm_eps)
        projected_tM = matmul(wide * rstd, weight_MK.float().T)
        ctx.save_for_backward(x_tK, projected_tM, rstd, weight_MK, bias_M, scale)
        return _bound(projected_tM, bias_M, scale, settings)

    @staticmethod
    def backward(ctx: Any, grad_tM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_tK, projected_tM, rstd, weight_MK, bias_M, scale = ctx.saved_tensors
        settings: _StreamSettings = ctx.settings
        group = settings.replica_group
        rows = slice(None) if group is None else split_rows(len(x_tK), group)
        with torch.enable_grad():
            projected, *shifts = (
                x.detach().requires_grad_() for x in (projected_tM, bias_M, scale)
            )
            bounded = _bound(projected, shifts[0], shifts[1], settings)
        # The graph stays for the parameters, whose gradient is of other rows.
        (g_tM,) = torch.autograd.grad(bounded, projected, grad_tM, retain_graph=True)
        normed = x_tK.float() * rstd
        with ctx.counters.scopes.enter(ctx.scope):
            grad_normed = matmul(g_tM, weight_MK.float())
        mean = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = (grad_normed - normed * mean).mul_(rstd).to(x_tK.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None, None
        # Of parameters, the gradient is that of this rank's rows.
        own_grad = torch.zeros_like(grad_tM)
        own_grad[rows] = grad_tM[rows]
        grad_bias, grad_scale = torch.autograd.grad(bounded, shifts, own_grad)
        own = torch.zeros_like(g_tM)
        own[rows] = g_tM[rows]
        with ctx.counters.scopes.enter(ctx.scope):
            grad_weight = matmul(own.T, normed)
        return grad_x, grad_weight.to(weight_MK.dtype), grad_bias, grad_scale, None


def _bound(
    projected_tM: torch.Tensor,
    bias_M: torch.Tensor,
    scale: torch.Tensor,
    settings: _StreamSettings,
) -> torch.Tensor:
    """Return the weights of streams, from what is projected [t,M] fp32."""
    streams, eps = settings.streams, settings.eps
    bias_M, scale = bias_M.float(), scale.float()
    if settings.collapses_only:
        return torch.sigmoid(projected_tM * scale + bias_M) + eps
    sizes = (streams, streams, streams**2)
    parts = zip(projected_tM.split(sizes, -1), scale, bias_M.split(sizes), strict=True)
    collapse, expand, mix = (part * factor + shift for part, factor, shift in parts)
    # The softmax is the first scaling of rows, so that columns come next.
    matrix = mix.unflatten(-1, (streams, streams)).softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(settings.iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    # Twice the sigmoid: at 0 the block's output is added as it is.
    weights = (torch.sigmoid(collapse) + eps, 2 * torch.sigmoid(expand), matrix.flatten(-2))
    return torch.cat(weights, -1)


class _Collapse(ReleasingFunction):
    """The weighted sum [t,H] of streams x [t,NH]; keeps x and the weights."""

    @staticmethod
    def forward(
        ctx: Any, x_tNH: torch.Tensor, weights_tM: torch.Tensor, streams: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x_tNH, weights_tM)
        ctx.streams = streams
        factors = weights_tM[:, :streams, None]
        return (factors * x_tNH.unflatten(1, (streams, -1))).sum(1).to(x_tNH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_tH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_tNH, weights_tM = ctx.saved_tensors
        streams = ctx.streams
        wide = grad_tH[:, None].float()
        grad_x = (weights_tM[:, :streams, None] * wide).flatten(1).to(x_tNH.dtype)
        grad_weights = torch.zeros_like(weights_tM)
        grad_weights[:, :streams] = (wide * x_tNH.unflatten(1, (streams, -1))).sum(-1)
        return grad_x, grad_weights, None


class _Expand(ReleasingFunction):
    """Stream n of the result is expand_n out + sum over m of mix_mn stream m; keeps all three."""

    @staticmethod
    def forward(
        ctx: Any,
        x_tNH: torch.Tensor,
        out_tH: torch.Tensor,
        weights_tM: torch.Tensor,
        streams: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_tNH, out_tH, weights_tM)
        ctx.streams = streams
        _, expand, mix = _split_weights(weights_tM, streams)
        result = expand[:, :, None] * out_tH[:, None]
        _add_mixed(result, mix.mT, x_tNH.unflatten(1, (streams, -1)))
        return result.flatten(1).to(x_tNH.dtype)

    @staticmethod
    def backward(
        ctx: Any, grad_tNH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x_tNH, out_tH, weights_tM = ctx.saved_tensors
        streams = ctx.streams
        _, expand, mix = _split_weights(weights_tM, streams)
        grad = grad_tNH.unflatten(1, (streams, -1)).float()
        x = x_tNH.unflatten(1, (streams, -1))
        grad_x = torch.zeros_like(grad)
        _add_mixed(grad_x, mix, grad)
        grad_out = (expand[:, :, None] * grad).sum(1)
        grad_weights = torch.zeros_like(weights_tM)
        _, grad_expand, grad_mix = _split_weights(grad_weights, streams)
        grad_expand.copy_((grad * out_tH[:, None]).sum(-1))
        for stream in range(streams):
            grad_mix[:, :, stream] = (x * grad[:, stream, None]).sum(-1)
        return grad_x.flatten(1).to(x_tNH.dtype), grad_out.to(out_tH.dtype), grad_weights, None


def _split_weights(weights_tM: torch.Tensor, streams: int) -> tuple[torch.Tensor, ...]:
    """Return the weights [t,N] to collapse and to expand, and those [t,N,N] to mix, as views."""
    collapse, expand, mix = weights_tM.split((streams, streams, streams**2), -1)
    return collapse, expand, mix.unflatten(-1, (streams, streams))


def _add_mixed(sum_tNH: torch.Tensor, mix_tNN: torch.Tensor, x_tNH: torch.Tensor) -> None:
    """Add mix x to a sum, for a few streams elementwise: products this small are bound by memory.

    They are none of the model's FLOPs (docs/formulas.md 13).
    """
    for stream in range(x_tNH.shape[1]):
        sum_tNH += mix_tNN[:, :, stream, None] * x_tNH[:, stream, None]
