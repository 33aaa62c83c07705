"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depths come after the last layer; each of them predicts one token further ahead. Embedding and head
are those of the model.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B sequences; H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from moewright.engine.comm.autograd_collectives import all_to_all
from moewright.engine.comm.collectives import Group, all_gather_rows
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.memory.saved_tensors import RoutingDecisions, run_checkpointed
from moewright.engine.model.attention import MicroBatchContext
from moewright.engine.model.layer import TransformerLayer
from moewright.engine.model.layers import HiddenNorm, Weight, project_replicated
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.model.residual_streams import StreamMix
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import Module


class _GatherColumns(ReleasingFunction):
    """Each rank's columns [T,h] -> all of them [T,H], the same on every rank.

    The gradient of the output is the same on every rank too.
    """

    @staticmethod
    def forward(ctx: Any, columns_Th: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        gathered = all_gather_rows(columns_Th, group).unflatten(0, (group.size, -1))
        # A gather stacks the ranks, whose columns are of the same rows.
        return gathered.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_TH.chunk(ctx.group.size, 1)[ctx.group.index].contiguous(), None


class MtpDepth(nn.Module):
    """One MTP depth: an embedding and a hidden state -> a hidden state, all [t,H].

    The embedding is that of the token ahead, the hidden state that of the depth before. After a MoE
    layer it also returns the auxiliary losses and the expert counts. Hidden states may be of
    parallel streams [t,NH], which `final_streams` makes one of.
    """

    ledger_module = Module.MTP

    def __init__(self, runtime: Runtime, layer: TransformerLayer) -> None:
        super().__init__()
        hidden = runtime.model.hidden_size
        self._runtime = runtime
        self.embed_norm = HiddenNorm(runtime)
        self.hidden_norm = HiddenNorm(runtime)
        joins_inputs = runtime.model.joins_mtp_inputs
        if joins_inputs:
            self.proj = Weight(runtime, hidden, 2 * hidden, sharding=(("tp", 0),))
        else:
            self.embed_proj = Weight(runtime, hidden, hidden)
            self.hidden_proj = Weight(runtime, hidden, hidden)
        self.layer = layer
        self.final_norm = HiddenNorm(runtime)
        self.final_streams = None if joins_inputs else StreamMix(runtime, collapses_only=True)

    def forward(
        self,
        embedded_tH: torch.Tensor,
        hidden_tH: torch.Tensor,
        context: MicroBatchContext,
        recomputes: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Run the depth, under full recompute (`recomputes`) as a checkpoint of its own."""
        counters = self._runtime.counters
        with counters.scopes.enter(Module.MTP):
            if not recomputes:
                return self._block(None, context, embedded_tH, hidden_tH)
            # Decisions of its own: a recomputation routes as forward has.
            block = partial(self._block, RoutingDecisions(), context)
            out: tuple[torch.Tensor, ...] = run_checkpointed(
                counters, block, embedded_tH, hidden_tH
            )
            return out

    def _block(
        self,
        decisions: RoutingDecisions | None,
        context: MicroBatchContext,
        embedded_tH: torch.Tensor,
        hidden_tH: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        if self.final_streams is None:
            joined = torch.cat((self.embed_norm(embedded_tH), self.hidden_norm(hidden_tH)), -1)
            x_tH = self._project(joined)
        else:
            x_tH = self._join_streams(embedded_tH, hidden_tH)
        out: tuple[torch.Tensor, ...] = self.layer(decisions, context, x_tH)
        return out

    def _join_streams(self, embedded_tH: torch.Tensor, hidden_tNH: torch.Tensor) -> torch.Tensor:
        """Add the projected embedding to every projected stream [t,NH], each normed by itself.

        DeepSeek-V4's inference/model.py (MTPBlock); its weights are whole on every TP rank, so that
        ranks exchange no streams.
        """
        runtime = self._runtime
        streams_rH = hidden_tNH.view(-1, embedded_tH.shape[1])
        e_tH = project_replicated(runtime, self.embed_norm(embedded_tH), self.embed_proj)
        h_rH = project_replicated(runtime, self.hidden_norm(streams_rH), self.hidden_proj)
        return (h_rH.view(len(e_tH), -1, e_tH.shape[1]) + e_tH[:, None]).flatten(1)

    def _project(self, joined_tH2: torch.Tensor) -> torch.Tensor:
        """Project [t,2H] to [t,H].

        Each rank computes its columns for all tokens; the ranks then exchange columns for tokens.
        Without sequence parallelism every rank needs all tokens, and they gather the columns.
        """
        tp = self._runtime.mesh.tensor_parallel
        tp_group = tp.group
        (columns,) = ColumnParallelLinear.apply(
            joined_tH2,
            tp,
            self.proj.products,
            self._runtime.weight_grads,
            self.proj.weight,
        )
        if tp_group.size == 1:
            return columns
        if not tp.sequence_parallel:
            return _GatherColumns.apply(columns, tp_group)
        tokens = len(joined_tH2)
        splits = [tokens] * tp_group.size
        exchanged = all_to_all(columns, tp_group, send=splits, receive=splits)
        return exchanged.view(tp_group.size, tokens, -1).transpose(0, 1).flatten(1)


def share_weights(module: nn.Module, source: nn.Module) -> None:
    """Give a module the weights of another one of the same kind in place of its own.

    Routers are weights, and are shared with their selection bias and counts.
    """
    for name, child in source.named_children():
        if isinstance(child, Weight):
            setattr(module, name, child)
        else:
            share_weights(module.get_submodule(name), child)
