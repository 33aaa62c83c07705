"""The decoder: the part of the model that one rank holds, from token ids to the loss of each
token."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from moewright.engine.data.micro_batch import MicroBatch
from moewright.engine.memory.saved_tensors import RoutingDecisions, run_checkpointed
from moewright.engine.model.layers import (
    Attention,
    AttentionContext,
    AttentionContextBuilder,
    Embedding,
    Mlp,
    NamedParameter,
    Norm,
    OutputHead,
    compute_token_loss,
)
from moewright.engine.model.mla import LatentAttention
from moewright.engine.model.moe import MoeLayer
from moewright.engine.model.mtp import MtpDepth
from moewright.engine.model.router import aux_loss_coefficients
from moewright.engine.runtime import Runtime
from moewright.rules import recompute
from moewright.rules.stages import Chunk, chunk_layers
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput:
    """Of one micro-batch after one chunk: hidden state [t,H], nll [T] fp32 (0 where no target), the
    sum of the nll of its MTP depths; of its MoE layers the auxiliary losses [layers, 4] as a Router
    returns them, counts [layers, E].

    `logits` [T,V] are those that backward keeps, detached: this rank's part of the vocabulary;
    empty where none are kept, unless they were asked for. Both are empty after a chunk without the
    loss. The TP group shares one nll; the auxiliary losses and the counts of its ranks add up.
    """

    hidden_tH: torch.Tensor
    nll: torch.Tensor
    mtp_nll: torch.Tensor
    logits: torch.Tensor
    aux_losses: torch.Tensor
    expert_counts: torch.Tensor


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP or MoE, each added to the residual stream [t,H]."""

    def __init__(self, run: Runtime, number: int) -> None:
        super().__init__()
        self._run = run
        # Fused into the QKV projection for GQA in the stacks that the rules are held against: only
        # MLA replays it.
        latent = run.model.attention.kind is AttentionKind.MLA
        self._replays_input = latent and run.recomputes(Recompute.LAYERNORM)
        self.input_norm = Norm(
            run, run.model.hidden_size, recompute=self._replays_input, on_hidden_states=True
        )
        self.attention = LatentAttention(run) if latent else Attention(run, number)
        self.post_norm = Norm(
            run,
            run.model.hidden_size,
            recompute=run.recomputes(Recompute.LAYERNORM),
            on_hidden_states=True,
        )
        self._is_moe = run.model.moe_layers[
            min(number, run.model.layers - 1)
        ]  # MTP depths are like the last layer
        if self._is_moe:
            self.moe = MoeLayer(run, number)
        else:
            self.mlp = Mlp(run, run.model.dense_ffn_size, Module.DENSE_MLP)

    def forward(
        self, decided: RoutingDecisions | None, batch: AttentionContext, x_tH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The new hidden state; after a MoE layer, the auxiliary losses and the expert counts too.
        `decided` is of the replayed block that this is part of, None outside of one.
        """
        run, keeper = self._run, self._run.saved_tensors
        with keeper.offload(x_tH, enabled=run.offloads(Offload.ATTN_NORM)):
            with run.counters.attribute_to(Module.NORM):
                normed = self.input_norm(x_tH)
            with keeper.discard_and_recompute(
                normed, self.input_norm, x_tH, enabled=self._replays_input
            ):
                attended = self.attention(normed, batch)
        x_tH = x_tH + attended
        with keeper.offload(x_tH, enabled=run.offloads(Offload.MLP_NORM)):
            with run.counters.attribute_to(Module.NORM):
                normed = self.post_norm(x_tH)
            with keeper.discard_and_recompute(
                normed, self.post_norm, x_tH, enabled=run.recomputes(Recompute.LAYERNORM)
            ):
                if not self._is_moe:
                    return (x_tH + self.mlp(normed),)
                out, aux, counts = self.moe(normed, decided, batch.first_sequence)
                return x_tH + out, aux, counts


class Transformer(nn.Module):
    """The chunks of the model that one rank holds. Layers keep their global numbers; a table that
    is both embedding and head is held once.
    """

    def __init__(self, run: Runtime, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._run, self.chunks = run, tuple(chunks)
        last, tied = any(chunk.has_loss for chunk in chunks), run.model.tie_embeddings
        self._rotary = AttentionContextBuilder(run)
        embeds = (last and tied) or any(chunk.has_embedding or chunk.mtp_layers for chunk in chunks)
        self.embedding = Embedding(run) if embeds else None
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(run, i) for chunk in chunks for i in chunk.layers}
        )
        self.final_norm = Norm(run, run.model.hidden_size, on_hidden_states=True) if last else None
        self.head = (
            OutputHead(run)
            if (last or any(chunk.mtp_layers for chunk in chunks)) and not tied
            else None
        )
        depths = [
            number
            for chunk in chunks
            for number in chunk_layers(run.model, chunk)[len(chunk.layers) :]
        ]
        self._depths = tuple(MtpDepth(run, TransformerLayer(run, number)) for number in depths)
        self.mtp = nn.ModuleDict({str(place): depth for place, depth in enumerate(self._depths)})

    def forward(
        self,
        batch: MicroBatch,
        *,
        chunk: int = 0,
        hidden_tH: torch.Tensor | None = None,
        first_sequence: int | None = None,
        needs_logits: bool = False,
    ) -> ModelOutput:
        """One chunk, from the hidden state after the chunk before it, or from the ids where it
        holds the embedding.

        `first` as in Sequences; `logits`: whole ones are wanted, whatever the layout makes of them.
        """
        here = self.chunks[chunk]
        x_tH = hidden_tH
        if here.has_embedding:
            assert self.embedding is not None  # made with the chunk
            x_tH = self.embedding(batch.inputs.flatten())
        assert x_tH is not None  # only the first chunk starts from ids
        losses, counts, lie = (
            [],
            [],
            self._rotary.build(len(batch.inputs), batch.segments, first_sequence),
        )
        for layers, again in self._checkpoints(here.layers):
            x_tH, *routed = self._through(layers, again, lie, x_tH)
            losses += routed[::2]
            counts += routed[1::2]
        nll, seen = x_tH.new_zeros(0, dtype=torch.float32), x_tH.new_zeros(0)
        if here.has_loss:
            assert self.final_norm is not None  # made with the chunk
            nll, seen = self._loss(self.final_norm, x_tH, batch.targets, whole=needs_logits)
        ahead_nll, hidden_tH = nll.new_zeros(()), x_tH
        for place, depth in enumerate(self._depths if here.mtp_layers else (), len(here.layers)):
            ids_BS, targets_BS = batch.mtp[place - len(here.layers)]
            assert self.embedding is not None  # made with the chunk
            embedded_tH = self.embedding(ids_BS.flatten())
            again = Recompute.FULL in recompute.layer_recompute(self._run.mesh.layout, place)
            hidden_tH, *routed = depth(embedded_tH, hidden_tH, lie, again)
            losses += routed[::2]
            counts += routed[1::2]
            ahead_nll = (
                ahead_nll
                + self._loss(depth.final_norm, hidden_tH, targets_BS, whole=False)[0].sum()
            )
        aux = (
            torch.stack(losses)
            if losses
            else nll.new_zeros(0, len(aux_loss_coefficients(self._run.workload.loss)))
        )
        counted = torch.stack(counts) if counts else torch.zeros(0, 0, dtype=torch.int64)
        return ModelOutput(
            hidden_tH=x_tH,
            nll=nll,
            mtp_nll=ahead_nll,
            logits=seen,
            aux_losses=aux,
            expert_counts=counted,
        )

    def _checkpoints(self, numbers: Sequence[int]) -> Iterator[tuple[list[nn.Module], bool]]:
        """The layers of a chunk, those that one checkpoint of full recompute covers together, and
        whether it does."""
        layout = self._run.mesh.layout
        for place in range(0, len(numbers), layout.recompute_span):
            together = numbers[place : place + layout.recompute_span]
            again = Recompute.FULL in recompute.layer_recompute(layout, place)
            yield [self.layers[str(number)] for number in together], again

    def _through(
        self, layers: list[nn.Module], again: bool, batch: AttentionContext, x_tH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What the layers make of `x_tH`, and the auxiliary losses and the counts of each MoE layer
        among them."""
        if not again:
            return _in_turn(layers, [None] * len(layers), batch, x_tH)
        with self._run.counters.attribute_to(Module.NORM):
            decided = [RoutingDecisions() for _ in layers]
            out: tuple[torch.Tensor, ...] = run_checkpointed(
                self._run.counters, partial(_in_turn, layers, decided, batch), x_tH
            )
            return out

    def _loss(
        self, norm: Norm, x_tH: torch.Tensor, targets_BS: torch.Tensor, *, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.head or self.embedding
        assert table is not None  # made with the chunk
        with self._run.counters.attribute_to(Module.NORM):
            x_tH = norm(x_tH)
        return compute_token_loss(self._run, x_tH, table, targets_BS.flatten(), whole)


def _in_turn(
    layers: Sequence[nn.Module],
    decided: Sequence[RoutingDecisions | None],
    batch: AttentionContext,
    x_tH: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for layer, known in zip(layers, decided, strict=True):
        x_tH, *routed = layer(known, batch, x_tH)
        found += routed
    return x_tH, *found


def draw_initial_value(slot: NamedParameter, run: Runtime) -> torch.Tensor:
    """This rank's part of a fresh parameter, fp32, drawn by global name and global expert: the same
    in every layout.

    Matrices are normal with the model's initializer_range; those that write into the residual
    stream are scaled by 1 / sqrt(2 * layers) (GPT-2). Norm weights are 1, biases 0, attention sinks
    normal.
    """
    at = slot.placement
    if slot.name.endswith(".bias"):
        return torch.zeros(at.local_shape)
    if len(at.local_shape) == 1 and slot.name.endswith(".weight"):
        return torch.ones(at.local_shape)
    std = run.model.initializer_range
    if slot.name.endswith((".o.weight", ".down.weight")):
        std /= math.sqrt(2 * run.model.layers)
    value = torch.zeros(at.local_shape)
    mine = tuple(
        slice(offset, offset + size)
        for offset, size in zip(at.offsets, at.unpadded_shape, strict=True)
    )
    if ".experts." not in slot.name:
        value[tuple(map(slice, at.unpadded_shape))] = draw_normal(
            run.workload.seed, slot.name, at.global_shape, std
        )[mine]
        return value
    for place, expert in enumerate(at.row_indices or range(mine[0].start, mine[0].stop)):
        value[place] = draw_normal(
            run.workload.seed, f"{slot.name}[{expert}]", at.global_shape[1:], std
        )[mine[1:]]
    return value


def draw_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """A fresh tensor, decided by the job's seed and its own name."""
    seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
