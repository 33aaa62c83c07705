"""Collectives of one rank in one training step: payload handed in and calls, by (operation,
group)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moewright.cost.model_states import BucketSet
from moewright.cost.replicas import replica_calls
from moewright.cost.routed_rows import (
    ExpertRows,
    is_moe_layer,
    rank_chunks,
    recomputed_layers,
    run_lengths,
    sum_rows,
)
from moewright.rules import expert_placement, fsdp, grid, p2p, routing, stages
from moewright.rules.context_parallel import cp_factors
from moewright.rules.recompute import activation_nbytes
from moewright.rules.stages import chunk_layers
from moewright.rules.timetable_row import RowKind
from moewright.spec.hardware import Collective
from moewright.spec.layout import CapacityFill, CpComm, DispatcherKind, Layout, Recompute
from moewright.spec.ledger import CommRow
from moewright.spec.model import AttentionKind, ModelSpec, MoeSpec, QkNorm
from moewright.spec.workload import RouterAssignment, Workload

INT64_BYTES = 8
INT32_BYTES = 4
FP32_BYTES = 4
_STATISTICS_BYTES = 4 * 8  # squared gradient norm, votes to stop, two loss sums, in fp64
_LAYER_LOSS_BYTES = 4 * 8  # the auxiliary losses of a layer, in fp64

_Call = tuple[Collective, str, int, int]  # operation, group, payload bytes of all calls, calls


def comm_rows(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    rank: int,
    rows: ExpertRows,
    sets: Sequence[BucketSet],
    units: Sequence[fsdp.FsdpUnit] | None = None,
) -> tuple[CommRow, ...]:
    """Sorted rows; groups of one rank make no call. `units`: of our engine under zero=3, whose
    `sets` are flat buffers beside them; None where the sets hold all parameters, whatever is cut.
    """
    chunks = rank_chunks(model, layout, grid.coordinate(layout, rank, "pp"))
    sums: dict[tuple[Collective, str], tuple[int, int]] = {}
    calls = [
        *_step(model, workload, layout, rows),
        *_gradients(
            workload,
            layout if units is None else fsdp.flat_buffer_layout(layout),
            sets,
            len(rows.rows),
        ),
        *_units(workload, units or (), len(rows.rows)),
        *(
            (Collective.ALL_TO_ALL, "ep", *sizes)
            for sizes in replica_calls(model, workload, layout, rank)
        ),
        *_pipeline(model, workload, layout, rank, len(rows.rows)),
        *(_some_replayed if layout.recompute_block else _layers)(
            model, workload, layout, chunks, rows
        ),
    ]
    for op, group, nbytes, count in calls:
        if grid.group_size(layout, group) > 1 and count:
            had = sums.get((op, group), (0, 0))
            sums[op, group] = had[0] + nbytes, had[1] + count
    return tuple(
        CommRow(op=op, group=group, bytes=nbytes, calls=count)
        for (op, group), (nbytes, count) in sorted(sums.items())
    )


def _layers(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    chunks: Sequence[stages.Chunk],
    rows: ExpertRows,
) -> Iterator[_Call]:
    """Of the layers in `chunks`, whose expert rows are `rows`, and of the embedding and head around
    them."""
    yield from _expert(model, workload, layout, rows)
    yield from _tensor(model, workload, layout, chunks, len(rows.rows))
    yield from _context(model, workload, layout, chunks, len(rows.rows))


def _some_replayed(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    chunks: Sequence[stages.Chunk],
    rows: ExpertRows,
) -> Iterator[_Call]:
    """The same where some layers alone are replayed: all without replays, and what replays add to
    these layers."""
    again, plain = (
        replace(layout, recompute_block=0),
        replace(layout, recompute_block=0, recompute=()),
    )
    layers = recomputed_layers(model, layout, chunks)
    part = [
        replace(
            chunk,
            layers=tuple(layer for layer in chunk.layers if layer in layers),
            mtp_layers=sum(
                layer in layers for layer in chunk_layers(model, chunk)[len(chunk.layers) :]
            ),
        )
        for chunk in chunks
    ]
    rows_of_part = rows.select_layers(layers)
    yield from _layers(model, workload, plain, chunks, rows)
    yield from _layers(model, workload, again, part, rows_of_part)
    for op, group, nbytes, count in _layers(model, workload, plain, part, rows_of_part):
        yield op, group, -nbytes, -count


def _step(
    model: ModelSpec, workload: Workload, layout: Layout, rows: ExpertRows
) -> Iterator[_Call]:
    """Valid targets (int64), the four statistics and the losses of all routers, and the expert
    counts of all layers for the record; with a balance loss those of each micro-batch and layer of
    the rank too, over the ranks that share its tokens (of each sequence where they count), or over
    all that share the global batch; with Sinkhorn routing the logits of the rank's tokens.
    """
    yield Collective.ALL_REDUCE, "dp_cp", INT64_BYTES, 1
    layers = len(model.routed_layers) if model.moe else 0
    yield Collective.ALL_REDUCE, "world", _STATISTICS_BYTES + layers * _LAYER_LOSS_BYTES, 1
    if model.moe is not None:
        yield (
            Collective.ALL_REDUCE,
            "world",
            INT64_BYTES * len(model.routed_layers) * model.moe.experts,
            1,
        )
    if model.moe is not None and rows.layers:
        counts = INT64_BYTES * len(rows.layers) * model.moe.experts
        loss, passes = workload.loss, len(rows.rows) * len(rows.layers)
        if loss.aux_coeff:
            yield Collective.ALL_REDUCE, "tp_cp", len(rows.rows) * counts, passes
        if loss.seq_aux_coeff:
            yield Collective.ALL_REDUCE, "tp_cp", len(rows.rows) * layout.mbs * counts, passes
        if loss.global_aux_coeff:
            yield Collective.ALL_REDUCE, "tp_cp_dp", len(rows.rows) * counts, passes
        if workload.router.assignment is RouterAssignment.SINKHORN:
            logits = routing.micro_batch_tokens(workload, layout) * model.moe.experts
            yield (
                Collective.ALL_GATHER,
                "tp_cp",
                passes * logits * workload.router.router_dtype.nbytes,
                passes,
            )


def _expert(
    model: ModelSpec, workload: Workload, layout: Layout, rows: ExpertRows
) -> Iterator[_Call]:
    """What the dispatcher moves: forward, replay of it, and backward."""
    if model.moe is None or not rows.layers:
        return
    passes, forwards = len(rows.rows) * len(rows.layers), 1 + _replayed(layout, Recompute.MOE)
    slots = len(rows.rows) * sum(
        expert_placement.count_slots(model, workload, layout, layer) for layer in rows.layers
    )
    if layout.dispatcher is DispatcherKind.ALL_GATHER:
        yield from _gathered(model.moe, workload, layout, model.expert_width, passes, forwards)
        return
    c, h = activation_nbytes(workload), model.expert_width
    moves = [
        (moved, times) for of_batch, times in run_lengths(rows.dispatches) for moved in of_batch
    ]
    if layout.dispatcher in routing.LIBRARY_DISPATCHERS:
        yield from _left_to_a_library(model.moe, workload, layout, c * h, moves, forwards, passes)
        return
    if layout.dispatcher is DispatcherKind.DEDUP:
        yield from _copied(model.moe, layout, c * h, moves, forwards, passes, slots)
        return
    # Counts, but where sizes are known; rows out, probabilities, rows back; backward the last three
    # the other way.
    told = layout.capacity_fill is CapacityFill.USED
    sent, received = (
        sum(times * moved.rows_sent for moved, times in moves),
        sum_rows(rows.own_ep_rows),
    )
    counts = told * INT64_BYTES * slots
    out, back = sent * (c * h + FP32_BYTES), received * c * h
    yield (
        Collective.ALL_TO_ALL,
        "ep",
        forwards * (counts + out + back),
        forwards * (told + 3) * passes,
    )
    yield Collective.ALL_TO_ALL, "ep", sent * c * h + back + received * FP32_BYTES, 3 * passes
    # ETP ranks gather each other's counts, rows and probabilities, parts padded to the widest, and
    # reduce-scatter the
    # results; in backward the transposed.
    widest = sum_rows(rows.widest_etp_rows)
    gathered = counts + widest * (c * h + FP32_BYTES)
    yield Collective.ALL_GATHER, "etp", forwards * gathered, forwards * (told + 2) * passes
    yield (
        Collective.REDUCE_SCATTER,
        "etp",
        forwards * layout.etp * widest * c * h,
        forwards * passes,
    )
    yield Collective.ALL_GATHER, "etp", widest * c * h, passes
    yield Collective.REDUCE_SCATTER, "etp", layout.etp * widest * (c * h + FP32_BYTES), 2 * passes


def _gathered(
    moe: MoeSpec, workload: Workload, layout: Layout, hidden: int, passes: int, forwards: int
) -> Iterator[_Call]:
    """The all-gather dispatcher: choices, tokens, probabilities gathered, sums scattered; backward
    the transposed."""
    t, k, ranks = (
        routing.micro_batch_tokens(workload, layout),
        moe.router.top_k,
        layout.ep * layout.etp,
    )
    row = activation_nbytes(workload) * hidden
    tokens, probs = passes * t * row, passes * t * k * FP32_BYTES
    choices = passes * t * k * INT64_BYTES
    yield (
        Collective.ALL_GATHER,
        "etp_ep",
        forwards * (choices + tokens + probs),
        forwards * 3 * passes,
    )
    yield Collective.REDUCE_SCATTER, "etp_ep", forwards * ranks * tokens, forwards * passes
    yield Collective.ALL_GATHER, "etp_ep", tokens, passes
    yield Collective.REDUCE_SCATTER, "etp_ep", ranks * (tokens + probs), 2 * passes


def _copied(
    moe: MoeSpec,
    layout: Layout,
    row: int,
    moves: Sequence[tuple[routing.DispatchCounts, int]],
    forwards: int,
    passes: int,
    slots: int,
) -> Iterator[_Call]:
    """The de-duplicating dispatcher, once a crossing: counts; a copy's wanted experts (int32), its
    row and its probabilities; partial sums back. Backward: gradients of the sums out, of rows and
    probabilities back. ETP ranks gather all that each other receives, parts padded to the widest,
    and reduce-scatter the sums; in backward the transposed. `slots`: of experts, of all passes.
    """
    out = sum(times * moved.copies_out for moved, times in moves)
    coming = sum(times * moved.copies_in for moved, times in moves)
    ranks, k = grid.axis_size(layout, "ep_near"), moe.router.top_k
    told = INT64_BYTES * (slots * ranks // layout.ep + passes * ranks)
    crossings = [("ep_near" if layout.ep_node else "ep", told, out, coming)]
    if nodes := routing.dispatch_nodes(layout):
        leaving = sum(times * moved.node_copies_out for moved, times in moves)
        entering = sum(times * moved.node_copies_in for moved, times in moves)
        crossings.append(
            ("ep_far", INT64_BYTES * (slots + passes * (layout.ep + nodes)), leaving, entering)
        )
    for group, counts, there, back in crossings:
        forward = counts + there * (INT32_BYTES * k + row + FP32_BYTES * k) + back * row
        yield Collective.ALL_TO_ALL, group, forwards * forward, forwards * 5 * passes
        yield Collective.ALL_TO_ALL, group, there * row + back * (row + FP32_BYTES * k), 3 * passes
    padded = sum(times * moved.copies_gathered for moved, times in moves)
    widest = padded // layout.etp
    gathered = told + widest * (INT32_BYTES * k + row + FP32_BYTES * k)
    yield Collective.ALL_GATHER, "etp", forwards * gathered, forwards * 4 * passes
    yield Collective.REDUCE_SCATTER, "etp", forwards * padded * row, forwards * passes
    yield Collective.ALL_GATHER, "etp", widest * row, passes
    yield Collective.REDUCE_SCATTER, "etp", padded * (row + FP32_BYTES * k), 2 * passes


def _left_to_a_library(
    moe: MoeSpec,
    workload: Workload,
    layout: Layout,
    row: int,
    moves: Sequence[tuple[routing.DispatchCounts, int]],
    forwards: int,
    passes: int,
) -> Iterator[_Call]:
    """What DeepEP and HybridEP are handed, not what they move: tokens, choices (int64) and
    probabilities; sums of each copy here. Backward: gradients of the sums, and of copies and their
    probabilities.
    """
    t, k = passes * routing.micro_batch_tokens(workload, layout), moe.router.top_k
    here = sum(times * moved.copies_in for moved, times in moves)
    wide = moe.experts // layout.ep if layout.dispatcher is DispatcherKind.HYBRIDEP else k
    forward = t * (row + INT64_BYTES * k + FP32_BYTES * k) + here * row
    yield Collective.ALL_TO_ALL, "ep", forwards * forward, forwards * 4 * passes
    yield Collective.ALL_TO_ALL, "ep", t * row + here * (row + FP32_BYTES * wide), 3 * passes


def _replayed(layout: Layout, *policies: Recompute) -> bool:
    """Whether backward runs the forward of a block again: under full recompute, or one of
    `policies`."""
    return any(policy in layout.recompute for policy in (Recompute.FULL, *policies))


def _gradients(
    workload: Workload, layout: Layout, sets: Sequence[BucketSet], micro_batches: int
) -> Iterator[_Call]:
    """Reduction of gradients and gather of updated weights, a call a bucket; zero=3 reduces every
    micro-batch, and gathers for each forward and each backward. Hybrid sharding sums the cut
    gradients over the copies once a step.
    """
    sharded = layout.zero == 3
    reductions, gathers = (micro_batches, 2 * micro_batches) if sharded else (1, 1)
    c, grad = activation_nbytes(workload), workload.grad_dtype.nbytes
    for held in sets:
        count, group = len(held.buckets), fsdp.state_group(layout, held.group)
        op = Collective.REDUCE_SCATTER if layout.zero else Collective.ALL_REDUCE
        yield op, group, reductions * grad * held.numel, reductions * count
        if layout.shard:
            copies = fsdp.fsdp_groups(layout, held.group).replica_group
            yield Collective.ALL_REDUCE, copies, grad * held.numel // held.shards, count
        if held.holders:
            yield (
                Collective.ALL_REDUCE,
                "pp",
                reductions * grad * held.numel // held.shards,
                reductions * count,
            )
        if layout.zero:
            yield (
                Collective.ALL_GATHER,
                group,
                gathers * c * held.numel // held.shards,
                gathers * count,
            )


def _units(
    workload: Workload, units: Sequence[fsdp.FsdpUnit], micro_batches: int
) -> Iterator[_Call]:
    """fully_shard: a unit is gathered for each forward and each backward, and reduced after each
    backward; once a step the ranks that hold copies of its parts sum their gradients.
    """
    c, grad = activation_nbytes(workload), workload.grad_dtype.nbytes
    for unit in units:
        gathers = micro_batches * (1 if unit.stays_gathered else 2)
        yield Collective.ALL_GATHER, unit.group, gathers * c * unit.padded_numel, gathers
        yield (
            Collective.REDUCE_SCATTER,
            unit.group,
            micro_batches * grad * unit.ranks * unit.padded_numel,
            micro_batches,
        )
        for group, own in unit.replicated_numel.items():
            yield Collective.ALL_REDUCE, group, grad * own, int(own > 0)


def _tensor(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    chunks: Sequence[stages.Chunk],
    micro_batches: int,
) -> Iterator[_Call]:
    """Sequence parallelism: each dense MLP gathers its input (again for its weight gradient) and
    reduce-scatters its output, with the transposed pair in backward, attention likewise; the head
    gathers, the embedding scatters. The loss all-reduces the top of the logits, then their sum and
    the target's; norms of queries and keys over all heads their mean square, and a mean again in
    backward. Without sequence parallelism nothing is gathered, and what would be scattered is
    all-reduced. More ranks than key heads gather the parts of those.
    """
    c, T = activation_nbytes(workload), workload.seq_len * layout.mbs // layout.cp
    shared = model.moe is not None and model.moe.shared_ffn_size > 0
    attention_again, mlp_again = _replayed(layout), _replayed(layout, Recompute.MLP)
    shared_again = _replayed(layout, Recompute.MOE, Recompute.SHARED_EXPERTS)
    gathered, scattered = _attention_widths(model, layout)
    widths: dict[Collective, list[int]] = {Collective.ALL_GATHER: [], Collective.REDUCE_SCATTER: []}
    means = losses = attentions = traded = 0
    for chunk in chunks:
        layers = chunk_layers(model, chunk)
        sparse = sum(is_moe_layer(model, layer) for layer in layers)
        dense = len(layers) - sparse
        blocks = dense + shared * sparse
        replays = mlp_again * dense + shared_again * shared * sparse
        heads = chunk.has_loss + chunk.mtp_layers
        whole = 3 * blocks + replays + 2 * heads + chunk.has_embedding + chunk.mtp_layers
        widths[Collective.ALL_GATHER] += [*len(layers) * gathered, *whole * [model.hidden_size]]
        # An MTP depth gathers both its inputs side by side, and again for the weight gradient.
        widths[Collective.ALL_GATHER] += (
            (2 + attention_again) * chunk.mtp_layers * [2 * model.hidden_size]
        )
        whole = 2 * blocks + replays + heads + chunk.has_embedding + chunk.mtp_layers
        widths[Collective.REDUCE_SCATTER] += [
            *len(layers) * scattered,
            *whole * [model.hidden_size],
        ]
        widths[Collective.REDUCE_SCATTER] += chunk.mtp_layers * [2 * model.hidden_size]
        traded += (2 + attention_again) * chunk.mtp_layers
        losses += heads
        attentions += len(layers)
        means += (
            len(layers) * (4 + 2 * attention_again) if model.attention.qk_norm is QkNorm.FULL else 0
        )
    if not layout.sp:
        summed = widths[Collective.REDUCE_SCATTER]
        yield (
            Collective.ALL_REDUCE,
            "tp",
            micro_batches * sum(summed) * c * T,
            micro_batches * len(summed),
        )
        # All ranks need all columns of an MTP projection: they gather them; of their gradients each
        # keeps its part.
        columns = (
            sum(chunk.mtp_layers for chunk in chunks) * (1 + attention_again) * [model.hidden_size]
        )
        widths, traded = {Collective.ALL_GATHER: columns, Collective.REDUCE_SCATTER: []}, 0
    if model.attention.kind is AttentionKind.GQA and layout.tp > model.attention.kv_heads:
        keys_and_values = attentions * [2 * model.attention.kv_width]
        widths[Collective.ALL_GATHER] += (1 + attention_again) * keys_and_values
        widths[Collective.REDUCE_SCATTER] += keys_and_values
    for op, parts in ((Collective.ALL_GATHER, layout.tp), (Collective.REDUCE_SCATTER, 1)):
        yield (
            op,
            "tp",
            micro_batches * sum(widths[op]) * c * T // parts,
            micro_batches * len(widths[op]),
        )
    traded *= micro_batches  # columns of an MTP projection for tokens, there and back
    yield Collective.ALL_TO_ALL, "tp", traded * c * T * model.hidden_size // layout.tp, traded
    reduced = FP32_BYTES * T * (means + 3 * losses)
    yield Collective.ALL_REDUCE, "tp", micro_batches * reduced, micro_batches * (means + 2 * losses)


def _attention_widths(model: ModelSpec, layout: Layout) -> tuple[list[int], list[int]]:
    """Widths of what one attention layer gathers and scatters over TP in a micro-batch.

    Its input is gathered for the products and again for their weight gradients; latent attention
    gathers its latents instead, and the rotated part of the keys. The output's gradient is
    gathered, the output and the gradients of what was gathered are summed and scattered.
    """
    spec, h = model.attention, model.hidden_size
    inputs, also = [h], []
    if spec.kind is AttentionKind.MLA:
        inputs, also = [spec.q_lora_rank or h, spec.kv_lora_rank], [spec.qk_rope_head_dim]
    forward = inputs + also
    again = _replayed(layout, Recompute.MLA_UP_PROJ) * forward
    return [*forward, *inputs, h, *again], [h, *forward, *_replayed(layout) * [h]]


def _context(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    chunks: Sequence[stages.Chunk],
    micro_batches: int,
) -> Iterator[_Call]:
    """Of every attention layer: queries, keys, values and the output between ranks that exchange
    heads for tokens, and in backward their gradients. Between the others keys and values, sent on
    by all ranks but one (or gathered once) in forward and in backward, where their gradients,
    summed in fp32, go all the way round (or are reduced and scattered).
    """
    spec, tp, mla = model.attention, layout.tp, model.attention.kind is AttentionKind.MLA
    passes = micro_batches * sum(len(chunk_layers(model, chunk)) for chunk in chunks)
    T, c = workload.seq_len * layout.mbs // layout.cp, activation_nbytes(workload)
    apart, ring = cp_factors(layout)
    key_heads = max(1, (spec.heads if mla else spec.kv_heads) // tp, apart)
    block = T * key_heads * (spec.head_dim + spec.v_head_dim)
    inputs, calls = c * (T * spec.q_width // tp + block), 2 if mla else 3
    again = _replayed(layout, Recompute.MLA_UP_PROJ)
    yield (
        Collective.ALL_TO_ALL,
        "cp_a2a",
        (2 + again) * passes * inputs,
        (2 + again) * passes * calls,
    )
    outs = passes * (2 + _replayed(layout))
    yield Collective.ALL_TO_ALL, "cp_a2a", outs * c * T * spec.out_width // tp, outs
    visits = passes * (2 + _replayed(layout, Recompute.CORE_ATTN))
    if layout.cp_comm is CpComm.ALL_GATHER:
        yield Collective.ALL_GATHER, "cp_kv", visits * c * block, visits
        yield Collective.REDUCE_SCATTER, "cp_kv", passes * ring * FP32_BYTES * block, passes
    else:
        yield Collective.P2P, "cp_kv", (ring - 1) * visits * c * block, (ring - 1) * visits
        yield Collective.P2P, "cp_kv", ring * passes * FP32_BYTES * block, ring * passes


def _pipeline(
    model: ModelSpec, workload: Workload, layout: Layout, rank: int, micro_batches: int
) -> Iterator[_Call]:
    """One hidden state to the next virtual stage, and its gradient back, where that lies on another
    rank."""
    c, t, pp_rank = (
        activation_nbytes(workload),
        routing.micro_batch_tokens(workload, layout),
        grid.coordinate(layout, rank, "pp"),
    )
    sends = 0
    for number in range(layout.vpp):
        stage = stages.virtual_stage(layout, pp_rank, number)
        targets = (p2p.output_stage(layout, kind, stage) for kind in (RowKind.F, RowKind.B))
        sends += sum(
            stages.stage_position(layout, to)[0] != pp_rank for to in targets if to is not None
        )
    yield (
        Collective.P2P,
        "pp",
        micro_batches * sends * c * t * model.hidden_size,
        micro_batches * sends,
    )
