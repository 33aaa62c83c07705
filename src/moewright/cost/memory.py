"""Peak memory of a pipeline rank, by component and module: states, activations, head, transients,
and the allowances between what is allocated and what the device has to hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moewright.cost.activations import TransientBytes, saved_rows
from moewright.cost.buffers import dispatcher_bytes, gathered_bytes
from moewright.cost.constants import Constants
from moewright.cost.model_states import BucketSet, checkpoint_copy_bytes, state_rows
from moewright.cost.replicas import replica_rows
from moewright.cost.routed_rows import ExpertRows, is_moe_layer
from moewright.cost.symbols import Symbols
from moewright.rules import recompute, routing, schedule
from moewright.rules.stages import Chunk, chunk_layers
from moewright.spec.layout import Layout, Overlap, Recompute
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import AttentionKind
from moewright.spec.plan import Verdict
from moewright.spec.workload import Workload

_BF16_BYTES = 2
# Modules whose weights are operands of 8-bit linears; router, embedding, norms and head stay in 16
# bits.
LINEAR_MODULES = frozenset(
    {Module.ATTENTION, Module.DENSE_MLP, Module.EXPERTS, Module.SHARED_EXPERTS}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory rows of one pipeline rank at its peak, and the standard deviation of their sum."""

    rows: tuple[MemoryRow, ...]
    sd_bytes: float

    @property
    def peak_bytes(self) -> int:
        """Of the device."""
        return sum(row.bytes for row in self.rows if row.component is not Component.HOST)


def steady_micro_batches(layout: Layout, micro_batches: int) -> int:
    """As many micro-batches as the timetable needs to reach its steady state: the peak does not
    grow after it."""
    if layout.schedule.splits_backward:
        return min(micro_batches, 4 * layout.pp)
    if layout.vpp == 1:
        return min(micro_batches, 2 * layout.pp)
    group = schedule.interleaved_group_size(layout)
    return min(micro_batches, 3 * group + micro_batches % group)


def rank_memory(
    workload: Workload,
    constants: Constants,
    size: Symbols,
    *,
    rows: ExpertRows,
    sets: Sequence[BucketSet],
    chunks: Sequence[Chunk],
    table: Sequence[schedule.TimetableRow],
) -> RankMemory:
    """Peak of a pipeline rank that holds `chunks` and parameter `sets`, and runs `table`."""
    model, layout = size.model, size.layout
    beside = transient_bytes(workload, constants, size, chunks)
    states, copied = (
        list(state_rows(workload, layout, sets)),
        checkpoint_copy_bytes(workload, layout, sets),
    )
    away = [row for row in states if row.component is Component.HOST]
    states = [row for row in states if row.component is not Component.HOST]
    states += replica_rows(model, workload, layout, chunks[0].pp_rank)
    inputs: float | None = None
    if workload.precision.is_narrow:
        states = list(
            add_low_precision_copies(
                states, constants.low_precision_bytes("weight_copies", size.dtype) / size.c
            )
        )
        inputs = constants.low_precision_bytes("input", size.dtype) / size.c
    allocated = [
        *states,
        *saved_rows(
            model,
            workload,
            layout,
            rows,
            chunks=chunks,
            table=table,
            transients=beside,
            input_ratio=inputs,
        ),
    ]
    resident = placeholder_bytes(size, chunks) + round(constants["workspace_bytes"])
    resident += gathered_bytes(model, workload, layout, chunks[0].pp_rank)
    if size.is_fused:
        away.append(MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=copied))
    else:
        resident += copied  # a CPU's memory is the host's
    total = sum(row.bytes for row in allocated) + resident
    device = runtime_overhead(
        constants, total, groups=count_communicators(layout), buffers=dispatcher_bytes(size)
    )
    transient = sum(row.bytes for row in allocated if row.component is Component.TRANSIENT)
    allocated = [row for row in allocated if row.component is not Component.TRANSIENT]
    allowances = (
        (Component.TRANSIENT, transient + resident),
        (Component.FRAGMENTATION, round(device.reserved_bytes)),
        (Component.COMMUNICATION, round(device.communication_bytes)),
    )
    allocated += [
        MemoryRow(component=c, module=Module.OTHER, bytes=nbytes)
        for c, nbytes in allowances
        if nbytes
    ]
    return RankMemory(
        rows=tuple(
            sorted(
                (*allocated, *(r for r in away if r.bytes)),
                key=lambda row: (row.component, row.module),
            )
        ),
        sd_bytes=device.sd_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOverhead:
    """Bytes that a device holds beyond what is allocated, and the standard deviation of the
    whole."""

    reserved_bytes: Any  # floats, or arrays of one shape
    communication_bytes: Any
    sd_bytes: Any


def runtime_overhead(
    constants: Constants, allocated: Any, *, groups: Any, buffers: int
) -> RuntimeOverhead:
    """Of so many allocated bytes and communicating process groups, which may be arrays of one
    shape, beside the buffers that a dispatcher registers."""
    deviation = (constants["reserved_share_sd"] * allocated) ** 2 + (
        groups * constants["communicator_bytes_sd"]
    ) ** 2
    return RuntimeOverhead(
        reserved_bytes=constants["reserved_share"] * allocated
        + constants["context_bytes"]
        + constants["stack_bytes"],
        communication_bytes=groups * constants["communicator_bytes"] + buffers,
        sd_bytes=deviation**0.5,
    )


def add_low_precision_copies(states: Sequence[MemoryRow], share: float) -> Iterator[MemoryRow]:
    """States with the 8-bit copies of linear weights, `share` of the weights, that stay for all
    micro-batches."""
    for row in states:
        copied = row.component is Component.WEIGHTS and row.module in LINEAR_MODULES
        yield replace(row, bytes=round(row.bytes * (1 + share))) if copied else row


def transient_bytes(
    workload: Workload, constants: Constants, size: Symbols, chunks: Sequence[Chunk]
) -> TransientBytes:
    """Head and backward working sets of each chunk, and the fullest layer of each."""
    head = head_bytes(constants, size)
    forward, backward = [], []
    for chunk in chunks:
        passes = chunk.mtp_layers + chunk.has_loss
        layer = max(
            (layer_transient_bytes(workload, size, i) for i in chunk_layers(size.model, chunk)),
            default=0,
        )
        forward.append(passes * head.forward)
        backward.append(max(layer, passes * head.backward))
    return TransientBytes(
        forward=tuple(forward), backward=tuple(backward), keeps_logits=not size.is_fused
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadBytes:
    """Short-lived bytes of one pass through the head, while its forward ends and while its backward
    runs."""

    forward: int
    backward: int


def head_bytes(constants: Constants, size: Symbols) -> HeadBytes:
    """Fused stacks hold bf16 logits and an fp32 copy (6 bytes a logit; 2 when fused in place) in
    forward, or the logits' gradient, the head's weight gradient and the gathered input in backward,
    the larger booked to forward. The engine's own cross-entropy keeps the logits as a saved
    activation and makes their gradient. Under recompute=loss both hold a piece of the logits, in
    backward its gradient too, and sum that of the head's input in fp32.
    """
    layout = size.layout
    logits = size.T * size.model.vocab_size // layout.tp
    head_input = size.c * size.T * size.model.hidden_size
    head_weight = _BF16_BYTES * size.model.vocab_size * size.model.hidden_size // layout.tp
    if Recompute.LOSS in layout.recompute:
        piece = size.T * recompute.loss_chunk_columns(size.model, layout)
        summed = 4 * size.T * size.model.hidden_size
        if not size.is_fused:
            return HeadBytes(
                forward=size.c * piece, backward=2 * size.c * piece + head_weight + summed
            )
        fused = max(
            round(constants["logit_bytes"] * piece), 4 * piece + head_weight + head_input + summed
        )
        return HeadBytes(forward=fused, backward=0)
    if not size.is_fused:
        return HeadBytes(forward=0, backward=size.c * logits + head_weight)
    fused = max(round(constants["logit_bytes"] * logits), 2 * logits + head_weight + head_input)
    return HeadBytes(forward=fused, backward=0)


def layer_transient_bytes(workload: Workload, size: Symbols, layer: int) -> int:
    """Gradients of this layer's backward, and what it recomputes."""
    model, layout = size.model, size.layout
    replayed = 0
    if layout.recompute:
        even = routing.routed_rows(model, workload, layout, 1.0)
        load = size.R / even if even else 1.0
        before = recompute.saved_tensors(
            model, workload, layout, layer, load=load, repeats_exchange=size.is_fused
        )
        after = recompute.kept_tensors(before, layout.recompute)
        replayed = sum(row.bytes for row in before) - sum(row.bytes for row in after)
        replayed *= layout.recompute_span
    return layer_gradient_bytes(size, layer) + replayed


def layer_gradient_bytes(size: Symbols, layer: int) -> int:
    """Gradients of the first projection's output, of the activation and of the rows that enter the
    MLP; the gathered hidden state (twice under TP); rows as ETP ranks gather them; and what delayed
    weight gradients wait with."""
    model, layout = size.model, size.layout
    wide = 3 if model.gated else 2
    gathered = size.c * size.T * model.hidden_size * (2 if layout.tp > 1 else 1)
    if is_moe_layer(model, layer) and model.moe is not None:
        gradients = size.c * size.R * (wide * model.moe.ffn_size // layout.etp + model.expert_width)
        if layout.etp > 1:
            gradients += (
                size.c
                * model.expert_width
                * routing.etp_gathered_rows(size.workload, layout, size.R)
            )
    else:
        gradients = size.c * size.T * wide * model.dense_ffn_size // layout.tp
    return (
        gradients
        + gathered
        + (delayed_gradient_bytes(size) if Overlap.WGRAD in layout.overlap else 0)
    )


def delayed_gradient_bytes(size: Symbols) -> int:
    """Output gradients of attention's projections and of shared experts, until their weight
    gradients follow in the next layer; their inputs are those of the layer that overlapped expert
    communication holds more."""
    model, layout, spec = size.model, size.layout, size.model.attention
    if spec.kind is AttentionKind.MLA:
        cut = spec.q_width + spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        whole = spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_head_dim
    else:
        cut, whole = spec.q_width + 2 * spec.kv_width, 0
    shared = model.moe.shared_ffn_size if model.moe else 0
    cut += (2 if model.gated else 1) * shared
    outputs = (2 if shared else 1) * size.T * model.hidden_size
    return size.c * (size.T * cut // layout.tp + size.t * whole + outputs)


def placeholder_bytes(size: Symbols, chunks: Sequence[Chunk]) -> int:
    """One bf16 gradient placeholder a distinct weight shape, cached by fused linear layers (CUDA
    stacks only)."""
    if not size.is_fused:
        return 0
    model, layout, spec, h = size.model, size.layout, size.model.attention, size.model.hidden_size
    layers = [layer for chunk in chunks for layer in chunk_layers(model, chunk)]
    if not layers:
        return 0
    wide = 2 if model.gated else 1
    shapes = {(h, spec.out_width // layout.tp)}
    if spec.kind is AttentionKind.GQA:
        shapes.add(((spec.q_width + 2 * spec.kv_width) // layout.tp, h))
    else:
        q_in = spec.q_lora_rank or h
        shapes |= {
            (spec.q_width // layout.tp, q_in),
            (spec.kv_lora_rank + spec.qk_rope_head_dim, h),
        }
        shapes.add(
            (spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim) // layout.tp, spec.kv_lora_rank)
        )
        shapes |= {(spec.q_lora_rank, h)} if spec.q_lora_rank else set()
    widths = set()
    if any(not is_moe_layer(model, layer) for layer in layers):
        widths.add(model.dense_ffn_size // layout.tp)
    if model.moe is not None and any(is_moe_layer(model, layer) for layer in layers):
        widths.add(model.moe.shared_ffn_size // layout.tp)
        width, inner = model.moe.ffn_size // layout.etp, model.expert_width
        shapes |= {(wide * width, inner), (inner, width)}
        shapes |= {(inner, h), (h, inner)} if model.moe.latent_size else set()
    for width in widths:
        shapes |= {(wide * width, h), (h, width)}
    return _BF16_BYTES * sum(rows * columns for rows, columns in shapes)


def count_communicators(layout: Layout) -> int:
    """Process groups that move data: each keeps buffers of its own. A pipeline has three (stages,
    model, embedding), expert parallelism two (with and without tensor parallelism)."""
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
    """Uncertain within one standard deviation of the limit."""
    if abs(margin_bytes) < spread_bytes:
        return Verdict.UNCERTAIN
    return Verdict.FITS if margin_bytes >= 0 else Verdict.OOM
