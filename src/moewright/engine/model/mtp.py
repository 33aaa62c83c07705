"""Multi-token prediction: depths after the last layer, each of which predicts one token further
ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and head are those of the model.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B sequences; H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moewright.engine.comm.collectives import Group, all_to_all, gather
from moewright.engine.memory.saved_tensors import Decided, replayed
from moewright.engine.model.layers import Norm, Sequences, Weight
from moewright.engine.model.parallel_linear import ColumnLinear
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import Module

if TYPE_CHECKING:
    from moewright.engine.model.transformer import Layer


class _JoinColumns(torch.autograd.Function):
    """Each rank's columns [T,h] -> all of them [T,H], the same on every rank, as is the gradient
    that comes back."""

    @staticmethod
    def forward(ctx: Any, columns_Th: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return gather(columns_Th, group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_TH.chunk(ctx.group.size, 1)[ctx.group.index].contiguous(), None


class Depth(nn.Module):
    """The embedding of the token ahead and the hidden state of the depth before, both [t,H] -> a
    hidden state [t,H], and after a MoE layer the auxiliary losses and the expert counts.
    """

    ledger_module = Module.MTP

    def __init__(self, run: Runtime, layer: Layer) -> None:
        super().__init__()
        hidden = run.model.hidden_size
        self._run = run
        self.embed_norm = Norm(run, hidden, of_hidden=True)
        self.hidden_norm = Norm(run, hidden, of_hidden=True)
        self.proj = Weight(run, hidden, 2 * hidden, cuts=(("tp", 0),))
        self.layer = layer
        self.final_norm = Norm(run, hidden, of_hidden=True)

    def forward(
        self, embedded_tH: torch.Tensor, hidden_tH: torch.Tensor, batch: Sequences, again: bool
    ) -> tuple[torch.Tensor, ...]:
        """`again`: a checkpoint of full recompute covers the depth, and nothing beside it."""
        with self._run.books.within(Module.MTP):
            if not again:
                return self._block(None, batch, embedded_tH, hidden_tH)
            block = partial(self._block, Decided(), batch)
            out: tuple[torch.Tensor, ...] = replayed(self._run.books, block, embedded_tH, hidden_tH)
            return out

    def _block(
        self,
        decided: Decided | None,
        batch: Sequences,
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
        (columns,) = ColumnLinear.apply(
            joined_tH2, self._run.mesh.tensor, self._run.books, self.proj.weight
        )
        if tp.size == 1:
            return columns
        if not self._run.mesh.tensor.sequence:
            return _JoinColumns.apply(columns, tp)
        tokens = len(joined_tH2)
        traded = all_to_all(columns, tp, send=[tokens] * tp.size, receive=[tokens] * tp.size)
        return traded.view(tp.size, tokens, -1).transpose(0, 1).flatten(1)
