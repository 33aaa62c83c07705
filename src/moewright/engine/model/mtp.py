"""Multi-token prediction: depths after the last layer, each of which predicts one token further
ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and head are those of the model.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B sequences; H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moewright.engine.comm.collectives import Group, all_gather_rows, all_to_all
from moewright.engine.memory.saved_tensors import RoutingDecisions, run_checkpointed
from moewright.engine.model.layers import AttentionContext, Norm, Weight
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import Module

if TYPE_CHECKING:
    from moewright.engine.model.transformer import TransformerLayer


class _GatherColumns(torch.autograd.Function):
    """Each rank's columns [T,h] -> all of them [T,H], the same on every rank, as is the gradient
    that comes back."""

    @staticmethod
    def forward(ctx: Any, columns_Th: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return (
            all_gather_rows(columns_Th, group)
            .unflatten(0, (group.size, -1))
            .transpose(0, 1)
            .flatten(1)
        )

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_TH.chunk(ctx.group.size, 1)[ctx.group.index].contiguous(), None


class MtpDepth(nn.Module):
    """The embedding of the token ahead and the hidden state of the depth before, both [t,H] -> a
    hidden state [t,H], and after a MoE layer the auxiliary losses and the expert counts.
    """

    ledger_module = Module.MTP

    def __init__(self, run: Runtime, layer: TransformerLayer) -> None:
        super().__init__()
        hidden = run.model.hidden_size
        self._run = run
        self.embed_norm = Norm(run, hidden, on_hidden_states=True)
        self.hidden_norm = Norm(run, hidden, on_hidden_states=True)
        self.proj = Weight(run, hidden, 2 * hidden, sharding=(("tp", 0),))
        self.layer = layer
        self.final_norm = Norm(run, hidden, on_hidden_states=True)

    def forward(
        self,
        embedded_tH: torch.Tensor,
        hidden_tH: torch.Tensor,
        batch: AttentionContext,
        again: bool,
    ) -> tuple[torch.Tensor, ...]:
        """`again`: a checkpoint of full recompute covers the depth, and nothing beside it."""
        with self._run.counters.attribute_to(Module.MTP):
            if not again:
                return self._block(None, batch, embedded_tH, hidden_tH)
            block = partial(self._block, RoutingDecisions(), batch)
            out: tuple[torch.Tensor, ...] = run_checkpointed(
                self._run.counters, block, embedded_tH, hidden_tH
            )
            return out

    def _block(
        self,
        decided: RoutingDecisions | None,
        batch: AttentionContext,
        embedded_tH: torch.Tensor,
        hidden_tH: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        joined = torch.cat((self.embed_norm(embedded_tH), self.hidden_norm(hidden_tH)), -1)
        out: tuple[torch.Tensor, ...] = self.layer(decided, batch, self._projected(joined))
        return out

    def _projected(self, joined_tH2: torch.Tensor) -> torch.Tensor:
        """[t,2H] -> [t,H]. Each rank makes its columns for all tokens; the ranks then trade columns
        for tokens, or, as all need all tokens without sequence parallelism, gather them.
        """
        tp = self._run.mesh.group("tp")
        (columns,) = ColumnParallelLinear.apply(
            joined_tH2, self._run.mesh.tensor_parallel, self._run.counters, self.proj.weight
        )
        if tp.size == 1:
            return columns
        if not self._run.mesh.tensor_parallel.sequence_parallel:
            return _GatherColumns.apply(columns, tp)
        tokens = len(joined_tH2)
        traded = all_to_all(columns, tp, send=[tokens] * tp.size, receive=[tokens] * tp.size)
        return traded.view(tp.size, tokens, -1).transpose(0, 1).flatten(1)
