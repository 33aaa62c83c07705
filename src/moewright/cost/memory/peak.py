"""Peak memory of pipeline ranks: states, activations, head, transients, and runtime overhead.

The bytes that parts of a stage keep are arrays over activation policies; an estimate has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot
from typing import Any

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.activations import (
    ActivationContext,
    ActivationPolicies,
    activation_context,
    layer_activations,
    mtp_bytes,
    outside_bytes,
    saved_rows,
    sum_by_module,
)
from moewright.cost.memory.buffers import (
    dispatcher_bytes,
    fsdp_buffer_bytes,
    fsdp_layer_bytes,
    gathered_bytes,
    head_placeholder_bytes,
    rank_layer_numel,
    resident_bytes,
    score_count,
)
from moewright.cost.memory.deferred_weights import Booking, head_owed_bytes, layer_owed_bytes
from moewright.cost.memory.fsdp_states import unit_state_rows
from moewright.cost.memory.model_states import (
    LINEAR_MODULES,
    BucketSet,
    checkpoint_copy_bytes,
    frozen_rows,
    moves_units,
    state_rows,
    step_gradient_bytes,
)
from moewright.cost.memory.replicas import replica_rows
from moewright.cost.memory.snapshots import RankTable, take_snapshots
from moewright.cost.routed_rows import is_moe_layer
from moewright.cost.stage_parts import Array, LayerPart, StageParts
from moewright.cost.symbols import Symbols
from moewright.cost.time.mixers import mixer_width
from moewright.rules import grid, routing
from moewright.rules.adapters import trains_module
from moewright.rules.delayed_scaling import delayed_scaling_rows
from moewright.rules.job import routed_rows
from moewright.rules.saved import recompute
from moewright.rules.timetable import schedule
from moewright.spec.layout import Layout, Overlap, Recompute
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import AttentionKind
from moewright.spec.plan import Verdict
from moewright.spec.workload import CrossEntropyKernel

_BF16_BYTES = 2
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The memory rows of one pipeline rank at its peak, and the standard deviation of their sum."""

    rows: tuple[MemoryRow, ...]
    sd_bytes: float

    @property
    def peak_bytes(self) -> int:
        """Sum what the device holds."""
        return sum(row.bytes for row in self.rows if row.component is not Component.HOST)


def steady_micro_batches(layout: Layout, micro_batches: int) -> int:
    """Return how many micro-batches reach the steady state, after which the peak does not grow."""
    if layout.schedule.splits_backward:
        return min(micro_batches, 4 * layout.pp)
    if layout.vpp == 1:
        return min(micro_batches, 2 * layout.pp)
    group = schedule.interleaved_group_size(layout)
    return min(micro_batches, 3 * group + micro_batches % group)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """The bytes that one layer and micro-batch takes, for each policy.

    `saved` [policies, modules] stays on the device for backward; `transient` [policies] is
    short-lived in backward; `offloaded` [policies, modules] goes to the host.
    """

    saved: Array
    transient: Array
    offloaded: Array


def rank_load(sym: Symbols) -> float:
    """Return the expert rows of a rank over the mean, as the symbols expect them."""
    even = routed_rows(sym.model, sym.workload, sym.layout, 1.0)
    return sym.R / even if even else 1.0


def layer_memory(
    context: ActivationContext, sym: Symbols, policies: ActivationPolicies, part: LayerPart
) -> LayerMemory:
    """Count what a layer takes under the load that the symbols expect."""
    even = routed_rows(sym.model, sym.workload, sym.layout, 1.0)
    load = sym.R / even if even else 1.0
    kept = layer_activations(context, policies, part, load=load)
    mlp = mlp_gradient_bytes(sym, part.layer)
    attention = attention_gradient_bytes(sym)
    # Modules are recomputed as backward comes to them, a whole layer (or span) at once.
    by_module = np.maximum(
        mlp + kept.recomputed - kept.recomputed_attention, attention + kept.recomputed_attention
    )
    whole = max(mlp, attention) + kept.recomputed * sym.layout.recompute_span
    transient = np.where(policies.recomputes_layers, whole, by_module) + gathered_hidden_bytes(sym)
    if Overlap.WGRAD in sym.layout.overlap:
        transient = transient + delayed_gradient_bytes(sym)
    saved = kept.saved + mtp_bytes(context) if part.is_mtp else kept.saved
    return LayerMemory(saved=saved, transient=transient, offloaded=kept.offloaded)


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """The bytes that every part of a model takes under some degrees and policies.

    `saved` [parts, policies, modules] is kept for backward. The bytes of a stage are sums over its
    parts, so the bytes at a moment are products of its counts of parts (MomentCounts) with the
    bytes of each part.
    """

    constants: Constants
    sym: Symbols
    parts: StageParts
    layers: tuple[LayerMemory, ...]
    saved: Array
    head: HeadBytes

    @cached_property
    def owed(self) -> Array:
        """What the weight gradients of every part wait with [parts, modules]."""
        job = self.sym.job
        bookings: list[tuple[Booking, ...]] = [
            layer_owed_bytes(
                job,
                part.layer,
                load=rank_load(self.sym),
            )
            for part in self.parts.layers
        ]
        bookings += [(), head_owed_bytes(job), ()]
        return np.array([sum_by_module(booking) for booking in bookings])

    @cached_property
    def saved_bytes(self) -> Array:
        """Sum what is saved over modules [parts, policies]."""
        return np.asarray(self.saved.sum(axis=2))

    @cached_property
    def live_prices(self) -> Array:
        """Return what the columns of `MomentCounts.live` but for the owed parts take.

        They are [parts + 2, policies].
        """
        passes = np.array([[self.head.forward], [self.head.weights]], dtype=float)
        return np.concatenate([self.saved_bytes, np.repeat(passes, self.saved.shape[1], axis=1)])

    @cached_property
    def fetched_prices(self) -> Array:
        """Return what the parts take that have come back from the host.

        Shape: [parts, policies, modules].
        """
        sent = np.stack([layer.offloaded for layer in self.layers])
        outside = np.zeros((self.parts.count - len(self.layers), *sent.shape[1:]))
        return np.concatenate([sent, outside])

    def live_bytes(self, live: Array, fetched: Array) -> Array:
        """Return the bytes kept at moments, short-lived logits included [moments, policies]."""
        count = self.parts.count
        kept, owed = np.split(live, [count + 2], axis=1)
        total = kept @ self.live_prices
        if owed.any():  # under schedules that split the backward
            total += (owed @ self.owed.sum(axis=1))[:, None]
        if len(fetched):
            total += fetched @ self.fetched_prices.sum(axis=2)
        return np.asarray(total)

    def transient_bytes(self, backward: Array, paired: Array, *, beside_layer: int) -> Array:
        """Return the bytes that are short-lived in backward at moments [moments, policies].

        They are those of the head or of the largest layer of the chunk with `beside_layer` more,
        whichever are more, and one more layer of a forward that runs beside the backward.
        """
        head_passes = backward[:, self.parts.head_columns].sum(axis=1)
        short = np.multiply.outer(self.head.backward * head_passes, np.ones(self.saved.shape[1]))
        for column, layer in enumerate(self.layers):
            of_layer = layer.transient + beside_layer
            np.maximum(short, (backward[:, column, None] > 0) * of_layer, out=short)
        if paired.any():
            short += np.floor(paired @ self.saved_bytes / self.parts.count_layers(paired)[:, None])
        return np.asarray(short)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentCounts:
    """The parts that are alive at the moments of a rank, as counts.

    `live` [moments, 2 parts + 2] counts the parts that are kept; the passes through the head of the
    forward that ends at the moment, and of the weight gradients that are computed; and the parts
    whose weight gradients wait. `fetched` [moments, parts] are those that have come back from the
    host (no rows where chunks are not fetched whole). `backward` [moments, parts] is the chunk
    whose backward runs. `paired` [moments, parts] is the chunk whose forward runs layer by
    layer beside that backward, of which one more layer is held.
    """

    live: Array
    fetched: Array
    backward: Array
    paired: Array


def count_moments(parts: StageParts, counts: Array, table: RankTable) -> MomentCounts:
    """Count the parts alive at the moments of a rank that holds `counts` [chunks, parts]."""
    moments = take_snapshots(table, counts, table.chunk)
    chunks = np.concatenate([counts, np.zeros((1, parts.count))])  # the last stands for none
    # The head's pass follows those of MTP depths, whose logits are kept by then.
    head_passes = [
        chunks[items][:, parts.head_columns].max(axis=1).clip(max=1)[:, None]
        for items in (moments.forward, moments.weights)
    ]
    return MomentCounts(
        live=np.concatenate([moments.live, *head_passes, moments.owed], axis=1),
        fetched=moments.fetched,
        backward=chunks[moments.backward],
        paired=chunks[moments.paired],
    )


def join_memory(
    constants: Constants, sym: Symbols, parts: StageParts, layers: Sequence[LayerMemory]
) -> ModelMemory:
    """Join the memory of the layers of a model with that of its other parts."""
    context = activation_context(constants, sym)
    policies = len(layers[0].saved)
    outside = np.repeat(outside_bytes(context)[:, None], policies, axis=1)
    return ModelMemory(
        constants=constants,
        sym=sym,
        parts=parts,
        layers=tuple(layers),
        saved=np.concatenate([np.stack([layer.saved for layer in layers]), outside]),
        head=head_bytes(constants, sym),
    )


def model_memory(
    constants: Constants, sym: Symbols, parts: StageParts, policies: ActivationPolicies
) -> ModelMemory:
    """Count what every part of a model takes under each policy."""
    context = activation_context(constants, sym)
    layers = [layer_memory(context, sym, policies, part) for part in parts.layers]
    return join_memory(constants, sym, parts, layers)


def activation_rows(memory: ModelMemory, counts: Array, table: RankTable) -> tuple[MemoryRow, ...]:
    """Return the memory rows at the fullest moment of a rank, under the first policy.

    `counts` [chunks, parts] is what the rank holds. Short-lived logits are booked as logits,
    short-lived bytes of backward as transient.
    """
    moments = count_moments(memory.parts, counts, table)
    live = memory.live_bytes(moments.live, moments.fetched)[:, 0]
    transient = memory.transient_bytes(
        moments.backward, moments.paired, beside_layer=fsdp_layer_bytes(memory.sym)
    )[:, 0]
    peak = int((live + transient).argmax())
    count = memory.parts.count
    kept, passes, owed = np.split(moments.live[peak], [count, count + 2])
    on_device = kept @ memory.saved[:, 0] + owed @ memory.owed
    if len(moments.fetched):
        on_device += moments.fetched[peak] @ memory.fetched_prices[:, 0]
    return saved_rows(
        on_device,
        logits=int(passes[0]) * memory.head.forward,
        transient=int(transient[peak]) + int(passes[1]) * memory.head.weights,
    )


def hosted_activation_bytes(memory: ModelMemory, counts: Array, table: RankTable) -> int:
    """Return the most that the activations of a rank take on the host, under the first policy.

    `counts` [chunks, parts] is what the rank holds.
    """
    sent = np.array([layer.offloaded[0].sum() for layer in memory.layers])
    if not sent.any():
        return 0
    moments = take_snapshots(table, counts, table.chunk)
    away = moments.live
    if len(moments.fetched):
        away = away - moments.fetched
    return int((away[:, : len(sent)] @ sent).max())


def rank_memory(
    memory: ModelMemory,
    pp_rank: int,
    sets: Sequence[BucketSet],
    *,
    counts: Array,
    table: RankTable,
) -> RankMemory:
    """Return the peak memory of a pipeline rank under the first policy.

    The rank holds `counts` [chunks, parts] and the parameters of bucket `sets`, and runs `table`.
    """
    sym, constants = memory.sym, memory.constants
    model, workload, layout = sym.model, sym.workload, sym.layout
    frozen_nbytes = constants["frozen_weight_bytes"]
    if moves_units(layout, trained=sym.trained_share):
        states = list(unit_state_rows(sym.job, grid.stage_rank(layout, pp_rank)))
    else:
        states = list(
            state_rows(
                workload, layout, sets, trained=sym.trained_share, frozen_nbytes=frozen_nbytes
            )
        )
    if workload.fine_tuning.freeze:
        states += frozen_rows(sym.job, grid.stage_rank(layout, pp_rank))
    on_host = [row for row in states if row.component is Component.HOST]
    states = [row for row in states if row.component is not Component.HOST]
    states += replica_rows(sym.job, pp_rank)
    states += delayed_scaling_rows(sym.job, pp_rank)
    if workload.precision.is_narrow:
        share = constants.low_precision_bytes("weight_copies", sym.dtype) / sym.c
        states = list(add_low_precision_copies(states, share))
    own = sum(bucket_set.numel // bucket_set.shards for bucket_set in sets)
    at_step = int(step_gradient_bytes(workload, layout, own))
    activations = activation_rows(memory, counts, table)
    away = hosted_activation_bytes(memory, counts, table)
    on_host.append(MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=away))
    if at_step > sum(row.bytes for row in activations):
        activations = (
            MemoryRow(component=Component.TRANSIENT, module=Module.OTHER, bytes=at_step),
        )
    allocated = [*states, *activations]
    columns = np.flatnonzero(counts[:, : len(memory.parts.layers)].any(axis=0))
    has_experts = {memory.parts.layers[column].kind.is_moe for column in columns}
    has_head = bool(counts[:, memory.parts.head_columns].any())
    resident = resident_bytes(constants, sym, has_experts, has_head=has_head)
    gathered = 0
    if layout.zero >= 2:
        layer_numel = rank_layer_numel(model, layout, pp_rank)[None]
        gathered = int(gathered_bytes(workload, layer_numel, zero=layout.zero)[0])
        gathered += fsdp_buffer_bytes(sym)
    copied = checkpoint_copy_bytes(workload, layout, sets)
    if sym.is_fused:
        on_host.append(MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=copied))
    else:
        resident += copied  # a CPU's memory is the host's
    total = sum(row.bytes for row in allocated) + resident + gathered
    device = runtime_overhead(
        constants, total, groups=count_communicators(layout), buffers=dispatcher_bytes(sym)
    )
    transient = sum(row.bytes for row in allocated if row.component is Component.TRANSIENT)
    allowances = (
        (Component.BUFFERS, resident),
        (Component.TRANSIENT, transient + gathered),
        (Component.FRAGMENTATION, round(device.reserved_bytes)),
        (Component.COMMUNICATION, round(device.communication_bytes)),
    )
    rows = [
        *(row for row in allocated if row.component is not Component.TRANSIENT),
        *(
            MemoryRow(component=component, module=Module.OTHER, bytes=nbytes)
            for component, nbytes in allowances
        ),
        *on_host,
    ]
    return RankMemory(
        rows=tuple(row for row in sum_memory(rows) if row.bytes), sd_bytes=device.sd_bytes
    )


def sum_memory(rows: Iterable[MemoryRow]) -> tuple[MemoryRow, ...]:
    """Return one row for each component and module.

    A module of which fully_shard cuts only a part has rows of both kinds of state.
    """
    sums: dict[tuple[Component, Module], int] = {}
    for row in rows:
        key = row.component, row.module
        sums[key] = sums.get(key, 0) + row.bytes
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOverhead:
    """What a device holds beyond what is allocated, and the standard deviation of the whole."""

    reserved_bytes: Any  # floats, or arrays of one shape
    communication_bytes: Any
    sd_bytes: Any


def runtime_overhead(
    constants: Constants, allocated: Any, *, groups: Any, buffers: int
) -> RuntimeOverhead:
    """Return the overhead of `allocated` bytes and of so many communicating process `groups`.

    Both may be arrays of one shape. `buffers` are the bytes that a dispatcher registers.
    """
    shares_sd = hypot(constants["reserved_share_sd"], constants["allocated_share_sd"])
    allocated_variance = (shares_sd * allocated) ** 2
    communicator_variance = (groups * constants["communicator_bytes_sd"]) ** 2
    return RuntimeOverhead(
        reserved_bytes=constants["reserved_share"] * allocated
        + constants["context_bytes"]
        + constants["stack_bytes"],
        communication_bytes=groups * constants["communicator_bytes"] + buffers,
        sd_bytes=(allocated_variance + communicator_variance) ** 0.5,
    )


def add_low_precision_copies(states: Sequence[MemoryRow], share: float) -> Iterator[MemoryRow]:
    """Yield the states with 8-bit copies of linear weights, `share` of the weights.

    The copies stay for all micro-batches.
    """
    for row in states:
        copied = row.component is Component.WEIGHTS and row.module in LINEAR_MODULES
        yield replace(row, bytes=round(row.bytes * (1 + share))) if copied else row


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadBytes:
    """Short-lived bytes of a pass through the head.

    They are there as its forward ends, as its backward runs, and as its weight gradient is computed
    in a row of its own.
    """

    forward: int
    backward: int
    weights: int


def head_bytes(constants: Constants, sym: Symbols) -> HeadBytes:
    """Return the short-lived bytes of a pass through the head.

    Fused stacks hold bf16 logits and an fp32 copy in forward (6 bytes a logit; 2 when fused in
    place); in backward the logits' gradient, the head's weight gradient and the gathered input. The
    larger of the two is booked to forward. The engine's own cross-entropy keeps the logits as a
    saved activation; in backward it holds their gradient and the head's weight gradient. Under
    recompute=loss both hold a chunk of the logits, in backward its gradient too, and sum the
    gradient of the head's input in fp32.
    """
    layout = sym.layout
    logit_bytes = {
        CrossEntropyKernel.FP32: constants["logit_bytes"],
        CrossEntropyKernel.COMPILED: constants["logit_bytes"] + _FP32_BYTES,
        CrossEntropyKernel.IN_PLACE: sym.c,
    }[sym.workload.trainer.cross_entropy]
    logits = sym.T * sym.model.vocab_size // layout.tp
    head_input = sym.c * sym.T * sym.model.hidden_size
    head_weight = _BF16_BYTES * sym.model.vocab_size * sym.model.hidden_size // layout.tp
    is_trained = trains_module(sym.workload.fine_tuning, Module.HEAD)
    if head_placeholder_bytes(constants, sym) or not is_trained:
        head_weight = 0  # it stays (cost.memory.buffers), or there is none
    if Recompute.LOSS in layout.recompute:
        piece = sym.T * recompute.loss_chunk_columns(sym.model, layout)
        summed = 4 * sym.T * sym.model.hidden_size
        if not sym.is_fused:
            return HeadBytes(
                forward=sym.c * piece,
                backward=2 * sym.c * piece + head_weight + summed,
                weights=0,
            )
        fused = max(round(logit_bytes * piece), 4 * piece + head_weight + head_input + summed)
        return HeadBytes(forward=fused, backward=0, weights=0)
    if not sym.is_fused:
        return HeadBytes(forward=0, backward=sym.c * logits + head_weight, weights=head_weight)
    fused = max(round(logit_bytes * logits), 2 * logits + head_weight + head_input)
    return HeadBytes(forward=fused, backward=0, weights=head_weight)


def gathered_hidden_bytes(sym: Symbols) -> int:
    """Return the bytes of the hidden state that a layer's backward gathers, twice under TP."""
    return sym.c * sym.T * sym.model.hidden_size * (2 if sym.layout.tp > 1 else 1)


def mlp_gradient_bytes(sym: Symbols, layer: int) -> int:
    """Return the bytes of the gradients that the backward of a layer's MLP or experts holds.

    These are the gradients of the first projection's output, of the activation and of the rows that
    enter the MLP, and rows as ETP ranks gather them.
    """
    model, layout = sym.model, sym.layout
    # The outputs of gate and up (or of up alone) and of the activation, in widths of the MLP.
    ffn_widths = 3 if model.gated else 2
    if is_moe_layer(model, layer) and model.moe is not None:
        row_width = ffn_widths * model.moe.ffn_size // layout.etp + model.expert_width
        gradients = sym.c * sym.R * row_width
        if layout.etp > 1:
            etp_rows = routing.etp_gathered_rows(sym.workload, layout, sym.R)
            gradients += sym.c * model.expert_width * etp_rows
    elif model.has_mlp(layer):
        gradients = sym.c * sym.T * ffn_widths * model.dense_ffn_size // layout.tp
    else:
        gradients = sym.c * sym.T * sum(mixer_width(model, layer)) // layout.tp
    return gradients


def attention_gradient_bytes(sym: Symbols) -> int:
    """Return the bytes of gradients that attention with whole score matrices holds at once.

    Those of the probabilities and of the scores stand side by side. Where probabilities are
    dropped, what was left of them is free by then, so there is one more matrix, not two. Attention
    in tiles holds less than an MLP; its gradients are not counted.
    """
    trainer = sym.workload.trainer
    if not trainer.attention_backend.keeps_scores:
        return 0
    return (1 if trainer.attention_dropout else 2) * sym.c * score_count(sym)


def delayed_gradient_bytes(sym: Symbols) -> int:
    """Return the bytes of the output gradients that delayed weight gradients need.

    They are the output gradients of attention's projections and of shared experts, kept until the
    weight gradients run in the next layer. The inputs that weight gradients need as well are
    already counted in the one more layer that overlapped expert communication holds.
    """
    model, layout, spec = sym.model, sym.layout, sym.model.attention
    if spec.kind is AttentionKind.MLA:
        sharded_width = spec.q_width + spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        replicated_width = spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_head_dim
    else:
        sharded_width = spec.q_width + 2 * spec.kv_width
        replicated_width = 0
    shared_ffn = model.moe.shared_ffn_size if model.moe else 0
    sharded_width += (2 if model.gated else 1) * shared_ffn
    # The outputs of attention and of shared experts, each as wide as the hidden state.
    outputs = (2 if shared_ffn else 1) * sym.T * model.hidden_size
    sharded = sym.T * sharded_width // layout.tp
    return sym.c * (sharded + sym.t * replicated_width + outputs)


def count_communicators(layout: Layout) -> int:
    """Count the process groups that move data, each of which keeps buffers of its own.

    A pipeline has three (stages, model, embedding), expert parallelism two (with and without tensor
    parallelism).
    """
    sizes = (
        (layout.tp, 1),
        (layout.cp, 1),
        (layout.pp, 3),
        (layout.ep, 2),
        (layout.dp, 1),
        (layout.world_size, 1),
    )
    return sum(groups for size, groups in sizes if size > 1)


def memory_verdict(margin_bytes: float, spread_bytes: float) -> Verdict:
    """Return the verdict on a margin; it is uncertain within one standard deviation of the limit.

    `spread_bytes` is that standard deviation.
    """
    if abs(margin_bytes) < spread_bytes:
        return Verdict.UNCERTAIN
    return Verdict.FITS if margin_bytes >= 0 else Verdict.OOM
