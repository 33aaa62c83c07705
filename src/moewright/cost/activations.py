"""Saved activations of one pipeline rank at its fullest moment, found by walking the timetable."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from moewright.cost.buffers import graph_bytes
from moewright.cost.constants import Constants
from moewright.cost.routed_rows import ExpertRows
from moewright.cost.symbols import Symbols
from moewright.rules import recompute, routing, schedule, shards
from moewright.rules.stages import Chunk, chunk_layers
from moewright.spec.layout import Layout, Offload, Overlap, Recompute
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import Workload

INT64_BYTES = 8
FP32_BYTES = 4

BytesByModule = Mapping[Module, int]
_Load = tuple[float, routing.DispatchCounts | None]  # of one layer and micro-batch

# The saved tensor (rules.recompute) that each offload choice moves to the host: its module's input.
_OFFLOADED: Mapping[Offload, tuple[Module, str]] = MappingProxyType(
    {
        Offload.ATTN_NORM: (Module.NORM, "layer_input"),
        Offload.QKV_LINEAR: (Module.ATTENTION, "input_norm_out"),
        Offload.CORE_ATTN: (Module.ATTENTION, "qkv"),
        Offload.ATTN_PROJ: (Module.ATTENTION, "attention_out"),
        Offload.MLP_NORM: (Module.NORM, "residual"),
        Offload.EXPERT_FC1: (Module.EXPERTS, "permuted"),
        Offload.MOE_ACT: (Module.EXPERTS, "fc1"),
    }
)


# Inputs of 8-bit linears: each keeps a quantised copy of its own and nobody keeps the 16 bits. The
# output projection is
# told to keep its input as it is, which attention keeps anyway. (Megatron-LM, attention.py:
# save_original_input.)
_QUANTISED = frozenset(
    {
        *((Module.ATTENTION, name) for name in ("input_norm_out", "q_latent", "kv_latent")),
        *((Module.DENSE_MLP, name) for name in ("post_norm_out", "activation")),
        *((Module.EXPERTS, name) for name in ("permuted", "activation")),
        (Module.SHARED_EXPERTS, "activation"),
    }
)


def layer_saved_bytes(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    layer: int,
    *,
    load: float,
    dispatch: routing.DispatchCounts | None = None,
    input_ratio: float | None = None,
    position: int = 0,
    fused: bool = False,
) -> dict[Module, int]:
    """Bytes one layer keeps on the device for one micro-batch under the layout's recompute and
    offload, by module.

    `load` and `moved` as in rules.recompute; `place` of the layer in its chunk. `inputs`: the
    quantised input of an 8-bit linear over its 16-bit size; None where linears are not 8-bit.
    """
    rows = recompute.saved_tensors(
        model, workload, layout, layer, load=load, dispatch=dispatch, repeats_exchange=fused
    )
    sums: dict[Module, int] = {}
    for row in recompute.layer_kept_tensors(rows, layout, position):
        if not is_offloaded(row, layout.offload):
            sums[row.module] = sums.get(row.module, 0) + quantised_bytes(model, row, input_ratio)
    if pinned := graph_bytes(model, workload, layout):
        sums[Module.OTHER] = pinned
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedActivations:
    """Bytes that a layer and micro-batch sends to the host, and of how many modules: numbers, or
    arrays of choices."""

    bytes: Any
    modules: Any


def offloaded_activations(
    constants: Constants, size: Symbols, *, moe: bool
) -> OffloadedActivations:
    """Of a layer with or without experts, under the layout's offload and recompute."""
    model, layout = size.model, size.layout
    modules = count_offloaded_modules(layout.offload)
    # An MTP depth offloads nothing.
    if not modules or moe not in model.moe_layers:
        return OffloadedActivations(bytes=0.0, modules=0)
    even = routing.routed_rows(model, size.workload, layout, 1.0)
    rows = recompute.saved_tensors(
        model,
        size.workload,
        layout,
        model.moe_layers.index(moe),
        load=size.R / even if even else 1.0,
        repeats_exchange=size.is_fused,
    )
    inputs = (
        constants.low_precision_bytes("input", size.dtype) / size.c
        if size.is_low_precision
        else None
    )
    sent = [
        row
        for row in recompute.kept_tensors(rows, layout.recompute)
        if is_offloaded(row, layout.offload)
    ]
    return OffloadedActivations(
        bytes=float(sum(quantised_bytes(model, row, inputs) for row in sent)), modules=modules
    )


def count_offloaded_modules(offload: Collection[Offload]) -> int:
    """How many modules of a layer send what they keep to the host."""
    return sum(item is not Offload.OPTIMIZER for item in offload)


def is_offloaded(row: recompute.SavedTensor, choices: Collection[Offload]) -> bool:
    """Whether one of the choices moves the tensor to the host."""
    return any((row.owner, row.name) == _OFFLOADED.get(choice) for choice in choices)


def quantised_bytes(model: ModelSpec, row: recompute.SavedTensor, input_ratio: float | None) -> int:
    """Bytes of a kept tensor where 8-bit linears keep their inputs in `inputs` of their 16-bit
    size.

    The two down-projections of latent attention read one norm's output and keep a copy each. The
    router reads its input in 16 bits, shared experts keep a copy beside. Together they are what
    arXiv 2603.07685 prints of DeepSeek-V3.
    """
    if input_ratio is None:
        return row.bytes
    share = 1.0
    if (row.module, row.name) in _QUANTISED:
        twice = row.name == "input_norm_out" and model.attention.kind is AttentionKind.MLA
        share = input_ratio * (2 if twice else 1)
    elif (
        (row.module, row.name) == (Module.ROUTER, "post_norm_out")
        and model.moe
        and model.moe.shared_ffn_size
    ):
        share = 1.0 + input_ratio
    return round(row.bytes * share)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransientBytes:
    """Short-lived bytes beside the saved activations, by chunk of a rank: while its forward ends,
    and its backward runs. `logits_kept` tells whether the logits are among the saved activations
    (else they are such an extra).
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    keeps_logits: bool


def outside_layers_bytes(
    model: ModelSpec, workload: Workload, layout: Layout, chunk: Chunk, *, keeps_logits: bool = True
) -> dict[Module, int]:
    """What embedding, final norm, head and loss keep: token ids; the norm's input and statistic;
    the head's input, the logits (once, in the compute dtype) unless they are made again, and the
    targets. An MTP depth makes a pass through the head too.
    """
    c, t = recompute.activation_nbytes(workload), routing.micro_batch_tokens(workload, layout)
    T = workload.seq_len * layout.mbs // layout.cp
    sums: dict[Module, int] = {}
    if chunk.has_embedding or chunk.mtp_layers:
        sums[Module.EMBEDDING] = INT64_BYTES * T * (chunk.has_embedding + chunk.mtp_layers)
    passes = chunk.mtp_layers + chunk.has_loss
    if passes:
        sums[Module.NORM] = passes * (c * t * model.hidden_size + FP32_BYTES * t)
        again = Recompute.LOSS in layout.recompute
        logits = 0 if again else c * T * shards.shard_size(model.vocab_size, layout.tp)
        # Each token's log of the partition sum, which no rank can find alone, nor from a piece of
        # the vocabulary.
        logits += FP32_BYTES * T if again or layout.tp > 1 else 0
        logits = logits if keeps_logits else 0
        sums[Module.HEAD] = passes * (c * t * model.hidden_size + logits + INT64_BYTES * T)
    return sums


def saved_rows(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    rows: ExpertRows,
    *,
    chunks: Sequence[Chunk],
    table: Sequence[schedule.TimetableRow],
    transients: TransientBytes | None = None,
    input_ratio: float | None = None,
) -> tuple[MemoryRow, ...]:
    """Memory rows of the saved activations at the peak of a rank that holds `chunks` and runs
    `table`.

    What the head keeps is booked as logits. `extras` count towards the peak, and are booked as
    logits (forward) and transient (backward). A chunk whose weight gradients are split off is held
    until they are made. Where expert communication overlaps, a forward runs layer by layer beside
    the backward of another micro-batch, which frees a layer for each that it keeps: the two hold
    one layer more, not a chunk.
    """
    known: dict[tuple[int, tuple[_Load, ...]], BytesByModule] = {}
    logits_kept = transients is None or transients.keeps_logits

    @cache
    def kept(micro_batch: int, chunk: int) -> BytesByModule:
        layers = chunk_layers(model, chunks[chunk])
        loads = tuple(
            (rows.load_factor(micro_batch, layer), rows.dispatch_counts(micro_batch, layer))
            for layer in layers
        )
        key = chunk, loads
        if key not in known:
            known[key] = _chunk_bytes(
                model, workload, layout, chunks[chunk], loads, logits_kept, input_ratio
            )
        return known[key]

    walk, owing = _Walk(), schedule.split_backwards(table)
    for row, after in zip(table, (*table[1:], None), strict=True):
        key = row.micro_batch, row.chunk
        forward, backward = (
            (0, 0)
            if transients is None
            else (transients.forward[row.chunk], transients.backward[row.chunk])
        )
        if row.kind is schedule.RowKind.F and after is not None and _paired(layout, row, after):
            layers = max(1, len(chunk_layers(model, chunks[row.chunk])))
            beside = 0 if transients is None else transients.backward[after.chunk]
            transient = beside + sum(kept(*key).values()) // layers
            walk.see(forward, transient)
            if (after.micro_batch, after.chunk) not in owing:
                walk.drop((after.micro_batch, after.chunk))
            walk.keep(key, kept(*key))
            walk.see(forward, transient)
        elif row.kind is schedule.RowKind.F:
            walk.keep(key, kept(*key))
            walk.see(forward, 0)
        elif key in walk.live:
            walk.see(0, backward)
            if row.kind is schedule.RowKind.W or key not in owing:
                walk.drop(key)
    return _rows(walk.peak, *walk.beside)


def _paired(layout: Layout, forward: schedule.TimetableRow, after: schedule.TimetableRow) -> bool:
    """Whether a forward followed by `after` runs beside it: beside its own backward it cannot."""
    own = (forward.micro_batch, forward.chunk) == (after.micro_batch, after.chunk)
    return Overlap.EP in layout.overlap and after.kind is schedule.RowKind.B and not own


class _Walk:
    """What is alive as the timetable goes by, and the fullest moment seen."""

    __slots__ = ("_peak_bytes", "_total", "beside", "live", "peak")

    def __init__(self) -> None:
        self.live: dict[tuple[int, int], BytesByModule] = {}
        self.peak: tuple[BytesByModule, ...] = ()
        self.beside = (0, 0)
        self._total, self._peak_bytes = 0, -1

    def keep(self, key: tuple[int, int], chunk: BytesByModule) -> None:
        self.live[key] = chunk
        self._total += sum(chunk.values())

    def drop(self, key: tuple[int, int]) -> None:
        self._total -= sum(self.live.pop(key).values())

    def see(self, logits: int, transient: int) -> None:
        if self._total + logits + transient > self._peak_bytes:
            self._peak_bytes = self._total + logits + transient
            self.peak, self.beside = tuple(self.live.values()), (logits, transient)


def _chunk_bytes(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    chunk: Chunk,
    loads: tuple[_Load, ...],
    logits_kept: bool,
    inputs: float | None,
) -> BytesByModule:
    sums = outside_layers_bytes(model, workload, layout, chunk, keeps_logits=logits_kept)
    if (
        chunk.mtp_layers and not chunk.has_loss
    ):  # no final norm beside it keeps the hidden state that the first depth norms
        hidden = routing.micro_batch_tokens(workload, layout) * model.hidden_size
        sums[Module.MTP] = recompute.activation_nbytes(workload) * hidden
    kinds: dict[tuple[object, ...], dict[Module, int]] = {}
    for place, (layer, load) in enumerate(zip(chunk_layers(model, chunk), loads, strict=True)):
        mtp = layer > model.layers
        again = recompute.layer_recompute(layout, place), place % layout.recompute_span == 0
        kind = (mtp, model.moe_layers[-1 if mtp else layer], load, again)
        if kind not in kinds:
            kinds[kind] = layer_saved_bytes(
                model,
                workload,
                layout,
                layer,
                load=load[0],
                dispatch=load[1],
                input_ratio=inputs,
                position=place,
                fused=not logits_kept,
            )
        for module, nbytes in kinds[kind].items():
            sums[module] = sums.get(module, 0) + nbytes
    return sums


def _rows(live: Sequence[BytesByModule], logits: int, transient: int) -> tuple[MemoryRow, ...]:
    sums: dict[tuple[Component, Module], int] = {
        (Component.LOGITS, Module.HEAD): logits,
        (Component.TRANSIENT, Module.OTHER): transient,
    }
    for held in live:
        for module, nbytes in held.items():
            key = Component.LOGITS if module is Module.HEAD else Component.ACTIVATIONS, module
            sums[key] = sums.get(key, 0) + nbytes
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )
