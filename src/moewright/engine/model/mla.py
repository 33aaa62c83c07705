"""Multi-head latent attention: queries, keys and values expanded from narrow latents (DeepSeek-V2,
arXiv 2405.04434).

Shapes: t of the T tokens of the TP group are this rank's between blocks; H hidden, h heads of this
rank, D = N + R the width of a query head (N without position, R rotated), V the width of a value
head, Q and C the latents' widths.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moewright.engine.comm.collectives import GatherSequence
from moewright.engine.model.attention_blocks import BlocksBySource
from moewright.engine.model.context_parallel import attend, scatter_heads
from moewright.engine.model.layers import (
    AttentionContext,
    Norm,
    Weight,
    attend_and_project,
    hidden_replica_group,
)
from moewright.engine.model.parallel_linear import ColumnParallelLinear, ReplicatedLinear
from moewright.engine.model.rope import softmax_factor
from moewright.engine.runtime import Runtime
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module


class LatentAttention(nn.Module):
    """[t,H] -> [t,H]. Latents are made on every rank for its own tokens, then gathered; heads are
    cut over TP. Without sequence parallelism every rank makes those of all tokens.
    """

    ledger_module = Module.ATTENTION

    def __init__(self, run: Runtime) -> None:
        super().__init__()
        spec, hidden, rows = run.model.attention, run.model.hidden_size, (("tp", 0),)
        self._spec, self._run = spec, run
        if spec.q_lora_rank:
            self.q_down = Weight(run, spec.q_lora_rank, hidden)
            self.q_down_norm = Norm(run, spec.q_lora_rank, on_hidden_states=True)
            self.q_up = Weight(run, spec.q_width, spec.q_lora_rank, sharding=rows)
        else:
            self.q = Weight(run, spec.q_width, hidden, sharding=rows)
        self.kv_down = Weight(run, spec.kv_lora_rank + spec.qk_rope_head_dim, hidden)
        self.kv_norm = Norm(run, spec.kv_lora_rank, on_hidden_states=True)
        expanded = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        self.kv_up = Weight(run, expanded, spec.kv_lora_rank, sharding=rows)
        self.o = Weight(run, hidden, spec.out_width, sharding=(("tp", 1),))

    def forward(self, x_tH: torch.Tensor, batch: AttentionContext) -> torch.Tensor:
        run, books = self._run, self._run.counters
        again, sharers = run.recomputes(Recompute.MLA_UP_PROJ), hidden_replica_group(run)
        with (
            books.attribute_to(Module.ATTENTION),
            run.saved_tensors.offload(x_tH, enabled=run.offloads(Offload.QKV_LINEAR)),
        ):
            x_tQ = x_tH
            if self._spec.q_lora_rank:
                x_tQ = self.q_down_norm(
                    ReplicatedLinear.apply(x_tH, self.q_down.weight, books, sharers)
                )
            down_tCR = ReplicatedLinear.apply(x_tH, self.kv_down.weight, books, sharers)
            x_tC = self.kv_norm(down_tCR[:, : self._spec.kv_lora_rank])

            def queries(x_tQ: torch.Tensor) -> torch.Tensor:
                return self._queries(x_tQ, batch)

            def keys_and_values(x_tC: torch.Tensor, down_tCR: torch.Tensor) -> torch.Tensor:
                return self._keys_and_values(x_tC, down_tCR, batch)

            q_BShD, kv_BShDV = queries(x_tQ), keys_and_values(x_tC, down_tCR)
            keeper = run.saved_tensors
            with (
                keeper.discard_and_recompute(q_BShD, queries, x_tQ, enabled=again),
                keeper.discard_and_recompute(
                    kv_BShDV, keys_and_values, x_tC, down_tCR, enabled=again
                ),
            ):
                return attend_and_project(
                    run, partial(self._core, batch.blocks), (q_BShD, kv_BShDV), self.o.weight
                )

    def _queries(self, x_tQ: torch.Tensor, batch: AttentionContext) -> torch.Tensor:
        """[t,Q] -> [B,S,h,D], their last R rotated, scaled as yarn asks; heads exchanged where CP
        does so."""
        spec, tp = self._spec, self._run.mesh.tensor_parallel
        up = self.q_up if spec.q_lora_rank else self.q
        (q,) = ColumnParallelLinear.apply(x_tQ, tp, self._run.counters, up.weight)
        q_BShD = q.reshape(batch.sequences, -1, spec.heads // tp.group.size, spec.head_dim)
        plain, turned = q_BShD.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), -1)
        q_BShD = torch.cat((plain, self._turned(turned, batch)), -1)
        factor = softmax_factor(spec.rope)
        return scatter_heads(self._run, q_BShD if factor == 1.0 else q_BShD * factor)

    def _keys_and_values(
        self, x_tC: torch.Tensor, down_tCR: torch.Tensor, batch: AttentionContext
    ) -> torch.Tensor:
        """[t,C] and the down-projection [t,C+R] -> keys and values side by side, [B,S,h,D+V]; all
        heads share the rotated part of the keys.
        """
        spec, tp = self._spec, self._run.mesh.tensor_parallel
        heads = spec.heads // tp.group.size
        (kv,) = ColumnParallelLinear.apply(x_tC, tp, self._run.counters, self.kv_up.weight)
        plain, values = kv.reshape(
            batch.sequences, -1, heads, spec.qk_nope_head_dim + spec.v_head_dim
        ).split((spec.qk_nope_head_dim, spec.v_head_dim), -1)
        turned_TR = GatherSequence.apply(down_tCR[:, spec.kv_lora_rank :], tp)
        turned = self._turned(
            turned_TR.reshape(batch.sequences, -1, 1, spec.qk_rope_head_dim), batch
        )
        return scatter_heads(
            self._run, torch.cat((plain, turned.expand(-1, -1, heads, -1), values), -1)
        )

    def _turned(self, x_BShR: torch.Tensor, batch: AttentionContext) -> torch.Tensor:
        """Rotated by position. Interleaved pairs (2i, 2i + 1) are laid apart first, as queries and
        keys both are."""
        if self._spec.rope.interleaved:
            x_BShR = x_BShR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return batch.rotate(x_BShR)

    def _core(
        self, met: BlocksBySource, q_BShD: torch.Tensor, kv_BShDV: torch.Tensor
    ) -> tuple[torch.Tensor]:
        k, v = kv_BShDV.split((self._spec.head_dim, self._spec.v_head_dim), -1)
        return (attend(self._run, met, q_BShD, k, v),)
