"""The transformer layer: what mixes tokens, then an MLP or a MoE layer, or one of both alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moewright.engine.memory.saved_tensors import RoutingDecisions
from moewright.engine.model.attention import Attention, MicroBatchContext
from moewright.engine.model.compressed_attention import CompressedAttention
from moewright.engine.model.delta_net import GatedDeltaNet
from moewright.engine.model.layers import HiddenNorm, Mlp
from moewright.engine.model.mamba import Mamba2
from moewright.engine.model.mla import LatentAttention
from moewright.engine.model.moe import MoeLayer
from moewright.engine.model.residual_streams import StreamMix
from moewright.engine.model.router import ExpertChoice
from moewright.engine.runtime import Runtime
from moewright.spec.layout import CudaGraphScope, Offload, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, MixerKind, RecurrentKind


class TransformerLayer(nn.Module):
    """A mixer and an MLP or MoE, each normed before, after or around it, added to the stream [t,H].

    A layer of Nemotron-H has one of them alone. One of DeepSeek-V4 has parallel streams [t,NH].
    """

    def __init__(self, runtime: Runtime, layer_number: int) -> None:
        super().__init__()
        model = runtime.model
        is_grouped = model.attention.kind is AttentionKind.GQA
        has_streams = model.residual_streams > 1
        placement = model.norm_placement
        self._is_normed_after = placement.is_after
        self._runtime = runtime
        self._number = layer_number
        self._residual_factor = model.multipliers.residual
        self._recomputes_norms = placement.is_before and runtime.recomputes(Recompute.LAYERNORM)
        # The stacks that the rules are compared with fuse this norm into the QKV projection of GQA.
        self._recomputes_input_norm = not is_grouped and self._recomputes_norms
        self._has_mixer = model.mixer(layer_number) is not MixerKind.NONE
        if self._has_mixer:
            self.attention_streams = StreamMix(runtime) if has_streams else None
            self.input_norm = _build_norm(
                runtime, is_there=placement.is_before, recompute=self._recomputes_input_norm
            )
            self.attention = _build_mixer(runtime, layer_number)
            if placement.is_after:
                self.attention_norm = HiddenNorm(runtime)
            is_recurrent = model.mixer(layer_number) is MixerKind.RECURRENT
            self._mixer_part = runtime.part_graphs.add_part(
                CudaGraphScope.MAMBA if is_recurrent else CudaGraphScope.ATTN,
                self.input_norm,
                self.attention,
            )
        self._has_mlp = model.has_mlp(layer_number)
        if not self._has_mlp:
            return
        self.mlp_streams = StreamMix(runtime) if has_streams else None
        self.post_norm = _build_norm(
            runtime, is_there=placement.is_before, recompute=self._recomputes_norms
        )
        # MTP depths are like the last layer.
        self._is_moe = model.has_experts(layer_number)
        if self._is_moe:
            self.moe = MoeLayer(runtime, layer_number)
            self._router_part = runtime.part_graphs.add_part(
                CudaGraphScope.MOE_ROUTER, self.post_norm, self.moe.router
            )
        else:
            self.mlp = Mlp(runtime, model.dense_ffn_size, Module.DENSE_MLP)
        if placement.is_after:
            self.mlp_norm = HiddenNorm(runtime)

    def forward(
        self, decisions: RoutingDecisions | None, context: MicroBatchContext, x_tH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the new hidden state; after a MoE layer, its auxiliary losses and counts too.

        `decisions` belong to the checkpointed block around this layer; None where there is none.
        """
        with self._runtime.counters.scopes.in_layer(self._number):
            if self._has_mixer:
                (x_tH,) = self._mixer_part.run(partial(self._mix, context), x_tH)
            if not self._has_mlp:
                return (x_tH,)
            if self._is_moe and self._router_part.is_captured:
                return self._run_captured_moe(context, x_tH)
            return self._run_mlp(decisions, context, x_tH)

    def _mix(self, context: MicroBatchContext, residual: torch.Tensor) -> tuple[torch.Tensor]:
        runtime = self._runtime
        manager = runtime.saved_tensors
        with manager.offload(residual, enabled=runtime.offloads(Offload.ATTN_NORM)):
            x_tH, weights = _enter_block(self.attention_streams, residual)
            with runtime.counters.scopes.enter(Module.NORM):
                normed = self.input_norm(x_tH)
            with manager.discard_and_recompute(
                normed, self.input_norm, x_tH, enabled=self._recomputes_input_norm
            ):
                attended = self.attention(normed, context)
                if self._is_normed_after:
                    with runtime.counters.scopes.enter(Module.NORM):
                        attended = self.attention_norm(attended)
            return (self._leave_block(self.attention_streams, residual, attended, weights),)

    def _run_mlp(
        self, decisions: RoutingDecisions | None, context: MicroBatchContext, residual: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        runtime = self._runtime
        manager = runtime.saved_tensors
        with manager.offload(residual, enabled=runtime.offloads(Offload.MLP_NORM)):
            x_tH, weights = _enter_block(self.mlp_streams, residual)
            with runtime.counters.scopes.enter(Module.NORM):
                normed = self.post_norm(x_tH)
            with manager.discard_and_recompute(
                normed, self.post_norm, x_tH, enabled=self._recomputes_norms
            ):
                if not self._is_moe:
                    out = self._norm_output(self.mlp(normed))
                    return (self._leave_block(self.mlp_streams, residual, out, weights),)
                out, aux_losses, sent_counts = self.moe(normed, decisions, context)
                out = self._norm_output(out)
                after = self._leave_block(self.mlp_streams, residual, out, weights)
                return after, aux_losses, sent_counts

    def _norm_output(self, out_tH: torch.Tensor) -> torch.Tensor:
        """Return the output of an MLP or of experts as it joins the residual stream."""
        if not self._is_normed_after:
            return out_tH
        with self._runtime.counters.scopes.enter(Module.NORM):
            normed: torch.Tensor = self.mlp_norm(out_tH)
        return normed

    def _run_captured_moe(
        self, context: MicroBatchContext, residual: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the MoE block of which norm and router are a part that is captured."""
        normed, aux_losses, weights, experts, counts, *mapped = self._router_part.run(
            partial(self._norm_and_route, context), residual
        )
        # A captured part returns tensors alone.
        choice = ExpertChoice(experts=experts, weights=weights, counts=counts)
        out, sent_counts = self.moe.run_experts(normed, choice, tuple(mapped))
        # Parallel streams are never captured.
        return self._leave_block(None, residual, out, None), aux_losses, sent_counts

    def _norm_and_route(
        self, context: MicroBatchContext, x_tH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with self._runtime.counters.scopes.enter(Module.NORM):
            normed = self.post_norm(x_tH)
        # No checkpointed block is around it: graphs of parts exclude full recompute.
        choice, aux_losses = self.moe.route(None, context, normed)
        mapped: tuple[torch.Tensor, ...] = ()
        if CudaGraphScope.MOE_PREPROCESS in self._runtime.mesh.layout.graphs:
            mapped = self.moe.map_rows(choice)
        return normed, aux_losses, choice.weights, choice.experts, choice.counts, *mapped

    def _leave_block(
        self,
        streams: StreamMix | None,
        residual: torch.Tensor,
        out_tH: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the residual stream, or streams, after a block with this output."""
        if streams is None or weights is None:
            return torch.add(residual, out_tH, alpha=self._residual_factor)
        return streams.expand(residual, out_tH, weights)


def _enter_block(
    streams: StreamMix | None, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the input [t,H] of a block, and the weights with which parallel streams go on."""
    if streams is None:
        return (residual, None)
    return streams.collapse(residual)


def _build_norm(runtime: Runtime, *, is_there: bool, recompute: bool) -> nn.Module:
    """Build the norm before a block; without one, the block takes the stream as it is."""
    if is_there:
        return HiddenNorm(runtime, recompute=recompute)
    return nn.Identity()


def _build_mixer(runtime: Runtime, layer_number: int) -> nn.Module:
    """Build what mixes the tokens of a layer."""
    recurrent = runtime.model.recurrent
    if recurrent is not None and runtime.model.mixer(layer_number) is MixerKind.RECURRENT:
        if recurrent.kind is RecurrentKind.MAMBA2:
            return Mamba2(runtime)
        return GatedDeltaNet(runtime)
    if runtime.model.attention.kind is AttentionKind.COMPRESSED:
        return CompressedAttention(runtime, layer_number)
    if runtime.model.attention.kind is AttentionKind.MLA:
        return LatentAttention(runtime, layer_number)
    return Attention(runtime, layer_number)
