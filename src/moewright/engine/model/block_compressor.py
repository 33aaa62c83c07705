"""Compressors over time: one key of every few tokens, and the indexer that chooses among them.

DeepSeek-V4, section 2.3, as transformers' deepseek_v4 computes it. A compressor is whole on every
TP and CP rank: each projects its own tokens, and the projections are gathered.

Shapes: t of the T tokens of the TP group are this rank's between blocks; B sequences of S tokens,
M = S / rate blocks of `rate` tokens in each; H hidden, D the width of a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.model.attention import MicroBatchContext
from moewright.engine.model.autograd import Rotary
from moewright.engine.model.context_parallel import join_sequences, sum_and_split_sequences
from moewright.engine.model.key_tables import Blocks
from moewright.engine.model.layers import Norm, Vector, Weight, project_replicated
from moewright.engine.model.sparse_attention import Indexer
from moewright.engine.runtime import Runtime
from moewright.spec.model import AttentionSpec, IndexerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorParts:
    """The parameters of a compressor to keys of `width`, each of `rate` tokens.

    With `overlaps`, a key has a part of the block before its own too, and the projections have rows
    for either.
    """

    kv: Weight
    gate: Weight
    position: Vector
    norm: Norm
    rate: int
    width: int
    overlaps: bool


def build_parts(runtime: Runtime, width: int, rate: int, *, overlaps: bool) -> CompressorParts:
    """Build the parameters of a compressor; their owner gives them names."""
    hidden = runtime.model.hidden_size
    rows = width * (1 + overlaps)
    return CompressorParts(
        kv=Weight(runtime, rows, hidden),
        gate=Weight(runtime, rows, hidden),
        position=Vector(runtime, rate, rows),
        norm=Norm(runtime, width),
        rate=rate,
        width=width,
        overlaps=overlaps,
    )


def compress(
    runtime: Runtime, parts: CompressorParts, x_tH: torch.Tensor, context: MicroBatchContext
) -> torch.Tensor:
    """Return the keys of complete blocks of documents [B,M,D], rotated (key_tables.Blocks)."""
    blocks = context.key_tables.blocks(parts.rate)
    compressed_BMD = _CompressBlocks.apply(
        project_replicated(runtime, x_tH, parts.kv, is_wide=True),
        project_replicated(runtime, x_tH, parts.gate, is_wide=True),
        parts.position.weight,
        _BlockShape(
            runtime=runtime,
            rate=parts.rate,
            overlaps=parts.overlaps,
            sequences=context.sequences,
            blocks=blocks,
        ),
    )
    keys_BM1D = parts.norm(compressed_BMD)[:, :, None]
    return turn_last(runtime, keys_BM1D, blocks.cos, blocks.sin)[:, :, 0]


def turn_last(
    runtime: Runtime, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate the last columns of each head, whose interleaved pairs are first moved to halves.

    Queries, keys and values alike, so that only what turns attention's output back need know.
    """
    width = 2 * cos.shape[-1]
    plain, rotary = x_BSHD.split((x_BSHD.shape[-1] - width, width), -1)
    halves = rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((plain, Rotary.apply(halves.contiguous(), cos, sin, runtime.kernels)), -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockShape:
    runtime: Runtime
    rate: int
    overlaps: bool
    sequences: int
    blocks: Blocks

    def number_tokens(self, count: int) -> torch.Tensor:
        """Return the tokens [B,M,rate] of each block among all `count` of the sequences."""
        begins_BM = self.blocks.begins
        firsts_B = torch.arange(0, count, count // self.sequences, device=begins_BM.device)
        steps = torch.arange(self.rate, device=begins_BM.device)
        return (begins_BM + firsts_B[:, None])[..., None] + steps


class _CompressBlocks(ReleasingFunction):
    """Softmax-gated sums [B,M,D] of kv [t,D'] over blocks of tokens, gated by gate + position.

    Keeps kv and gate of the rank's own tokens, and gathers them again in backward. The gradient of
    the position is that of this rank's heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kv_t: torch.Tensor,
        gate_t: torch.Tensor,
        position: torch.Tensor,
        shape: _BlockShape,
    ) -> torch.Tensor:
        ctx.shape = shape
        ctx.save_for_backward(kv_t, gate_t, position)
        kv, gate = (_gather_blocks(x, shape) for x in (kv_t, gate_t))
        return _sum_blocks(kv, gate, position, shape)

    @staticmethod
    def backward(ctx: Any, grad_BMD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kv_t, gate_t, position = ctx.saved_tensors
        shape: _BlockShape = ctx.shape
        # The sums are made again under autograd, which has their gradients.
        kv, gate = (_gather_blocks(x, shape).requires_grad_() for x in (kv_t, gate_t))
        # A leaf of its own: the gradient is returned, and not accumulated in the parameter.
        position = position.detach().clone().requires_grad_()
        with torch.enable_grad():
            sums = _sum_blocks(kv, gate, position, shape)
        *block_grads, grad_position = torch.autograd.grad(sums, (kv, gate, position), grad_BMD)
        tp = shape.runtime.mesh.tensor_parallel
        count = shape.sequences * shape.runtime.workload.seq_len
        numbers = shape.number_tokens(count).flatten()
        grads = []
        for grad in block_grads:
            # No token is in two blocks that a query reads.
            whole = grad.new_zeros((count, grad.shape[-1]))
            whole.index_add_(0, numbers, grad.flatten(0, 2))
            grads.append(tp.reduce(sum_and_split_sequences(shape.runtime, whole)))
        return *grads, grad_position, None


def _gather_blocks(x_t: torch.Tensor, shape: _BlockShape) -> torch.Tensor:
    """Return [B,M,rate,D'] of all tokens of the TP and CP groups that lie in blocks."""
    runtime = shape.runtime
    whole = join_sequences(runtime, runtime.mesh.tensor_parallel.gather(x_t))
    return whole[shape.number_tokens(len(whole))]


def _sum_blocks(
    kv: torch.Tensor, gate: torch.Tensor, position: torch.Tensor, shape: _BlockShape
) -> torch.Tensor:
    """Sum kv [B,M,rate,D'] over blocks, and over what each takes of the block before it."""
    gate = gate + position
    if shape.overlaps:
        before, own = kv.chunk(2, -1)
        gate_before, own_gate = gate.chunk(2, -1)
        kv = torch.cat((_shift(before, shape, 0.0), own), 2)
        gate = torch.cat((_shift(gate_before, shape, float("-inf")), own_gate), 2)
    return (kv * gate.float().softmax(2).to(kv.dtype)).sum(2)


def _shift(x: torch.Tensor, shape: _BlockShape, fill: float) -> torch.Tensor:
    """Move blocks [B,M,...] to the next place, with `fill` in the first of a document."""
    moved = torch.cat((x[:, :1], x[:, :-1]), 1)
    return moved.masked_fill(shape.blocks.is_first[:, :, None, None], fill)


class BlockIndexer(Indexer):
    """The chooser of blocks: the queries' latent [t,Q], hidden states [t,H] -> [B,S,K] int32.

    Its keys come from a compressor of its own. As an Indexer otherwise.
    """

    def _build_weights(self, attention: AttentionSpec, spec: IndexerSpec) -> None:
        runtime = self._runtime
        self._rate = attention.sparse_rate
        self._parts = build_parts(runtime, spec.head_dim, self._rate, overlaps=True)
        self.kv = self._parts.kv
        self.gate = self._parts.gate
        self.position = self._parts.position
        self.norm = self._parts.norm
        self.q = Weight(runtime, spec.heads * spec.head_dim, attention.q_lora_rank)
        self.heads = Weight(runtime, spec.heads, runtime.model.hidden_size)

    def _weights(self) -> tuple[torch.Tensor, ...]:
        owners = (self.kv, self.gate, self.position, self.norm, self.q, self.heads)
        return tuple(owner.weight for owner in owners)

    def _make_keys(
        self, x_tH: torch.Tensor, context: MicroBatchContext, own: MicroBatchContext
    ) -> torch.Tensor:
        return compress(self._runtime, self._parts, x_tH, context).flatten(0, 1)

    def _rotate(self, x_tIW: torch.Tensor, own: MicroBatchContext) -> torch.Tensor:
        return turn_last(self._runtime, x_tIW[None], own.cos, own.sin)[0]
