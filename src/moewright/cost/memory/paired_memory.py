"""What a rank keeps while a forward runs beside a backward, segment by segment.

The planner's estimate counts one more layer for such a pair (cost.memory.snapshots), which is what
it can be at most. A ledger is compared with what lived, so here the pair is walked as the executor
runs it: after each segment (rules.timetable.paired_passes) the forward has kept, and the backward
has freed, what belongs to the layers' parts in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moewright.cost.memory.activations import (
    ActivationContext,
    outside_bytes,
    saved_rows,
    sum_by_module,
    token_id_bytes,
)
from moewright.cost.routed_rows import ExpertRows
from moewright.cost.stage_parts import Array
from moewright.rules.saved import recompute
from moewright.rules.saved.saved_tensor import KeptTensor, Place, SavedTensor, offloads_at
from moewright.rules.timetable.paired_passes import (
    PassSegment,
    PassWork,
    WorkStep,
    backward_segments,
    checkpoint_layers,
    forward_segments,
    pair_passes,
    paired_rows,
)
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Recompute
from moewright.spec.ledger import MemoryRow, Module
from moewright.spec.model import ModelSpec

Key = tuple[int, int]  # micro-batch, chunk
LayerStep = tuple[int, PassWork]  # layer, work
# What is kept of experts before their rows leave, or after they have come back.
_SENT = ("sent_indices",)
_RETURNED = ("returned_indices", "latent_out", "mlp_out")
# What a router decided, which the replay of a checkpoint reuses.
_DECISIONS = ("chosen", "load_share")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSpan:
    """A kept tensor of a layer with the steps of passes in which it is kept and freed."""

    kept: KeptTensor
    kept_in: LayerStep
    freed_in: LayerStep


def place_tensors(
    tensors: Sequence[KeptTensor],
    recomputed: Collection[Recompute],
    model: ModelSpec,
    layers: Sequence[int],
    layer: int,
) -> Iterator[KeptSpan]:
    """Yield when passes keep and free the tensors that a layer keeps under a recompute choice.

    Autograd keeps the input of a checkpoint when its forward has ended, and frees it when its
    backward has. Decisions belong to the checkpoint, and go with it. `layers` are those that a
    checkpoint over whole layers has together with this one.
    """
    for kept in tensors:
        tensor = kept.tensor
        own = layer, _find_work(tensor) if model.has_experts(layer) else PassWork.WHOLE
        in_router = tensor.owner is Module.ROUTER
        is_replayed = Recompute.FULL in recomputed
        in_checkpoint = is_replayed or (Recompute.MOE in recomputed and in_router)
        if in_checkpoint and in_router and tensor.name in _DECISIONS:
            first = layers[0] if is_replayed else layer
            yield KeptSpan(kept=kept, kept_in=own, freed_in=_first_step(model, first))
        elif in_checkpoint:
            last = layers[-1] if is_replayed else layer
            yield KeptSpan(kept=kept, kept_in=_last_step(model, last), freed_in=own)
        else:
            yield KeptSpan(kept=kept, kept_in=own, freed_in=own)


def _first_step(model: ModelSpec, layer: int) -> LayerStep:
    return layer, PassWork.BEFORE if model.has_experts(layer) else PassWork.WHOLE


def _last_step(model: ModelSpec, layer: int) -> LayerStep:
    return layer, PassWork.AFTER if model.has_experts(layer) else PassWork.WHOLE


def _find_work(tensor: SavedTensor) -> PassWork:
    if tensor.owner is Module.MTP:
        return PassWork.EMBEDDING
    if tensor.owner is Module.SHARED_EXPERTS or tensor.name in _RETURNED:
        return PassWork.AFTER
    if tensor.owner is Module.EXPERTS and tensor.name not in _SENT:
        return PassWork.EXPERTS
    return PassWork.BEFORE


def paired_saved_rows(
    context: ActivationContext,
    rows: ExpertRows,
    *,
    chunks: Sequence[Chunk],
    table: Sequence[TimetableRow],
) -> tuple[MemoryRow, ...]:
    """Count what a rank keeps at its peak, where its timetable has pairs.

    `rows` may differ between micro-batches and layers, as those of a recorded step do.
    """
    passes: dict[tuple[RowKind, int], tuple[PassSegment, ...]] = {}
    for number, chunk in enumerate(chunks):
        passes[RowKind.F, number] = forward_segments(context.job.model, chunk)
        passes[RowKind.B, number] = backward_segments(context.job.model, context.job.layout, chunk)
    live = walk_pairs(table, passes, _StepPrices(context, rows, chunks))
    return saved_rows(live[int(live.sum(axis=1).argmax())], logits=0, transient=0)


class _StepPrices:
    """The bytes that each step of a pass keeps or frees, under the rows of its micro-batch."""

    def __init__(
        self, context: ActivationContext, rows: ExpertRows, chunks: Sequence[Chunk]
    ) -> None:
        self._context = context
        self._rows = rows
        self._chunks = chunks
        self._outside = outside_bytes(context)
        self._by_layer: dict[tuple[object, ...], tuple[KeptSpan, ...]] = {}

    def price_kept(self, key: Key, step: WorkStep) -> Array:
        """Return what a step of a forward keeps [modules]."""
        return self._outside_layers(key, step) + sum_by_module(
            [
                (span.kept.tensor.module, span.kept.bytes)
                for span in self._checkpoint_tensors(key, step)
                if span.kept_in == (step.layer, step.work)
            ]
        )

    def price_freed(self, key: Key, step: WorkStep) -> Array:
        """Return what a step of a backward has done with [modules], lasting ones included."""
        return self._outside_layers(key, step) + sum_by_module(
            [
                (span.kept.tensor.module, span.kept.bytes)
                for span in self._checkpoint_tensors(key, step)
                if span.freed_in == (step.layer, step.work)
            ]
        )

    def price_lasting(self, step: WorkStep) -> Array:
        """Return the part of `price_freed` that lives until the backward of the chunk ends.

        Its shape is [modules]. These are tokens and targets, which belong to the micro-batch.
        """
        if step.work is PassWork.HEAD:
            return sum_by_module([(Module.HEAD, token_id_bytes(self._context))])
        return np.asarray(self._outside[0] * (step.work is PassWork.EMBEDDING))

    def _outside_layers(self, key: Key, step: WorkStep) -> Array:
        embedding, head, mtp_input = self._outside
        if step.work is PassWork.HEAD:
            return np.asarray(head)
        if step.work is not PassWork.EMBEDDING:
            return np.zeros(len(head))
        # Where no final norm on the same stage keeps what the first depth takes, the depth does.
        has_loss = self._chunks[key[1]].has_loss
        is_first_depth = step.layer == self._context.job.model.layers + 1 and not has_loss
        return np.asarray(embedding + mtp_input * is_first_depth)

    def _checkpoint_tensors(self, key: Key, step: WorkStep) -> Iterator[KeptSpan]:
        """Yield what the layers keep that a checkpoint over whole layers has with this step's."""
        for layer in self._checkpoint_layers(key[1], step.layer):
            yield from self._layer_tensors(key, layer)

    def _checkpoint_layers(self, number: int, layer: int) -> tuple[int, ...]:
        return checkpoint_layers(self._context.job.layout, self._chunks[number], layer)

    def _layer_tensors(self, key: Key, layer: int) -> tuple[KeptSpan, ...]:
        if layer < 0:
            return ()
        micro_batch, number = key
        context = self._context
        layout = context.job.layout
        layers = chunk_layers(context.job.model, self._chunks[number])
        place = layers.index(layer)
        is_away = offloads_at(layout, number, place, len(layers))
        load = self._rows.load_factor(micro_batch, layer)
        dispatch = self._rows.dispatch_counts(micro_batch, layer)
        layer_key = layer, place, load, dispatch
        if layer_key not in self._by_layer:
            tensors = recompute.saved_tensors(context.job, layer, load=load, dispatch=dispatch)
            kept = [
                tensor
                for tensor in recompute.keep_tensors(tensors, layout, place, offloads=is_away)
                if tensor is not None and tensor.place is Place.DEVICE
            ]
            recomputed = recompute.layer_recompute(layout, place)
            together = self._checkpoint_layers(number, layer)
            spans = place_tensors(kept, recomputed, context.job.model, together, layer)
            self._by_layer[layer_key] = tuple(spans)
        return self._by_layer[layer_key]


def walk_pairs(
    rows: Sequence[TimetableRow],
    passes: Mapping[tuple[RowKind, int], Sequence[PassSegment]],
    prices: _StepPrices,
) -> Array:
    """Return what is kept at every moment of a rank that runs pairs [moments, modules].

    `passes` are the segments of the forward and backward of each chunk. Moments are the ends of
    segments and of rows.
    """
    paired = paired_rows(rows)
    moments: list[Array] = []
    live: Array | float = 0.0
    lasting_bytes: Array | float = 0.0

    def run_segment(row: TimetableRow, segment: PassSegment) -> None:
        nonlocal live, lasting_bytes
        key = row.micro_batch, row.chunk
        for step in segment.steps:
            # What a replay makes is short-lived: it counts as no saved activation.
            if step.is_replay:
                continue
            if segment.kind is RowKind.F:
                live = live + prices.price_kept(key, step)
            else:
                live = live - prices.price_freed(key, step)
                lasting_bytes = lasting_bytes + prices.price_lasting(step)
        is_last = segment is passes[segment.kind, row.chunk][-1]
        # Autograd lets go of the micro-batch's tokens when the whole backward has ended.
        if is_last and segment.kind is RowKind.B:
            lasting_bytes = 0.0
        moments.append(np.array(live + lasting_bytes))

    index = 0
    while index < len(rows):
        row = rows[index]
        if index in paired:
            after = rows[index + 1]
            by_kind = {RowKind.F: row, RowKind.B: after}
            merged = pair_passes(passes[RowKind.F, row.chunk], passes[RowKind.B, after.chunk])
            for segment in merged:
                run_segment(by_kind[segment.kind], segment)
            index += 2
            continue
        for segment in passes.get((row.kind, row.chunk), ()):
            run_segment(row, segment)
        index += 1
    return np.array(moments)
