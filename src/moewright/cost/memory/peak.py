"""Peak memory of pipeline ranks: states, activations, head, transients, and runtime overhead.

The bytes that parts of a stage keep are arrays over activation policies; an estimate has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.activations import (
    MODULES,
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
    fsdp_layer_bytes,
    head_placeholder_bytes,
    score_count,
)
from moewright.cost.memory.deferred_weights import Booking, head_owed_bytes, layer_owed_bytes
from moewright.cost.memory.peak_terms import (
    OPTIMIZER_TERMS,
    RESIDENT_TERMS,
    book_terms,
    count_communicators,
    runtime_overhead,
)
from moewright.cost.memory.rank_batch import EVERY_MODULE, Booked, StageRank
from moewright.cost.memory.snapshots import RankTable, take_snapshots
from moewright.cost.stage_parts import Array, LayerPart, StageParts
from moewright.cost.symbols import Symbols
from moewright.cost.time.mixers import mixer_width
from moewright.rules import routing
from moewright.rules.adapters import trains_module
from moewright.rules.saved import recompute
from moewright.rules.timetable import schedule
from moewright.spec.layout import Layout, Overlap, Recompute
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import AttentionKind
from moewright.spec.plan import Verdict
from moewright.spec.units import BF16_BYTES, FP32_BYTES
from moewright.spec.workload import CrossEntropyKernel


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The memory rows of one pipeline rank at its peak, and the standard deviation of their sum."""

    rows: tuple[MemoryRow, ...]
    sd_bytes: float

    @property
    def peak_bytes(self) -> int:
        """Sum what the device holds."""
        return device_total(self.rows)


def steady_micro_batches(layout: Layout, micro_batches: int) -> int:
    """Return how many micro-batches reach the steady state, after which the peak does not grow."""
    if layout.schedule.splits_backward:
        return min(micro_batches, 4 * layout.pp)
    if layout.vpp == 1:
        return min(micro_batches, 2 * layout.pp)
    group = schedule.interleaved_group_size(layout)
    # Whole groups and the rest of the last: a timetable with another remainder has other rows.
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


def layer_memory(
    context: ActivationContext, sym: Symbols, policies: ActivationPolicies, part: LayerPart
) -> LayerMemory:
    """Count what a layer takes under the load that the symbols expect."""
    load = sym.peak_load
    kept = layer_activations(context, policies, part, load=load)
    mlp = mlp_gradient_bytes(sym, part.layer)
    attention = attention_gradient_bytes(sym)
    # Modules are recomputed as backward comes to them, a whole layer (or span) at once.
    by_module = np.maximum(
        mlp + kept.recomputed - kept.recomputed_attention, attention + kept.recomputed_attention
    )
    whole = max(mlp, attention) + kept.recomputed * sym.layout.recompute_span
    transient = np.where(policies.recomputes_layers, whole, by_module) + gathered_hidden_bytes(sym)
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
    # The bytes of one of what each of LIVE_TERMS counts [counted, policies or 1], once asked for.
    _live_prices: dict[int, Array] = field(default_factory=dict, init=False)

    @cached_property
    def owed(self) -> Array:
        """What the weight gradients of every part wait with [parts, modules]."""
        job = self.sym.job
        bookings: list[tuple[Booking, ...]] = [
            layer_owed_bytes(
                job,
                part.layer,
                load=self.sym.peak_load,
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
    def fetched(self) -> Array:
        """What the parts take that have come back from the host [parts, policies, modules]."""
        sent = np.stack([layer.offloaded for layer in self.layers])
        outside = np.zeros((self.parts.count - len(self.layers), *sent.shape[1:]))
        return np.concatenate([sent, outside])

    def live_bytes(self, moments: AliveCounts) -> Array:
        """Return the bytes kept at moments, short-lived logits included [moments, policies]."""
        total = np.zeros((len(moments.kept), self.saved.shape[1]))
        for place, term in enumerate(LIVE_TERMS):
            counts = term.count(moments)
            if counts.any():  # some are there under some schedules alone
                if place not in self._live_prices:
                    self._live_prices[place] = term.nbytes(self).sum(axis=2)
                total += counts @ self._live_prices[place]
        return total

    def transient_bytes(self, backward: Array, paired: Array, *, beside_layer: int) -> Array:
        """Return the bytes that are short-lived in backward at moments [moments, policies].

        They are those of the head or of the largest layer of the chunk with `beside_layer` more,
        whichever are more, and one more layer of a forward that runs beside the backward.
        """
        head_passes = backward[:, self.parts.head_columns].sum(axis=1)
        # The passes of MTP depths and of the head hold the gradients of their logits at once.
        short = np.multiply.outer(self.head.backward * head_passes, np.ones(self.saved.shape[1]))
        for column, layer in enumerate(self.layers):
            of_layer = layer.transient + beside_layer
            np.maximum(short, (backward[:, column, None] > 0) * of_layer, out=short)
        if paired.any():
            short += np.floor(paired @ self.saved_bytes / self.parts.count_layers(paired)[:, None])
        return np.asarray(short)


@dataclass(frozen=True, kw_only=True, slots=True)
class AliveCounts:
    """How many of what is kept are alive at the moments of ranks.

    `kept` [moments, parts] counts the parts that forwards have kept; `head_forward` and
    `head_weights` [moments, 1] the passes through the head of the forward that ends at the moment,
    and of the weight gradients that are computed; `owed` [moments, parts] the parts whose weight
    gradients wait; `fetched` [moments, parts] those that have come back from the host.
    """

    kept: Array
    head_forward: Array
    head_weights: Array
    owed: Array
    fetched: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTerm:
    """A term of what the moments of a timetable keep: how many are alive, and what one takes.

    `count` returns [moments, counted], `nbytes` [counted, policies or 1, modules].
    """

    count: Callable[[AliveCounts], Array]
    nbytes: Callable[[ModelMemory], Array]
    component: Component = Component.ACTIVATIONS


# What comes and goes with micro-batches, but for what one backward alone holds
# (ModelMemory.transient_bytes). An estimate books it in rows, a search sums it.
LIVE_TERMS: tuple[LiveTerm, ...] = (
    LiveTerm(count=lambda alive: alive.kept, nbytes=lambda memory: memory.saved),
    LiveTerm(
        count=lambda alive: alive.head_forward,
        nbytes=lambda memory: _in_module(memory.head.forward, Module.HEAD),
    ),
    LiveTerm(
        count=lambda alive: alive.head_weights,
        nbytes=lambda memory: _in_module(memory.head.weights, Module.OTHER),
        component=Component.TRANSIENT,
    ),
    LiveTerm(count=lambda alive: alive.owed, nbytes=lambda memory: memory.owed[:, None]),
    LiveTerm(count=lambda alive: alive.fetched, nbytes=lambda memory: memory.fetched),
)


def _in_module(nbytes: int, module: Module) -> Array:
    """Return bytes as those of one thing that belongs to a module [1, 1, modules]."""
    return np.where(np.array(MODULES) == module, float(nbytes), 0.0)[None, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentCounts:
    """The parts that are alive at the moments of a rank, as counts.

    `live` [moments, 2 parts + 2] has the columns of AliveCounts but for `fetched`, in their order;
    `fetched` [moments, parts] has no rows where chunks are not fetched whole. `backward` [moments,
    parts] is the chunk whose backward runs. `paired` [moments, parts] is the chunk whose forward
    runs layer by layer beside that backward, of which one more layer is held.
    """

    live: Array
    fetched: Array
    backward: Array
    paired: Array


def split_counts(live: Array, fetched: Array) -> AliveCounts:
    """Return what the columns of MomentCounts count."""
    count = live.shape[1] // 2 - 1
    kept, head_forward, head_weights, owed = np.split(live, [count, count + 1, count + 2], axis=1)
    return AliveCounts(
        kept=kept,
        head_forward=head_forward,
        head_weights=head_weights,
        owed=owed,
        fetched=fetched if len(fetched) else np.broadcast_to(0.0, kept.shape),
    )


def count_moments(parts: StageParts, counts: Array, table: RankTable) -> MomentCounts:
    """Count the parts alive at the moments of a rank that holds `counts` [chunks, parts]."""
    moments = take_snapshots(table, counts, table.chunk)
    # Index -1 of a moment, nothing, is the last row: an empty chunk.
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


def activation_rows(memory: ModelMemory, counts: Array, table: RankTable) -> list[MemoryRow]:
    """Return the memory rows at the fullest moment of a rank, under the first policy.

    `counts` [chunks, parts] is what the rank holds.
    """
    moments = count_moments(memory.parts, counts, table)
    alive = split_counts(moments.live, moments.fetched)
    live = memory.live_bytes(alive)[:, 0]
    transient = memory.transient_bytes(
        moments.backward, moments.paired, beside_layer=beside_layer_bytes(memory.sym)
    )[:, 0]
    peak = int((live + transient).argmax())
    booked = {Component.TRANSIENT: _in_module(int(transient[peak]), Module.OTHER)[0]}
    for term in LIVE_TERMS:
        nbytes = term.count(alive)[peak] @ term.nbytes(memory)[:, 0]
        booked[term.component] = booked.get(term.component, 0) + nbytes[None]
    # The head's part of what is kept for backward are logits.
    saved = saved_rows(booked.pop(Component.ACTIVATIONS)[0], logits=0, transient=0)
    return [*saved, *memory_rows([booked])]


def saved_activation_bytes(memory: ModelMemory, rank: StageRank, *, table: RankTable) -> int:
    """Return the most that a rank keeps for backward, under the first policy.

    It is that of the moment at which most is kept, logits of the head's forward included; a rank's
    memory may be fullest at another one.
    """
    moments = count_moments(memory.parts, rank.counts, table)
    alive = split_counts(moments.live, moments.fetched)
    kept = sum(
        term.count(alive) @ term.nbytes(memory)[:, 0].sum(axis=1)
        for term in LIVE_TERMS
        if term.component is Component.ACTIVATIONS
    )
    resident = memory_rows(book_terms(rank, RESIDENT_TERMS))
    staying = sum(row.bytes for row in resident if row.component is Component.ACTIVATIONS)
    return int(np.max(kept)) + staying


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


def rank_memory(memory: ModelMemory, rank: StageRank, *, table: RankTable) -> RankMemory:
    """Return the peak memory of a pipeline rank that runs `table`, under the first policy."""
    counts = rank.counts
    resident = memory_rows(book_terms(rank, RESIDENT_TERMS))
    activations = activation_rows(memory, counts, table)
    at_step = memory_rows(book_terms(rank, OPTIMIZER_TERMS))
    away = hosted_activation_bytes(memory, counts, table)
    hosted = MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=away)
    # The optimizer's step and the passes never hold memory at one moment: the fuller one counts.
    rows = [*resident, *max(activations, at_step, key=device_total), hosted]
    device = runtime_overhead(
        memory.constants,
        device_total(rows),
        groups=count_communicators(memory.sym.layout),
        buffers=dispatcher_bytes(memory.sym),
    )
    rows += [
        MemoryRow(component=component, module=Module.OTHER, bytes=round(nbytes))
        for component, nbytes in device.bytes.items()
    ]
    return RankMemory(
        rows=tuple(row for row in sum_memory(rows) if row.bytes), sd_bytes=device.sd_bytes
    )


def memory_rows(terms: Iterable[Booked]) -> list[MemoryRow]:
    """Return the rows of what terms book for one rank, with a column for each module."""
    return [
        MemoryRow(component=component, module=module, bytes=int(nbytes))
        for booked in terms
        for component, columns in booked.items()
        for module, nbytes in zip(EVERY_MODULE, columns[0].tolist(), strict=True)
    ]


def device_total(rows: Iterable[MemoryRow]) -> int:
    """Sum what the device holds."""
    return sum(row.bytes for row in rows if row.component is not Component.HOST)


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
        CrossEntropyKernel.COMPILED: constants["logit_bytes"] + FP32_BYTES,
        CrossEntropyKernel.IN_PLACE: sym.c,
    }[sym.workload.trainer.cross_entropy]
    logits = sym.T * sym.model.vocab_size // layout.tp
    head_input = sym.c * sym.T * sym.model.hidden_size
    head_weight = BF16_BYTES * sym.model.vocab_size * sym.model.hidden_size // layout.tp
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
    ffn_widths = model.ffn_matrices
    if model.has_experts(layer) and model.moe is not None:
        row_width = ffn_widths * model.moe.ffn_size // layout.etp + model.expert_width
        gradients = sym.c * sym.R_peak * row_width
        if layout.etp > 1:
            etp_rows = routing.etp_gathered_rows(sym.workload, layout, sym.R_peak)
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
    if Overlap.WGRAD not in sym.layout.overlap:
        return 0
    model, layout, spec = sym.model, sym.layout, sym.model.attention
    if spec.kind is AttentionKind.MLA:
        sharded_width = spec.q_width + spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        replicated_width = spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_head_dim
    else:
        sharded_width = spec.q_width + 2 * spec.kv_width
        replicated_width = 0
    shared_ffn = 0
    if model.moe:
        shared_ffn = model.moe.shared_ffn_size
    sharded_width += model.fc1_matrices * shared_ffn
    # The outputs of attention and of shared experts, each as wide as the hidden state.
    outputs = (2 if shared_ffn else 1) * sym.T * model.hidden_size
    sharded = sym.T * sharded_width // layout.tp
    return sym.c * (sharded + sym.t * replicated_width + outputs)


# What is short-lived beside every layer whose backward runs, whatever the layer is.
BACKWARD_TERMS: tuple[Callable[[Symbols], int], ...] = (fsdp_layer_bytes, delayed_gradient_bytes)


def beside_layer_bytes(sym: Symbols) -> int:
    """Sum what is short-lived beside every layer whose backward runs."""
    return sum(term(sym) for term in BACKWARD_TERMS)


def memory_verdict(margin_bytes: float, spread_bytes: float) -> Verdict:
    """Return the verdict on a margin; it is uncertain within one standard deviation of the limit.

    `spread_bytes` is that standard deviation.
    """
    if abs(margin_bytes) < spread_bytes:
        return Verdict.UNCERTAIN
    if margin_bytes >= 0:
        return Verdict.FITS
    return Verdict.OOM
