"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Queries, keys and values are expanded from narrow latents.

Shapes: t of the T tokens of the TP group are this rank's between blocks; H hidden, h heads of this
rank, D = N + R the width of a query head (N without position, R rotated), V the width of a value
head, Q and C the latents' widths.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moewright.engine.comm.autograd_collectives import GatherSequence
from moewright.engine.kernels.sparse_attention import SUM_SHARES
from moewright.engine.model.adapters import add_column_adapter
from moewright.engine.model.attention import (
    CoreAttention,
    MicroBatchContext,
    attend_and_project,
)
from moewright.engine.model.attention_blocks import BlocksBySource
from moewright.engine.model.context_parallel import attend, scatter_heads
from moewright.engine.model.layers import Norm, Weight, project_replicated
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.model.rope import softmax_factor
from moewright.engine.model.sparse_attention import Indexer, IndexInputs, SparseAttention
from moewright.engine.runtime import Runtime
from moewright.rules.shapes.mixers import choice_source, is_choice_shared
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module

# The latents' norms add this whatever the model's other norms add (DeepSeek-V2's modeling code).
_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Latent attention: [t,H] -> [t,H].

    Every rank computes the latents of its own tokens, then gathers them; heads are sharded over TP.
    Without sequence parallelism every rank computes the latents of all tokens.
    """

    ledger_module = Module.ATTENTION

    def __init__(self, runtime: Runtime, layer_number: int) -> None:
        super().__init__()
        spec = runtime.model.attention
        hidden = runtime.model.hidden_size
        head_rows = (("tp", 0),)
        self._spec = spec
        self._runtime = runtime
        if spec.q_lora_rank:
            self.q_down = Weight(runtime, spec.q_lora_rank, hidden)
            self.q_down_norm = Norm(
                runtime, spec.q_lora_rank, on_hidden_states=True, eps=_LATENT_EPS
            )
            self.q_up = Weight(runtime, spec.q_width, spec.q_lora_rank, sharding=head_rows)
        else:
            self.q = Weight(runtime, spec.q_width, hidden, sharding=head_rows)
        self.kv_down = Weight(runtime, spec.kv_lora_rank + spec.qk_rope_head_dim, hidden)
        self.kv_norm = Norm(runtime, spec.kv_lora_rank, on_hidden_states=True, eps=_LATENT_EPS)
        kv_width = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        self.kv_up = Weight(runtime, kv_width, spec.kv_lora_rank, sharding=head_rows)
        self.o = Weight(runtime, hidden, spec.out_width, sharding=(("tp", 1),))
        self._layer_number = layer_number
        self._choice_source = choice_source(runtime.model, layer_number)
        if self._choice_source == layer_number:
            self.indexer = Indexer(runtime)

    def forward(self, x_tH: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        runtime = self._runtime
        manager = runtime.saved_tensors
        recomputes_up = runtime.recomputes(Recompute.MLA_UP_PROJ)
        first = self.q_down if self._spec.q_lora_rank else self.q
        with (
            runtime.counters.scopes.enter(Module.ATTENTION),
            manager.offload(x_tH, enabled=runtime.offloads(Offload.QKV_LINEAR)),
            manager.keep_converted(x_tH, first.products),
        ):
            x_tQ = x_tH
            if self._spec.q_lora_rank:
                x_tQ = self.q_down_norm(project_replicated(runtime, x_tH, self.q_down))
            down_tCR = project_replicated(runtime, x_tH, self.kv_down)
            x_tC = self.kv_norm(down_tCR[:, : self._spec.kv_lora_rank])

            def expand_queries(x_tQ: torch.Tensor) -> torch.Tensor:
                return self._expand_queries(x_tQ, context)

            def expand_kv(x_tC: torch.Tensor, down_tCR: torch.Tensor) -> torch.Tensor:
                return self._expand_kv(x_tC, down_tCR, context)

            with (
                manager.keep_converted(x_tQ, self._query_up.products),
                manager.keep_converted(x_tC, self.kv_up.products),
            ):
                q_BShD = expand_queries(x_tQ)
                kv_BShDV = expand_kv(x_tC, down_tCR)
                core: CoreAttention = partial(self._attend, context.blocks)
                inputs: IndexInputs | None = None
                if self._choice_source == self._layer_number:
                    inputs = self._choose(x_tQ, x_tH, context)
                if self._choice_source is not None:
                    core = partial(self._attend_chosen, context.choices[self._choice_source])
                with (
                    manager.discard_and_recompute(
                        q_BShD, expand_queries, x_tQ, enabled=recomputes_up
                    ),
                    manager.discard_and_recompute(
                        kv_BShDV, expand_kv, x_tC, down_tCR, enabled=recomputes_up
                    ),
                ):
                    out = attend_and_project(runtime, core, (q_BShD, kv_BShDV), self.o)
            if inputs is None:
                return out
            k_BShD = kv_BShDV[..., : self._spec.head_dim]
            scored = q_BShD, k_BShD, context.choices[self._layer_number]
            return self.indexer.add_objective(out, inputs, partial(SUM_SHARES, *scored), context)

    @property
    def _query_up(self) -> Weight:
        if self._spec.q_lora_rank:
            return self.q_up
        return self.q

    def _expand_queries(self, x_tQ: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        """Expand [t,Q] to [B,S,h,D].

        The last R columns of D are rotated, and all are scaled where yarn asks for it; CP may then
        exchange heads for tokens (`scatter_heads`).
        """
        runtime = self._runtime
        spec = self._spec
        tp = runtime.mesh.tensor_parallel
        up = self._query_up
        (q,) = ColumnParallelLinear.apply(x_tQ, tp, up.products, runtime.weight_grads, up.weight)
        q = add_column_adapter(runtime, up, q, x_tQ)
        q_BShD = q.reshape(context.sequences, -1, spec.heads // tp.group.size, spec.head_dim)
        plain, rotary = q_BShD.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), -1)
        q_BShD = torch.cat((plain, self._rotate(rotary, context)), -1)
        factor = softmax_factor(spec.rope)
        return scatter_heads(runtime, q_BShD if factor == 1.0 else q_BShD * factor)

    def _expand_kv(
        self, x_tC: torch.Tensor, down_tCR: torch.Tensor, context: MicroBatchContext
    ) -> torch.Tensor:
        """Expand [t,C] and the down-projection [t,C+R] to keys and values side by side.

        They are [B,S,h,D+V]; all heads share the rotated part of the keys.
        """
        runtime = self._runtime
        spec = self._spec
        tp = runtime.mesh.tensor_parallel
        heads = spec.heads // tp.group.size
        (kv,) = ColumnParallelLinear.apply(
            x_tC, tp, self.kv_up.products, runtime.weight_grads, self.kv_up.weight
        )
        kv = add_column_adapter(runtime, self.kv_up, kv, x_tC)
        widths = (spec.qk_nope_head_dim, spec.v_head_dim)
        plain, values = kv.reshape(context.sequences, -1, heads, sum(widths)).split(widths, -1)
        # The product above gathers its own input, which this part is not of.
        rotary_TR = GatherSequence.apply(down_tCR[:, spec.kv_lora_rank :], tp)
        rotary = rotary_TR.reshape(context.sequences, -1, 1, spec.qk_rope_head_dim)
        # Rotated once, before all heads share it.
        rotary = self._rotate(rotary, context).expand(-1, -1, heads, -1)
        return scatter_heads(runtime, torch.cat((plain, rotary, values), -1))

    def _rotate(self, x_BShR: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        return context.rotate(x_BShR, interleaved=self._spec.rope.interleaved)

    def _choose(
        self, x_tQ: torch.Tensor, x_tH: torch.Tensor, context: MicroBatchContext
    ) -> IndexInputs:
        """Choose the keys of each query, and return what the choice was made of.

        The choice is kept for backward; where another layer takes it, in a checkpoint too.
        """
        chosen_BSK, inputs = self.indexer(x_tQ, x_tH, context)
        context.choices[self._layer_number] = chosen_BSK
        runtime = self._runtime
        if torch.is_grad_enabled() or is_choice_shared(runtime.model, self._layer_number):
            runtime.saved_tensors.count_saved(chosen_BSK)
        return inputs

    def _attend(
        self, blocks: BlocksBySource, q_BShD: torch.Tensor, kv_BShDV: torch.Tensor
    ) -> tuple[torch.Tensor]:
        k, v = kv_BShDV.split((self._spec.head_dim, self._spec.v_head_dim), -1)
        return (attend(self._runtime, blocks, q_BShD, k, v),)

    def _attend_chosen(
        self, chosen_BSK: torch.Tensor, q_BShD: torch.Tensor, kv_BShDV: torch.Tensor
    ) -> tuple[torch.Tensor]:
        spec = self._spec
        k, v = kv_BShDV.split((spec.head_dim, spec.v_head_dim), -1)
        # A pair counts as one of latents, which all heads share (docs/formulas.md 13).
        width = 2 * spec.kv_lora_rank + spec.qk_rope_head_dim
        counters = self._runtime.counters
        return (SparseAttention.apply(q_BShD, k, v, chosen_BSK, width, counters),)
