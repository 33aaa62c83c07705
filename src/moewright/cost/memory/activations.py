"""Saved activations: what layers keep, free and send to the host, and what a rank holds at most.

Bytes are arrays over activation policies, ways to recompute and offload that are weighed side by
side: one for an estimate, all that are searched for a search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.buffers import graph_bytes
from moewright.cost.memory.deferred_weights import head_owed_bytes, layer_owed_bytes
from moewright.cost.memory.snapshots import table_from_rows, take_snapshots
from moewright.cost.routed_rows import ExpertRows
from moewright.cost.stage_parts import (
    Array,
    LayerKind,
    LayerPart,
    count_parts,
    layer_columns,
    layer_kinds,
    list_parts,
)
from moewright.cost.symbols import Symbols
from moewright.rules import routing
from moewright.rules.adapters import trains_module
from moewright.rules.job import Job, micro_batch_tokens
from moewright.rules.saved import recompute
from moewright.rules.saved.saved_tensor import (
    ENGINE_STACK,
    Place,
    SavedTensor,
    SavingStack,
    activation_offloads,
)
from moewright.rules.shapes import shards
from moewright.rules.timetable import timetable_row
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.spec.layout import CudaGraphScope, Layout, Offload, Recompute
from moewright.spec.ledger import Component, MemoryRow, Module, saved_component
from moewright.spec.record import copy_with
from moewright.spec.units import FP32_BYTES, INT64_BYTES
from moewright.spec.workload import CrossEntropyKernel, Objective

MODULES = tuple(Module)  # the last axis of arrays of saved bytes
_COLUMN: Mapping[Module, int] = MappingProxyType({module: i for i, module in enumerate(MODULES)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPolicy:
    """The recompute choices, offload choices and CUDA graphs of a layer."""

    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]
    graphs: tuple[CudaGraphScope, ...]

    def apply_to(self, layout: Layout) -> Layout:
        """Return the layout with this policy in place of its own."""
        return copy_with(layout, recompute=self.recompute, offload=self.offload, graphs=self.graphs)


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationPolicies:
    """Policies side by side, the policy axis of arrays, and what each does to a layer's tensors.

    `masks` caches TensorMasks by the names of a layer's tensors and its position.
    """

    members: tuple[ActivationPolicy, ...]
    masks: dict[tuple[object, ...], TensorMasks] = field(default_factory=dict, repr=False)

    @cached_property
    def graphs(self) -> tuple[tuple[CudaGraphScope, ...], ...]:
        """The CUDA graphs of the policies, each once."""
        return tuple(dict.fromkeys(policy.graphs for policy in self.members))

    @cached_property
    def graphs_of_policy(self) -> Array:
        """The index into `graphs` of the graphs of each policy [policies]."""
        return np.array([self.graphs.index(policy.graphs) for policy in self.members])

    @cached_property
    def recomputes_layers(self) -> Array:
        """Whether each policy recomputes whole layers [policies]."""
        return np.array([Recompute.FULL in policy.recompute for policy in self.members])

    @cached_property
    def offloaded_modules(self) -> Array:
        """How many modules of a layer each policy sends to the host [policies]."""
        return np.array([count_offloaded_modules(policy.offload) for policy in self.members])


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMasks:
    """Masks [policies, tensors] of the tensors of a layer that each policy keeps, and where.

    `on_device` marks the tensors kept on the device, `sent` those sent to the host, and `wide`
    those kept as the forward made them, whatever their format. `recomputed_kept` marks those that
    the recompute choices leave, at whatever position of its chunk the layer stands.
    """

    on_device: Array
    sent: Array
    wide: Array
    recomputed_kept: Array


def policy_of(layout: Layout) -> ActivationPolicies:
    """Return the policy of one layout, as an array of one."""
    policy = ActivationPolicy(
        recompute=layout.recompute, offload=layout.offload, graphs=layout.graphs
    )
    return ActivationPolicies(members=(policy,))


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationContext:
    """The job and the software stack whose activations are counted.

    A fused stack keeps no logits; `kept_logit_bytes` is what it keeps of a logit of an MTP depth
    until that depth's backward, which follows the last head's.
    """

    job: Job
    stack: SavingStack = ENGINE_STACK
    kept_logit_bytes: int = 0


def activation_context(constants: Constants, sym: Symbols) -> ActivationContext:
    """Return the context of a layout under the constants of its hardware."""
    input_ratio: float | None = None
    if sym.is_low_precision and sym.is_fused:
        input_ratio = constants.low_precision_bytes("input", sym.dtype) / sym.c
    return ActivationContext(
        job=sym.job,
        stack=SavingStack(is_fused=sym.is_fused, input_ratio=input_ratio),
        kept_logit_bytes=_kept_logit_bytes(constants, sym),
    )


def _kept_logit_bytes(constants: Constants, sym: Symbols) -> int:
    """Return the bytes of a logit's softmax in fp32, or of its gradient where that is in place."""
    if not sym.is_fused or Recompute.LOSS in sym.layout.recompute:
        return 0
    is_in_place = sym.workload.trainer.cross_entropy is CrossEntropyKernel.IN_PLACE
    if is_in_place:
        return sym.c
    return min(FP32_BYTES, round(constants["logit_bytes"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """Bytes of one layer and micro-batch, for each policy.

    `saved` [policies, modules] stays on the device; `offloaded` [policies, modules] goes to the
    host;
    `recomputed` [policies] is what backward computes again and holds meanwhile, and
    `recomputed_attention` what attention has of it.
    """

    saved: Array
    offloaded: Array
    recomputed: Array
    recomputed_attention: Array


def layer_activations(
    context: ActivationContext,
    policies: ActivationPolicies,
    part: LayerPart,
    *,
    load: float,
    dispatch: routing.DispatchCounts | None = None,
) -> LayerActivations:
    """Count what a layer keeps for one micro-batch, by the terms of rules.saved.recompute."""
    stack = context.stack
    if part.kind.is_wide:  # its linears keep their inputs as they are
        stack = replace(stack, input_ratio=None)
    tensors = recompute.saved_tensors(
        context.job,
        part.layer,
        load=load,
        dispatch=dispatch,
        stack=stack,
    )
    masks = _tensor_masks(policies, tensors, context.job.layout, part)
    kept = np.array([tensor.bytes for tensor in tensors], dtype=float)
    whole = np.array([tensor.wide_bytes for tensor in tensors], dtype=float)
    kept = np.where(masks.wide, whole, kept)
    by_module = np.zeros((len(tensors), len(MODULES)))
    by_module[np.arange(len(tensors)), [_COLUMN[tensor.module] for tensor in tensors]] = 1
    saved = (masks.on_device * kept) @ by_module
    in_attention = whole * [tensor.owner is Module.ATTENTION for tensor in tensors]
    # Set, not added: no tensor of a layer belongs to OTHER.
    saved[:, _COLUMN[Module.OTHER]] = _graph_bytes(context, policies)
    return LayerActivations(
        saved=saved,
        offloaded=(masks.sent * kept) @ by_module,
        # Recomputation makes tensors as forward does: wide, whatever format is kept.
        recomputed=whole.sum() - masks.recomputed_kept @ whole,
        recomputed_attention=in_attention.sum() - masks.recomputed_kept @ in_attention,
    )


def _tensor_masks(
    policies: ActivationPolicies,
    tensors: Sequence[SavedTensor],
    layout: Layout,
    part: LayerPart,
) -> TensorMasks:
    names = tuple((tensor.module, tensor.name) for tensor in tensors)
    # What keep_tensors reads of a layout beside the policy.
    key = names, part.position, part.offloads, layout.recompute_block, layout.recompute_span
    if key not in policies.masks:
        left, on_device, sent, wide = np.zeros((4, len(policies.members), len(tensors)), dtype=bool)
        for row, policy in enumerate(policies.members):
            left[row] = [recompute.is_kept(tensor, policy.recompute) for tensor in tensors]
            kept = recompute.keep_tensors(
                tensors, policy.apply_to(layout), part.position, offloads=part.offloads
            )
            for column, tensor in enumerate(kept):
                if tensor is not None:
                    on_device[row, column] = tensor.place is Place.DEVICE
                    sent[row, column] = tensor.place is Place.HOST
                    wide[row, column] = tensor.format is not tensor.tensor.format
        policies.masks[key] = TensorMasks(
            on_device=on_device, sent=sent, wide=wide, recomputed_kept=left
        )
    return policies.masks[key]


def _graph_bytes(context: ActivationContext, policies: ActivationPolicies) -> Array:
    """Return what the CUDA graphs of a layer pin [policies]."""
    if not context.stack.is_fused:  # what graphs of the engine share is a buffer of the rank
        return np.zeros(len(policies.members))
    by_graphs = [graph_bytes(context.job, graphs) for graphs in policies.graphs]
    return np.array(by_graphs, dtype=float)[policies.graphs_of_policy]


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedActivations:
    """Bytes that a layer and micro-batch sends to the host, and of how many modules [policies]."""

    bytes: Any
    modules: Any


NOTHING_OFFLOADED = OffloadedActivations(bytes=0.0, modules=0)


def offloaded_activations(
    context: ActivationContext, policies: ActivationPolicies, kind: LayerKind, *, load: float
) -> OffloadedActivations:
    """Count what a layer of a kind sends to the host, where it is one that offloads."""
    modules = policies.offloaded_modules
    if not modules.any():
        return OffloadedActivations(bytes=0.0 * modules, modules=modules)
    layer = layer_kinds(context.job.model, context.job.workload.trainer)[kind]
    part = LayerPart(kind=kind, layer=layer, position=0, is_mtp=False, offloads=True)
    sent = layer_activations(context, policies, part, load=load).offloaded.sum(axis=1)
    return OffloadedActivations(bytes=sent, modules=modules)


def count_offloaded_modules(offload: Collection[Offload]) -> int:
    """Count the modules of a layer that send what they keep to the host."""
    return len(activation_offloads(offload))


def outside_bytes(context: ActivationContext) -> Array:
    """Return what embedding, head and an MTP depth's input keep [3, modules], in that order."""
    tokens = micro_batch_tokens(context.job.workload, context.job.layout)
    hidden = (
        recompute.activation_nbytes(context.job.workload) * tokens * context.job.model.hidden_size
    )
    hidden *= context.job.model.residual_streams
    head = _head_bytes(context)
    if context.job.workload.loss.objective is Objective.DPO:
        head += _modules({Module.OTHER: FP32_BYTES * _tokens(context)})  # weights of the nll
    return np.array([_embedding_bytes(context), head, _modules({Module.MTP: hidden})])


def mtp_bytes(context: ActivationContext) -> Array:
    """Return what an MTP depth keeps besides its layer [modules]: an embedding's and a head's."""
    logits = _tokens(context) * shards.shard_size(
        context.job.model.vocab_size, context.job.layout.tp
    )
    kept = _modules({Module.HEAD: context.kept_logit_bytes * logits})
    return _embedding_bytes(context) + _head_bytes(context) + kept


def token_id_bytes(context: ActivationContext) -> int:
    """Return the bytes of the token ids of a micro-batch on a TP group, or of their targets."""
    return INT64_BYTES * _tokens(context)


def _embedding_bytes(context: ActivationContext) -> Array:
    """Return what an embedding keeps [modules], unless it is frozen.

    It is token ids, and the mask where what it returns is dropped, a byte an element.
    """
    workload, layout = context.job.workload, context.job.layout
    if not trains_module(workload.fine_tuning, Module.EMBEDDING):
        return _modules({})
    kept = token_id_bytes(context)
    if workload.trainer.hidden_dropout:
        kept += micro_batch_tokens(workload, layout) * context.job.model.hidden_size
    return _modules({Module.EMBEDDING: kept})


def _head_bytes(context: ActivationContext) -> Array:
    """Return what one pass through the head keeps [modules].

    These are the norm's input and statistic, the head's input unless the head is frozen, targets,
    and the logits (once, in the compute dtype) unless they are made again or a fused stack makes
    their gradient in place.
    """
    model, layout = context.job.model, context.job.layout
    c = recompute.activation_nbytes(context.job.workload)
    t = micro_batch_tokens(context.job.workload, layout)
    T = _tokens(context)
    head = token_id_bytes(context)
    if Recompute.LOSS in layout.recompute or trains_module(
        context.job.workload.fine_tuning, Module.HEAD
    ):
        head += c * t * model.hidden_size
    if not context.stack.is_fused:
        recomputes = Recompute.LOSS in layout.recompute
        if not recomputes:
            head += c * T * shards.shard_size(model.vocab_size, layout.tp)
        # Each token's log-sum-exp over the whole vocabulary, which neither one TP rank nor a chunk
        # of the logits gives.
        if recomputes or layout.tp > 1:
            head += FP32_BYTES * T
    if model.residual_streams > 1:  # the streams, and the weights of their sum
        streams = model.residual_streams
        head += t * (streams * c * model.hidden_size + FP32_BYTES * (2 * streams + 1))
    norm = c * t * model.hidden_size + recompute.norm_statistics(model, t)
    return _modules({Module.NORM: norm, Module.HEAD: head})


def _tokens(context: ActivationContext) -> int:
    """Return T, the tokens of a micro-batch on a TP group."""
    return context.job.workload.seq_len * context.job.layout.mbs // context.job.layout.cp


def sum_by_module(bookings: Sequence[tuple[Module, int]]) -> Array:
    """Return the sums of bookings [modules]."""
    row = np.zeros(len(MODULES))
    for module, nbytes in bookings:
        row[_COLUMN[module]] += nbytes
    return row


def _modules(sizes: Mapping[Module, int]) -> Array:
    row = np.zeros(len(MODULES))
    for module, nbytes in sizes.items():
        row[_COLUMN[module]] = nbytes
    return row


def ledger_saved_rows(
    context: ActivationContext,
    rows: ExpertRows,
    *,
    chunks: Sequence[Chunk],
    table: Sequence[timetable_row.TimetableRow],
) -> tuple[MemoryRow, ...]:
    """Count what a rank keeps at its peak.

    Of short-lived bytes only one more layer is counted, where a forward runs beside a backward.
    `rows` may differ between micro-batches and layers, as those of a recorded step do.
    """
    columns = table_from_rows(context.job.layout, table)
    micro_batches = int(columns.micro_batch.max()) + 1
    kept_bytes, sent_bytes = _chunk_bytes(context, rows, chunks, micro_batches=micro_batches)
    owed_bytes = None
    if columns.settles.any():
        owed_bytes = _owed_bytes(context, rows, chunks, micro_batches=micro_batches)
    item = columns.micro_batch * len(chunks) + columns.chunk
    moments = take_snapshots(columns, kept_bytes, item, owed_bytes, sent_bytes)
    layers = np.array([max(1, len(chunk_layers(context.job.model, chunk))) for chunk in chunks])
    # -1, no pair, reads some layer here; the next line drops it.
    a_layer = kept_bytes.sum(axis=1)[moments.paired] // layers[moments.paired % len(chunks)]
    transient = np.where(moments.paired < 0, 0.0, a_layer)
    live = moments.live + moments.owed
    if len(moments.fetched):
        live = live + moments.fetched
    peak = int((live.sum(axis=1) + transient).argmax())
    return saved_rows(live[peak], logits=0, transient=int(transient[peak]))


def _owed_bytes(
    context: ActivationContext, rows: ExpertRows, chunks: Sequence[Chunk], *, micro_batches: int
) -> Array:
    """Return what the weight gradients wait with of every micro-batch and chunk.

    Shape: [micro-batches x chunks, modules].
    """
    by_layer: dict[tuple[object, ...], Array] = {}

    def layer_bytes(micro_batch: int, layer: int) -> Array:
        load = rows.load_factor(micro_batch, layer)
        dispatch = rows.dispatch_counts(micro_batch, layer)
        key = layer, load, dispatch
        if key not in by_layer:
            bookings = layer_owed_bytes(
                context.job,
                layer,
                load=load,
                dispatch=dispatch,
            )
            by_layer[key] = sum_by_module(bookings)
        return by_layer[key]

    head = sum_by_module(head_owed_bytes(context.job))
    return np.array(
        [
            sum(layer_bytes(micro_batch, layer) for layer in chunk_layers(context.job.model, chunk))
            + head * chunk.has_loss
            for micro_batch in range(micro_batches)
            for chunk in chunks
        ]
    )


def _chunk_bytes(
    context: ActivationContext, rows: ExpertRows, chunks: Sequence[Chunk], *, micro_batches: int
) -> tuple[Array, Array]:
    """Return what every micro-batch and chunk keeps, and what it sends to the host.

    Shapes: [micro-batches x chunks, modules].
    """
    parts = list_parts(context.job.model, context.job.layout, context.job.workload.trainer)
    counts = count_parts(context.job.model, context.job.layout, parts, chunks)
    kept_outside = counts[:, len(parts.layers) :] @ outside_bytes(context)
    outside = np.stack([kept_outside, np.zeros_like(kept_outside)], axis=1)
    policies = policy_of(context.job.layout)
    by_layer: dict[tuple[object, ...], Array] = {}

    def layer_bytes(column: int, load: float, dispatch: routing.DispatchCounts | None) -> Array:
        key = column, load, dispatch
        if key not in by_layer:
            part = parts.layers[column]
            layer = layer_activations(context, policies, part, load=load, dispatch=dispatch)
            kept = layer.saved[0]
            if part.is_mtp:
                kept = kept + mtp_bytes(context)
            by_layer[key] = np.stack([kept, layer.offloaded[0]])
        return by_layer[key]

    chunk_columns = [
        layer_columns(context.job.layout, parts, chunk, context.job.model) for chunk in chunks
    ]
    batches: dict[tuple[object, ...], list[Array]] = {}
    kept_bytes = []
    for micro_batch in range(micro_batches):
        batch = rows.rows[micro_batch], rows.dispatches[micro_batch]
        if batch not in batches:
            batches[batch] = [
                outside[chunk]
                + sum(
                    layer_bytes(
                        column,
                        rows.load_factor(micro_batch, layer),
                        rows.dispatch_counts(micro_batch, layer),
                    )
                    for layer, column in columns
                )
                for chunk, columns in enumerate(chunk_columns)
            ]
        kept_bytes += batches[batch]
    kept, sent = np.stack(kept_bytes, axis=1)
    return kept, sent


def saved_rows(live: Array, *, logits: int, transient: int) -> tuple[MemoryRow, ...]:
    """Return the memory rows of bytes by module [modules].

    The head's bytes and `logits` are booked as logits, `transient` as transient.
    """
    sums = {
        (Component.LOGITS, Module.HEAD): logits,
        (Component.TRANSIENT, Module.OTHER): transient,
    }
    for module, nbytes in zip(MODULES, live.tolist(), strict=True):
        key = saved_component(module), module
        sums[key] = sums.get(key, 0) + int(nbytes)
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )
