"""A Mamba-2 mixer (Nemotron-H): a state space whose heads carry a state along the sequence.

One projection gives each group of heads its gates, values, keys, queries and time steps; a short
causal convolution passes over values, keys and queries, the state space over what comes out of it,
and a norm of each group over its gated output. Groups are sharded over TP, as in Megatron-LM; CP
ranks exchange groups for tokens before the convolution and back behind the norm, as there too.

Kept for backward are the projection, the state space's output with a scale for each group, and what
the last projection takes: convolution, steps and states are made again.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B, S, G, R, H, P, W as in
kernels.state_space, groups and heads of this rank; H hidden too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.graph_nodes import ReleasingFunction
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


class Mamba2(RecurrentMixer):
    """The Mamba-2 mixer of a layer: [t,H] -> [t,H]."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        spec = self._spec
        hidden = runtime.model.hidden_size
        rows = spec.value_width + spec.conv_width + spec.heads
        self.zxbcdt = Weight(runtime, rows, hidden, sharding=TP_ROWS)
        self.conv = Weight(runtime, spec.conv_width, spec.short_conv, sharding=TP_ROWS)
        if spec.conv_bias:
            self.conv.bias = Vector(runtime, spec.conv_width, sharding=TP_ROWS)
        self.dt_bias = Vector(runtime, spec.heads, sharding=TP_ROWS)
        self.A_log = Vector(runtime, spec.heads, sharding=TP_ROWS)
        self.D = Vector(runtime, spec.heads, sharding=TP_ROWS)
        self.norm = Weight(runtime, spec.value_width, sharding=TP_ROWS)
        self.o = Weight(runtime, hidden, spec.value_width, sharding=TP_COLUMNS)

    def forward(self, x_tH: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        runtime = self._runtime
        spec = self._spec
        sharing = spec.heads // spec.key_heads
        values = sharing * spec.head_dim
        columns = 2 * values + 2 * spec.key_dim + sharing
        with runtime.counters.scopes.enter(Module.ATTENTION):
            (projected,) = project_in(runtime, x_tH, self.zxbcdt)
            columns_BSGC = projected.view(
                context.sequences, -1, spec.key_heads // runtime.mesh.group("tp").size, columns
            )
            z_BSGV, inputs_BSGW, step_BSGR = scatter_heads(runtime, columns_BSGC, "cp").split(
                (values, values + 2 * spec.key_dim, sharing), -1
            )
            settings = build_scan_settings(runtime, spec, context.segments)
            parts = [self.conv, self.dt_bias, self.A_log, self.D]
            if self.conv.bias is not None:
                parts.append(self.conv.bias)
            weights = [take_own_heads(runtime, part) for part in parts]
            out_BSHP = StateSpace.apply(inputs_BSGW, step_BSGR, settings, *weights)
            rows = GatedGroupNorm.apply(
                out_BSHP.unflatten(2, (-1, sharing)).flatten(3),
                z_BSGV,
                take_own_heads(runtime, self.norm),
                runtime.model.norm_eps,
            )
            rows = gather_heads(runtime, rows, "cp")
            return project_out(runtime, rows.flatten(0, 1).flatten(1), self.o)


class StateSpace(CountedFunction):
    """The state space of projected columns [B,S,G,W] and steps [B,S,G,R] -> [B,S,H,P].

    It keeps both as they lie in the projection. `weights` as in kernels.state_space.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        step: torch.Tensor,
        settings: ScanSettings,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, settings.counters)
        ctx.settings = settings
        ctx.save_for_backward(inputs, step, *weights)
        return settings.scans.state_space.forward(
            inputs, step.flatten(2), list(weights), settings.key_dim, settings.segments
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, step, *weights = ctx.saved_tensors
        settings: ScanSettings = ctx.settings
        with ctx.counters.scopes.enter(ctx.scope):
            grad_inputs, grad_step, grad_weights = settings.scans.state_space.backward(
                grad, inputs, step.flatten(2), weights, settings.key_dim, settings.segments
            )
        return grad_inputs, grad_step.view(step.shape), None, *grad_weights


class GatedGroupNorm(ReleasingFunction):
    """y = RMSNorm(x silu(gate)) of each group of [B,S,G,V], in fp32, times weight [G*V].

    Keeps x, the gate and a scale a group.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        gated = F.silu(gate.float()).mul_(x)
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gate, weight, scale)
        return gated.mul_(scale).to(x.dtype) * weight.view(x.shape[2:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scale = ctx.saved_tensors
        wide_gate = gate.float()
        active = F.silu(wide_gate)
        normed = active * x * scale
        grad_weight = (grad * normed).sum((0, 1)).flatten()
        grad_normed = grad * weight.view(x.shape[2:]).float()
        # The norm's scale depends on all of a group: each element loses its share of their product.
        mean = (grad_normed * normed).mean(-1, keepdim=True)
        # In place from here on: nothing overwritten is read again.
        grad_gated = grad_normed.sub_(normed.mul_(mean)).mul_(scale)
        grad_gate = torch.ops.aten.silu_backward(grad_gated * x, wide_gate)
        grad_x = active.mul_(grad_gated)
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None
