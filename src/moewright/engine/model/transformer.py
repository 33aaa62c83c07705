"""The decoder: the part of the model that one rank holds.

It goes from token ids to the loss of each token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.memory.saved_tensors import RoutingDecisions, run_checkpointed
from moewright.engine.model.attention import MicroBatchContext, MicroBatchContextBuilder
from moewright.engine.model.layer import TransformerLayer
from moewright.engine.model.layers import (
    Embedding,
    HiddenNorm,
    NamedParameter,
    OutputHead,
    Weight,
    compute_token_loss,
    list_parameters,
)
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.mtp import MtpDepth, share_weights
from moewright.engine.model.residual_streams import StreamMix
from moewright.engine.model.router_losses import aux_loss_coefficients
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import adapter_shapes, has_adapter, is_adapter, is_trained, trains_all
from moewright.rules.saved.recompute import layer_recompute
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import RecurrentKind

# What of a model trains: all of it, some parts, or adapters beside frozen weights.


def apply_fine_tuning(runtime: Runtime, model: torch.nn.Module) -> None:
    """Freeze the weights that the workload does not train, and make their adapters."""
    fine_tuning = runtime.workload.fine_tuning
    if trains_all(fine_tuning):
        return
    for parameter in list_parameters(model):
        weight = parameter.owner
        weight.is_trained = is_trained(fine_tuning, parameter.name)
        placement = weight.placement
        if not has_adapter(parameter.name, parameter.module, placement.global_shape, fine_tuning):
            continue
        first, second = adapter_shapes(
            placement.global_shape, placement.sharding, fine_tuning.lora_rank
        )
        experts = weight.placement.row_indices
        weight.lora_a = Weight(runtime, *first[0], sharding=first[1], row_indices=experts)
        weight.lora_b = Weight(runtime, *second[0], sharding=second[1], row_indices=experts)
        weight.lora_factor = fine_tuning.lora_alpha / fine_tuning.lora_rank


# The ranges of a fresh head's decay rate, exp(A_log), in a delta net and in Mamba-2.
_DELTA_RATES = (0.01, 16.0)
_MAMBA_RATES = (1.0, 16.0)
_MAMBA_STEPS = (1e-3, 0.1)  # of its time step, softplus(dt_bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput:
    """The output of one chunk for one micro-batch.

    `hidden_tH` is the hidden state [t,H], `nll` [T] fp32 is 0 where there is no target, `mtp_nll`
    is the sum of the nll of the chunk's MTP depths. Its MoE layers give `aux_losses` [layers, 4],
    as a Router returns them, and `expert_counts` [layers, E].

    `logits` [T,V] are those that backward keeps, detached, of this rank's part of the vocabulary;
    empty where none are kept, unless the caller needs them. `nll` and `logits` are empty after a
    chunk without the loss. All ranks of a TP group have the same nll; their auxiliary losses and
    counts add up.
    """

    hidden_tH: torch.Tensor
    nll: torch.Tensor
    mtp_nll: torch.Tensor
    logits: torch.Tensor
    aux_losses: torch.Tensor
    expert_counts: torch.Tensor


class _RouterResults:
    """The auxiliary losses and expert counts of the MoE layers of a chunk, in order."""

    def __init__(self) -> None:
        self._aux_losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def add(self, results: Sequence[torch.Tensor]) -> None:
        """Add what layers return beside the hidden state: losses and counts by turns."""
        self._aux_losses += results[::2]
        self._counts += results[1::2]

    def stack_aux_losses(self, empty: torch.Tensor) -> torch.Tensor:
        if self._aux_losses:
            return torch.stack(self._aux_losses)
        return empty

    def stack_counts(self) -> torch.Tensor:
        if self._counts:
            return torch.stack(self._counts)
        return torch.zeros(0, 0, dtype=torch.int64)


class _StartGraph(ReleasingFunction):
    """The tensor x as one that requires gradients, which end here.

    A leaf would gather its gradient, and both would live until the backward of the chunk ends.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class Transformer(nn.Module):
    """The chunks of the model that one rank holds.

    Layers keep their global numbers; a table that is both embedding and head is held once.
    """

    def __init__(self, runtime: Runtime, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._runtime = runtime
        self.chunks = tuple(chunks)
        is_tied = runtime.model.tie_embeddings
        has_loss = any(chunk.has_loss for chunk in chunks)
        has_mtp = any(chunk.mtp_layers for chunk in chunks)
        has_embedding = any(chunk.has_embedding for chunk in chunks)
        # A tied table is the head's too, and MTP depths embed the tokens ahead.
        needs_embedding = has_embedding or has_mtp or (has_loss and is_tied)
        needs_head = (has_loss or has_mtp) and not is_tied
        self._contexts = MicroBatchContextBuilder(runtime)
        self.embedding = Embedding(runtime) if needs_embedding else None
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(runtime, number)
                for chunk in chunks
                for number in chunk.layers
            }
        )
        self.final_norm = HiddenNorm(runtime) if has_loss else None
        self.head = OutputHead(runtime) if needs_head else None
        self.final_streams: StreamMix | None = None
        if has_loss and runtime.model.residual_streams > 1:
            self.final_streams = StreamMix(runtime, collapses_only=True)
        depth_numbers = [
            number
            for chunk in chunks
            for number in chunk_layers(runtime.model, chunk)[len(chunk.layers) :]
        ]
        self._depths = tuple(
            MtpDepth(runtime, TransformerLayer(runtime, number)) for number in depth_numbers
        )
        if runtime.model.mtp_shared:
            for depth in self._depths[1:]:
                share_weights(depth, self._depths[0])
        self.mtp = nn.ModuleDict({str(index): depth for index, depth in enumerate(self._depths)})
        # Last, for it goes through all parameters.
        apply_fine_tuning(runtime, self)

    def forward(
        self,
        batch: MicroBatch,
        *,
        chunk: int = 0,
        hidden_tH: torch.Tensor | None = None,
        first_sequence: int | None = None,
        needs_logits: bool = False,
        objective_weight: float = 0.0,
    ) -> ModelOutput:
        """Run one chunk, from the hidden state after the chunk before it.

        The chunk that holds the embedding starts from the ids. `first_sequence` and
        `objective_weight` as in MicroBatchContext; `needs_logits`: return all logits of this rank,
        also where the layout keeps none.
        """
        held_chunk = self.chunks[chunk]
        x_tH = hidden_tH
        if held_chunk.has_embedding:
            x_tH = self._embed(batch.inputs)
            if self._runtime.model.residual_streams > 1:
                # The streams begin as copies of the embedding.
                x_tH = x_tH.repeat(1, self._runtime.model.residual_streams)
        assert x_tH is not None  # only the first chunk starts from ids
        results = _RouterResults()
        context = self._contexts.build(
            len(batch.inputs), batch.segments, first_sequence, batch.counted
        )
        context = replace(
            context, objective_weight=objective_weight, ids=self._own_ids(batch.inputs)
        )
        for layers, recomputes in self._checkpoints(held_chunk.layers):
            x_tH, *router_results = self._run_span(layers, recomputes, context, x_tH)
            results.add(router_results)
        nll = x_tH.new_zeros(0, dtype=torch.float32)
        logits = x_tH.new_zeros(0)
        if held_chunk.has_loss:
            assert self.final_norm is not None  # made with the chunk
            nll, logits = self._compute_loss(
                self.final_norm, self.final_streams, x_tH, batch.targets, needs_logits=needs_logits
            )
        mtp_nll = nll.new_zeros(())
        if held_chunk.mtp_layers:
            mtp_nll = self._run_depths(batch, len(held_chunk.layers), context, x_tH, results)
        no_losses = nll.new_zeros(0, len(aux_loss_coefficients(self._runtime.workload.loss)))
        return ModelOutput(
            hidden_tH=x_tH,
            nll=nll,
            mtp_nll=mtp_nll,
            logits=logits,
            aux_losses=results.stack_aux_losses(no_losses),
            expert_counts=results.stack_counts(),
        )

    def chunk_layers(self) -> tuple[tuple[nn.Module, ...], ...]:
        """Return the layers of each chunk, those of MTP depths last."""
        return tuple(
            (
                *(self.layers[str(number)] for number in chunk.layers),
                *(depth.layer for depth in self._depths[: chunk.mtp_layers]),
            )
            for chunk in self.chunks
        )

    def _own_ids(self, ids_BS: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's tokens between blocks, where some layers choose experts by them."""
        moe = self._runtime.model.moe
        if moe is None or not moe.router.hash_layers:
            return None
        layout = self._runtime.mesh.layout
        ids_T = ids_BS.flatten()
        if not layout.sp:
            return ids_T
        return ids_T.chunk(layout.tp)[self._runtime.mesh.coordinate("tp")]

    def _embed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None  # made with the chunk
        embedded_tH: torch.Tensor = self.embedding(ids_BS.flatten())
        factor = self._runtime.model.multipliers.embedding
        if factor != 1:
            embedded_tH = embedded_tH * factor
        if embedded_tH.requires_grad or not torch.is_grad_enabled():
            return embedded_tH
        # A checkpoint has gradients for its weights alone where its input has them.
        anchor = embedded_tH.new_empty(0, requires_grad=True)
        started: torch.Tensor = _StartGraph.apply(embedded_tH, anchor)
        return started

    def _run_depths(
        self,
        batch: MicroBatch,
        layers_before: int,
        context: MicroBatchContext,
        hidden_tH: torch.Tensor,
        results: _RouterResults,
    ) -> torch.Tensor:
        """Run the MTP depths, which follow the chunk's layers, and return the sum of their nll.

        The results of their routers are added to `results`.
        """
        layout = self._runtime.mesh.layout
        mtp_nll = hidden_tH.new_zeros((), dtype=torch.float32)
        for index, depth in enumerate(self._depths):
            ids_BS, targets_BS = batch.mtp[index]
            embedded_tH = self._embed(ids_BS)
            recomputes = Recompute.FULL in layer_recompute(layout, layers_before + index)
            hidden_tH, *router_results = depth(embedded_tH, hidden_tH, context, recomputes)
            results.add(router_results)
            nll, _ = self._compute_loss(
                depth.final_norm, depth.final_streams, hidden_tH, targets_BS, needs_logits=False
            )
            mtp_nll = mtp_nll + nll.sum()
        return mtp_nll

    def _checkpoints(self, numbers: Sequence[int]) -> Iterator[tuple[list[nn.Module], bool]]:
        """Yield the layers of each checkpoint of full recompute, and whether it recomputes."""
        layout = self._runtime.mesh.layout
        for place in range(0, len(numbers), layout.recompute_span):
            span = numbers[place : place + layout.recompute_span]
            recomputes = Recompute.FULL in layer_recompute(layout, place)
            yield [self.layers[str(number)] for number in span], recomputes

    def _run_span(
        self,
        layers: list[nn.Module],
        recomputes: bool,
        context: MicroBatchContext,
        x_tH: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the hidden state after the layers, and the results of their MoE layers."""
        if not recomputes:
            return _run_layers(layers, [None] * len(layers), context, x_tH)
        counters = self._runtime.counters
        with counters.scopes.enter(Module.NORM):
            decisions = [RoutingDecisions() for _ in layers]
            block = partial(_run_layers, layers, decisions, context)
            out: tuple[torch.Tensor, ...] = run_checkpointed(counters, block, x_tH)
            return out

    def _compute_loss(
        self,
        norm: HiddenNorm,
        streams: StreamMix | None,
        x_tH: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        needs_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.head or self.embedding
        assert table is not None  # made with the chunk
        if streams is not None:
            x_tH, _ = streams.collapse(x_tH)
        with self._runtime.counters.scopes.enter(Module.NORM):
            x_tH = norm(x_tH)
            divisor = self._runtime.model.multipliers.logits
            if divisor != 1:
                x_tH = x_tH / divisor
        return compute_token_loss(self._runtime, x_tH, table, targets_BS.flatten(), needs_logits)


def _run_layers(
    layers: Sequence[nn.Module],
    decisions: Sequence[RoutingDecisions | None],
    context: MicroBatchContext,
    x_tH: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    results: list[torch.Tensor] = []
    for layer, layer_decisions in zip(layers, decisions, strict=True):
        x_tH, *router_results = layer(layer_decisions, context, x_tH)
        results += router_results
    return x_tH, *results


def draw_initial_value(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
    """Draw this rank's part of a fresh parameter, fp32, by its global name and global expert.

    So it is the same in every layout. Matrices are normal with the model's initializer_range; those
    that write into the residual stream are scaled by 1 / sqrt(2 * layers) (GPT-2). Norm weights are
    1 (0 where they are centred there), biases 0, attention sinks normal; decay rates of recurrent
    layers are uniform. Scales of residual streams are 1, and positions in a compressed block 0.
    Time steps begin at softplus(1) (Qwen3-Next), those of Mamba-2 uniform in their logarithms, and
    its skips D at 1 (Megatron-LM). Adapters begin without effect: the second matrix is 0.
    """
    name = parameter.name
    placement = parameter.placement
    if name.endswith((".bias", "position")):
        return torch.zeros(placement.local_shape)
    if len(placement.local_shape) == 1 and name.endswith(".weight"):
        is_centered = runtime.model.zero_centered_norms and not name.endswith(
            ".attention.norm.weight"
        )
        return torch.full(placement.local_shape, 0.0 if is_centered else 1.0)
    recurrent = runtime.model.recurrent
    is_mamba = recurrent is not None and recurrent.kind is RecurrentKind.MAMBA2
    if name.endswith((".D", "streams.scale")) or (name.endswith(".dt_bias") and not is_mamba):
        return torch.ones(placement.local_shape)
    std = runtime.model.initializer_range
    if is_adapter(name):
        if ".lora_b." in name:
            return torch.zeros(placement.local_shape)
        std = 1 / math.sqrt(3 * placement.global_shape[-1])  # that of PEFT's uniform draw
    if name.endswith((".o.weight", ".down.weight")):
        std /= math.sqrt(2 * runtime.model.layers)
    seed = runtime.workload.seed
    value = torch.zeros(placement.local_shape)
    box = tuple(
        slice(offset, offset + size)
        for offset, size in zip(placement.offsets, placement.unpadded_shape, strict=True)
    )
    if ".experts." not in name:
        unpadded = tuple(map(slice, placement.unpadded_shape))
        is_rate = name.endswith((".A_log", ".dt_bias"))
        drawn = draw_normal(seed, name, placement.global_shape, 1.0 if is_rate else std)
        if name.endswith(".A_log"):
            low, high = _MAMBA_RATES if is_mamba else _DELTA_RATES
            # The distribution function makes a normal draw uniform, so that one generator serves
            # all.
            drawn = torch.log(low + (high - low) * torch.special.ndtr(drawn))
        elif is_rate:
            low, high = map(math.log, _MAMBA_STEPS)
            steps = (low + (high - low) * torch.special.ndtr(drawn)).exp()
            drawn = steps.expm1().log()  # the inverse of a softplus
        value[unpadded] = drawn[box]
        return value
    experts = placement.row_indices or range(box[0].start, box[0].stop)
    # One by one, so that a rank draws its own experts alone, wherever they lie.
    for row, expert in enumerate(experts):
        drawn = draw_normal(seed, f"{name}[{expert}]", placement.global_shape[1:], std)
        value[row] = drawn[box[1:]]
    return value


def draw_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """Draw a normal tensor that the job's seed and its own name decide."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
