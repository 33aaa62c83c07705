"""A gated delta net (Qwen3-Next): linear attention whose heads carry a state along the sequence.

Projections give each key head its query, its key, and values and gates of the value heads that
share it; a short causal convolution passes over the first three, the delta rule over what comes
out of it, and a norm of each head, gated, over its output. Heads are sharded over TP; CP ranks
exchange key heads for tokens before the convolution and back behind the norm.

Kept for backward are the projections, the convolution's output, decay and beta of each head, the
scan's output with the scale of its norm, and what the last projection takes: the scan's states and
the matrices of its chunks are made again.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B, S, G, W, H, D, V as in
kernels.delta_rule, heads of this rank; H hidden too.
"""

from __future__ import annotations

from typing import Any

import torch

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.model.attention import MicroBatchContext
from moewright.engine.model.autograd import CountedFunction
from moewright.engine.model.context_parallel import gather_heads, scatter_heads
from moewright.engine.model.layers import Vector, Weight, project_out
from moewright.engine.model.recurrent_mixer import (
    RecurrentMixer,
    ScanSettings,
    build_scan_settings,
    project_in,
    take_own_heads,
)
from moewright.engine.runtime import Runtime
from moewright.rules.shapes.param import TP_COLUMNS, TP_ROWS
from moewright.spec.ledger import Module


class GatedDeltaNet(RecurrentMixer):
    """The gated delta net of a layer: [t,H] -> [t,H]."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        spec = self._spec
        hidden = runtime.model.hidden_size
        rows = 2 * (spec.key_width + spec.value_width)
        self.qkvz = Weight(runtime, rows, hidden, sharding=TP_ROWS)
        self.rates = Weight(runtime, 2 * spec.heads, hidden, sharding=TP_ROWS)
        self.conv = Weight(runtime, spec.conv_width, spec.short_conv, sharding=TP_ROWS)
        self.dt_bias = Vector(runtime, spec.heads, sharding=TP_ROWS)
        self.A_log = Vector(runtime, spec.heads, sharding=TP_ROWS)
        self.norm = Weight(runtime, spec.head_dim)
        self.o = Weight(runtime, hidden, spec.value_width, sharding=TP_COLUMNS)

    def forward(self, x_tH: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        runtime = self._runtime
        spec = self._spec
        sharing = spec.heads // spec.key_heads
        with runtime.counters.scopes.enter(Module.ATTENTION):
            qkvz, rates = project_in(runtime, x_tH, self.qkvz, self.rates)
            widths = (2 * spec.key_dim + sharing * spec.head_dim, sharing * spec.head_dim)
            shape = (context.sequences, -1, spec.key_heads // runtime.mesh.group("tp").size)
            qkvz_BSGC = scatter_heads(runtime, qkvz.view(*shape, sum(widths)), "cp")
            rates_BSGR = scatter_heads(runtime, rates.view(*shape, 2 * sharing), "cp")
            qkv_BSGW, z = qkvz_BSGC.split(widths, -1)
            settings = build_scan_settings(runtime, spec, context.segments)
            mixed_BSGW = CausalConv.apply(qkv_BSGW, take_own_heads(runtime, self.conv), settings)
            beta, step = rates_BSGR.unflatten(-1, (2, sharing)).unbind(-2)
            decay_BSH, beta_BSH = DecayRates.apply(
                step.flatten(2),
                beta.flatten(2),
                take_own_heads(runtime, self.A_log),
                take_own_heads(runtime, self.dt_bias),
            )
            out_BSHV = DeltaRule.apply(mixed_BSGW, decay_BSH, beta_BSH, settings)
            rows = GatedNorm.apply(
                out_BSHV.unflatten(2, (-1, sharing)),
                z.unflatten(-1, (sharing, -1)),
                self.norm.weight,
                runtime.model.norm_eps,
                runtime.kernels,
            )
            rows = gather_heads(runtime, rows.flatten(3), "cp")
            return project_out(runtime, rows.flatten(0, 1).flatten(1), self.o)


class CausalConv(CountedFunction):
    """silu of the causal depthwise convolution of x [B,S,G,W] by weight [G*W,K]; keeps x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: ScanSettings
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, settings.counters)
        ctx.settings = settings
        ctx.save_for_backward(x, weight)
        return settings.scans.causal_conv.forward(x, weight, settings.segments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        settings: ScanSettings = ctx.settings
        with ctx.counters.scopes.enter(ctx.scope):
            grads = settings.scans.causal_conv.backward(grad, x, weight, settings.segments)
        return *grads, None


class DecayRates(ReleasingFunction):
    """decay = -exp(A_log) softplus(step + dt_bias) and beta = sigmoid(beta), [B,S,H] fp32.

    Keeps both results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        step: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rate = torch.nn.functional.softplus(step.float() + dt_bias.float())
        decay = rate.mul_(A_log.float().exp()).neg_()
        share = torch.sigmoid(beta.float())
        ctx.dtypes = step.dtype, dt_bias.dtype
        ctx.save_for_backward(decay, share, A_log)
        return decay, share

    @staticmethod
    def backward(
        ctx: Any, grad_decay: torch.Tensor, grad_share: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        decay, share, A_log = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        scale = A_log.float().exp()
        # The slope of a softplus is 1 - exp(-softplus), and decay is -exp(A_log) softplus.
        grad_step = torch.expm1(decay / scale).mul_(scale).mul_(grad_decay)
        grad_beta = (1 - share).mul_(share).mul_(grad_share)
        grad_A = (decay * grad_decay).sum((0, 1))
        return (
            grad_step.to(dtype),
            grad_beta.to(dtype),
            grad_A.to(weight_dtype),
            grad_step.sum((0, 1)).to(weight_dtype),
        )


class DeltaRule(CountedFunction):
    """The gated delta rule of mixed [B,S,G,W] -> [B,S,H,V]; keeps mixed, decay and beta."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        settings: ScanSettings,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, settings.counters)
        ctx.settings = settings
        ctx.save_for_backward(mixed, decay, beta)
        return settings.scans.delta_rule.forward(
            mixed, decay, beta, settings.key_dim, settings.segments
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        settings: ScanSettings = ctx.settings
        mixed, decay, beta = ctx.saved_tensors
        with ctx.counters.scopes.enter(ctx.scope):
            grads = settings.scans.delta_rule.backward(
                grad, mixed, decay, beta, settings.key_dim, settings.segments
            )
        return *grads, None


class GatedNorm(ReleasingFunction):
    """y = RMSNorm(x) silu(gate) over the last dim, in fp32; keeps x, the gate and a scale a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        kernels: KernelSet,
    ) -> torch.Tensor:
        normed, scale = kernels.rms_norm(x, weight, eps)
        ctx.eps = eps
        ctx.kernels = kernels
        ctx.save_for_backward(x, gate, weight, scale)
        return torch.nn.functional.silu(gate.float()).mul_(normed).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scale = ctx.saved_tensors
        wide_gate = gate.float()
        # As the kernel rounds it: before the weight.
        normed = (x.float() * scale).to(x.dtype) * weight
        grad_gate = torch.ops.aten.silu_backward(normed.float() * grad, wide_gate)
        grad_normed = torch.nn.functional.silu(wide_gate).mul_(grad).to(x.dtype)
        grad_x, grad_weight = ctx.kernels.rms_norm_backward(
            grad_normed, x, weight, ctx.eps, scale, slice(None)
        )
        return grad_x, grad_gate.to(gate.dtype), grad_weight, None, None
