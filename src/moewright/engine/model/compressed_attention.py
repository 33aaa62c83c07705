"""DeepSeek-V4's attention: one head is key and value, of tokens in a window and of blocks.

Section 2.3 of its report, as transformers' deepseek_v4 computes it. Values turn with the keys they
are, so the output turns back; it passes through a low rank, a group of heads at a time.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B sequences of S tokens,
H hidden, h heads of this rank and G groups of them, D the width of a head, Q that of the queries'
latent, M blocks and K of them chosen for each query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moewright.engine.comm.autograd_collectives import GatherSequence
from moewright.engine.kernels.compressed_attention import (
    COMPRESSED_ATTENTION,
    COMPRESSED_ATTENTION_BACKWARD,
    SUM_BLOCK_SHARES,
)
from moewright.engine.kernels.matmul import widen
from moewright.engine.memory.saved_tensors import run_checkpointed
from moewright.engine.memory.weight_gradients import Operands, WeightGradStore
from moewright.engine.model.adapters import add_column_adapter
from moewright.engine.model.attention import MicroBatchContext
from moewright.engine.model.autograd import CountedFunction, NormSettings, RmsNorm
from moewright.engine.model.block_compressor import (
    BlockIndexer,
    build_parts,
    compress,
    turn_last,
)
from moewright.engine.model.context_parallel import gather_heads, join_sequences, scatter_heads
from moewright.engine.model.layers import Norm, Vector, Weight, project_out, project_replicated
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.model.sparse_attention import IndexInputs
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.rules.shapes.param import TP_COLUMNS, TP_ROWS
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import MixerKind


class CompressedAttention(nn.Module):
    """Attention of layer `layer_number` to its window, and to blocks of its kind: [t,H] -> [t,H].

    Every rank computes the latent and the key of its own tokens; keys are gathered, heads and
    groups sharded over TP. CP ranks exchange heads for tokens around the core, which has the keys
    and the blocks of whole sequences.
    """

    ledger_module = Module.ATTENTION

    def __init__(self, runtime: Runtime, layer_number: int) -> None:
        super().__init__()
        spec = runtime.model.attention
        hidden = runtime.model.hidden_size
        self._runtime = runtime
        self._spec = spec
        self._mixer = runtime.model.mixer(layer_number)
        self.q_down = Weight(runtime, spec.q_lora_rank, hidden)
        self.q_down_norm = Norm(runtime, spec.q_lora_rank, on_hidden_states=True)
        self.q_up = Weight(runtime, spec.q_width, spec.q_lora_rank, sharding=TP_ROWS)
        self.kv = Weight(runtime, spec.head_dim, hidden)
        self.kv_norm = Norm(runtime, spec.head_dim, on_hidden_states=True)
        low = spec.output_groups * spec.output_lora_rank
        group_width = spec.out_width // spec.output_groups
        self.o_down = Weight(runtime, low, group_width, sharding=TP_ROWS)
        self.o = Weight(runtime, hidden, low, sharding=TP_COLUMNS)
        self.sinks = Vector(runtime, spec.heads, sharding=TP_ROWS)
        self._query_norm = NormSettings(
            eps=runtime.model.norm_eps, kernels=runtime.kernels, keeps_scale=True
        )
        # No query reads a block that is longer than a sequence.
        self._rate = runtime.workload.seq_len + 1
        if self._mixer is MixerKind.LOCAL_ATTENTION:
            return
        is_sparse = self._mixer is MixerKind.COMPRESSED_SPARSE
        self._rate = spec.sparse_rate if is_sparse else spec.heavy_rate
        self._parts = build_parts(runtime, spec.head_dim, self._rate, overlaps=is_sparse)
        self.compress_kv = self._parts.kv
        self.compress_gate = self._parts.gate
        self.compress_position = self._parts.position
        self.compress_norm = self._parts.norm
        if is_sparse:
            self.indexer = BlockIndexer(runtime)

    def forward(self, x_tH: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        runtime = self._runtime
        tp = runtime.mesh.tensor_parallel
        manager = runtime.saved_tensors
        is_local = self._mixer is MixerKind.LOCAL_ATTENTION
        with (
            runtime.counters.scopes.enter(Module.ATTENTION),
            manager.offload(x_tH, enabled=runtime.offloads(Offload.QKV_LINEAR)),
        ):
            context = context if is_local else context.for_compressed()
            whole = context.for_sequences()
            x_tQ = self.q_down_norm(project_replicated(runtime, x_tH, self.q_down))
            # A compressor takes x_tH in 16 bits, so no product keeps it in fewer.
            keeping = manager.keep_converted(x_tQ, self.q_up.products)
            chosen_BSK: torch.Tensor | None = None
            inputs: IndexInputs | None = None
            with keeping:
                q_BShD = self._expand_queries(x_tQ, whole)
                if self._mixer is MixerKind.COMPRESSED_SPARSE:
                    chosen_BSK, inputs = self.indexer(x_tQ, x_tH, context)
                    if torch.is_grad_enabled():
                        runtime.saved_tensors.count_saved(chosen_BSK)
            k_tD = self.kv_norm(project_replicated(runtime, x_tH, self.kv))
            k_TD = join_sequences(runtime, GatherSequence.apply(k_tD, tp))
            k_BS1D = k_TD.unflatten(0, (context.sequences, -1))[:, :, None]
            k_BSD = turn_last(runtime, k_BS1D, whole.cos, whole.sin)[:, :, 0]
            blocks_BMD = k_BSD.new_zeros(len(k_BSD), 0, k_BSD.shape[2])
            if not is_local:
                blocks_BMD = compress(runtime, self._parts, x_tH, context)
            read = q_BShD, k_BSD, blocks_BMD
            sinks = self._own_sinks()
            core = partial(self._attend, whole, chosen_BSK, sinks)
            offloads_output = runtime.offloads(Offload.ATTN_PROJ)
            with (
                manager.offload(q_BShD, k_BSD, enabled=runtime.offloads(Offload.CORE_ATTN)),
                # Attention keeps its output too.
                manager.offload_saved(dims=4, staying=(), enabled=offloads_output),
            ):
                if runtime.recomputes(Recompute.CORE_ATTN):
                    (out_BShD,) = run_checkpointed(runtime.counters, core, *read)
                else:
                    (out_BShD,) = core(*read)
                out_BShD = gather_heads(runtime, out_BShD)
                with manager.offload(out_BShD, enabled=offloads_output):
                    out_tH = self._project_out(out_BShD)
            if inputs is None:
                return out_tH
            sum_shares = partial(
                SUM_BLOCK_SHARES,
                *read,
                chosen_BSK,
                sinks,
                context.bound_keys(self._rate),
                (self._spec.sliding_window, self._rate),
            )
            return self.indexer.add_objective(out_tH, inputs, sum_shares, context)

    def _expand_queries(self, x_tQ: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        """Expand [t,Q] to [B,S,h,D]: each head normed without a weight, its last columns turned.

        S counts the tokens of all CP ranks, each of which has a part of the heads.
        """
        runtime = self._runtime
        (q,) = ColumnParallelLinear.apply(
            x_tQ,
            runtime.mesh.tensor_parallel,
            self.q_up.products,
            runtime.weight_grads,
            self.q_up.weight,
        )
        q = add_column_adapter(runtime, self.q_up, q, x_tQ)
        local_heads = self._spec.heads // runtime.mesh.group("tp").size
        q_BShD = q.reshape(context.sequences, -1, local_heads, self._spec.head_dim)
        q_BShD = scatter_heads(runtime, q_BShD)
        offloads_core = runtime.offloads(Offload.CORE_ATTN)
        with runtime.saved_tensors.offload(q_BShD, enabled=offloads_core):
            q_BShD = RmsNorm.apply(q_BShD, None, self._query_norm)
        return turn_last(runtime, q_BShD, context.cos, context.sin)

    def _attend(
        self,
        context: MicroBatchContext,
        chosen_BSK: torch.Tensor | None,
        sinks: torch.Tensor,
        *read: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        settings = _CoreSettings(
            context=context,
            window=self._spec.sliding_window,
            rate=self._rate,
            counters=self._runtime.counters,
        )
        return (_AttendBlocks.apply(*read, chosen_BSK, sinks, settings),)

    def _own_sinks(self) -> torch.Tensor:
        """Return the sinks of the heads that this CP rank has of its TP group's."""
        group = self._runtime.mesh.group("cp_a2a")
        # As scatter_heads deals the heads.
        return self.sinks.weight.unflatten(0, (group.size, -1))[group.index]

    def _project_out(self, out_BShD: torch.Tensor) -> torch.Tensor:
        runtime = self._runtime
        groups = self._spec.output_groups // runtime.mesh.group("tp").size
        low = _GroupedProjection.apply(
            out_BShD.flatten(0, 1).flatten(1),
            self.o_down.weight,
            groups,
            runtime.counters,
            runtime.weight_grads,
        )
        return project_out(runtime, low, self.o)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CoreSettings:
    """What attention reads besides tensors; `context` has the rotation of its tokens."""

    context: MicroBatchContext
    window: int
    rate: int
    counters: Counters

    @property
    def reach(self) -> tuple[torch.Tensor, tuple[int, int]]:
        """What says which tokens and blocks each query may read."""
        return self.context.bound_keys(self.rate), (self.window, self.rate)

    def turn(self, x_BShD: torch.Tensor, *, is_back: bool) -> torch.Tensor:
        """Rotate the last columns of heads as `turn_last` does, or back and into its pairs."""
        context = self.context
        width = 2 * context.cos.shape[-1]
        plain, rotary = x_BShD.split((x_BShD.shape[-1] - width, width), -1)
        if is_back:
            # The opposite angle turns back.
            halves = context.kernels.rotate(rotary.contiguous(), context.cos, -context.sin)
            pairs = halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            return torch.cat((plain, pairs), -1)
        halves = rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).contiguous()
        return torch.cat((plain, context.kernels.rotate(halves, context.cos, context.sin)), -1)


class _AttendBlocks(CountedFunction):
    """Attention of q [B,S,h,D] to a window of k [B,S,D] and blocks [B,M,D], turned back.

    Keeps q, k, the blocks, what was chosen of them, the output and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        blocks: torch.Tensor,
        chosen: torch.Tensor | None,
        sinks: torch.Tensor,
        settings: _CoreSettings,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, settings.counters)
        ctx.settings = settings
        read = q, k, blocks, chosen, sinks
        turned, lse = COMPRESSED_ATTENTION(*read, *settings.reach)
        out = settings.turn(turned, is_back=True)
        ctx.save_for_backward(*read, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *read, out, lse = ctx.saved_tensors
        settings: _CoreSettings = ctx.settings
        # A rotation of both changes no dot product.
        dots = (grad.float() * out.float()).sum(-1).transpose(1, 2)
        with ctx.counters.scopes.enter(ctx.scope):
            dq, dk, dblocks, dsinks = COMPRESSED_ATTENTION_BACKWARD(
                settings.turn(grad, is_back=False),
                *read,
                lse,
                dots,
                *settings.reach,
            )
        return dq, dk, dblocks, None, dsinks, None


class _GroupedProjection(CountedFunction):
    """y [T,G N]: each of G groups of columns of x [T,G K] by its own rows of w [G N,K].

    Keeps x where w trains.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        groups: int,
        counters: Counters,
        weight_grads: WeightGradStore,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, counters)
        ctx.weight_grads = weight_grads
        ctx.groups = groups
        # Input 1 is w.
        ctx.is_trained = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if ctx.is_trained else None, w)
        return _join_groups(_bmm(_split_groups(x, groups), w.unflatten(0, (groups, -1)).mT))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        groups = ctx.groups
        with ctx.counters.scopes.enter(ctx.scope):
            weights = w.unflatten(0, (groups, -1))
            grad_x = _join_groups(_bmm(_split_groups(grad, groups), weights))
        if not ctx.is_trained:
            return grad_x, None, None, None, None

        def compute_weight_grad(operands: Operands) -> list[torch.Tensor]:
            x_groups, grad_groups = (_split_groups(operand, groups) for operand in operands)
            return [_bmm(grad_groups.mT, x_groups).flatten(0, 1)]

        (grad_w,) = CountedFunction.compute_or_defer_grads(
            ctx, slice(1, 2), (x, grad), compute_weight_grad
        )
        return grad_x, grad_w, None, None, None


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(widen(a), widen(b)).to(a.dtype)


def _split_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.unflatten(1, (groups, -1)).transpose(0, 1)


def _join_groups(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1)
