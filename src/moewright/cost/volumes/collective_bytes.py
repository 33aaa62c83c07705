"""Collectives of one rank in one step: payload handed in and calls, by operation and group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moewright.cost.memory.model_states import BucketSet
from moewright.cost.memory.replicas import replica_calls
from moewright.cost.routed_rows import ExpertRows, rank_chunks, recomputed_layers
from moewright.cost.time.muon import muon_calls
from moewright.cost.volumes.collective_calls import CallSum
from moewright.cost.volumes.dispatch_calls import dispatch_calls
from moewright.cost.volumes.tensor_context_calls import (
    context_parallel_calls,
    tensor_parallel_calls,
)
from moewright.rules import grid
from moewright.rules.delayed_scaling import amax_reduction_bytes
from moewright.rules.job import Job
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import fsdp
from moewright.rules.timetable import p2p, schedule
from moewright.rules.timetable.stages import Chunk, chunk_layers, stage_position, virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout
from moewright.spec.ledger import CommRow
from moewright.spec.model import ModelSpec
from moewright.spec.units import FP32_BYTES, INT64_BYTES
from moewright.spec.workload import Objective, RouterAssignment, Workload

_STATISTICS_BYTES = 4 * 8  # squared gradient norm, votes to stop, two loss sums, in fp64
_FLAG_BYTES = 8
_REWARD_BYTES = 2 * 8  # the pairs that the chosen answer wins, and the margins, in fp64
_LAYER_LOSS_BYTES = 4 * 8  # the auxiliary losses of a layer, in fp64


def comm_rows(
    job: Job,
    rank: int,
    rows: ExpertRows,
    sets: Sequence[BucketSet],
    units: Sequence[fsdp.FsdpUnit] | None = None,
) -> tuple[CommRow, ...]:
    """Return the collectives of a rank, sorted; groups of one rank make no call.

    `units` are those of our engine under zero=2 and 3, whose `sets` are flat buffers beside them;
    None where the sets hold all parameters, whatever is sharded.
    """
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    chunks = rank_chunks(job.model, job.layout, pp_rank)
    micro_batches = rows.micro_batches
    flat_layout = job.layout if units is None else fsdp.flat_buffer_layout(job.layout)
    calls = [
        *_step_calls(job, rows),
        *_gradient_calls(job.workload, flat_layout, sets, micro_batches),
        *_unit_calls(job, pp_rank, units or (), micro_batches),
        *muon_calls(job, rank, sets, units or ()),
        *_replica_calls(job, rank),
        *_scale_calls(job, pp_rank),
        *_pipeline_calls(job, pp_rank, micro_batches),
        *_layer_calls(job, chunks, rows),
        *_answer_calls(job, chunks, micro_batches),
    ]
    sums: dict[tuple[Collective, str], tuple[int, int]] = {}
    for op, group, nbytes, count in calls:
        if grid.group_size(job.layout, group) > 1 and count:
            sum_bytes, sum_calls = sums.get((op, group), (0, 0))
            sums[op, group] = sum_bytes + nbytes, sum_calls + count
    return tuple(
        CommRow(op=op, group=group, bytes=nbytes, calls=count)
        for (op, group), (nbytes, count) in sorted(sums.items())
    )


def _layer_calls(job: Job, chunks: Sequence[Chunk], rows: ExpertRows) -> Iterator[CallSum]:
    """Yield the calls of the layers in `chunks`, and of the embedding and head around them.

    Where full recompute covers only some layers, these are the calls of all layers without
    recompute, plus those that recompute adds to the covered layers: their calls with recompute less
    their calls without it.
    """
    layout = job.layout
    if not layout.recompute_block:
        yield from _uniform_layer_calls(job, chunks, rows)
        return
    full = replace(job, layout=replace(layout, recompute_block=0))
    plain = replace(job, layout=replace(layout, recompute_block=0, recompute=()))
    layers = recomputed_layers(job.model, layout, chunks)
    recomputed_chunks = [_keep_layers(job.model, chunk, layers) for chunk in chunks]
    recomputed_rows = rows.select_layers(layers)
    yield from _uniform_layer_calls(plain, chunks, rows)
    yield from _uniform_layer_calls(full, recomputed_chunks, recomputed_rows)
    for op, group, nbytes, count in _uniform_layer_calls(plain, recomputed_chunks, recomputed_rows):
        yield op, group, -nbytes, -count


def _keep_layers(model: ModelSpec, chunk: Chunk, layers: frozenset[int]) -> Chunk:
    """Return the chunk without the layers that are not among `layers`."""
    mtp_layers = chunk_layers(model, chunk)[len(chunk.layers) :]
    return replace(
        chunk,
        layers=tuple(layer for layer in chunk.layers if layer in layers),
        mtp_layers=sum(layer in layers for layer in mtp_layers),
    )


def _uniform_layer_calls(job: Job, chunks: Sequence[Chunk], rows: ExpertRows) -> Iterator[CallSum]:
    """Yield the calls of layers that all have the layout's recompute."""
    micro_batches = rows.micro_batches
    yield from dispatch_calls(job, rows)
    yield from tensor_parallel_calls(job, chunks, micro_batches)
    yield from context_parallel_calls(job, chunks, micro_batches)


def _step_calls(job: Job, rows: ExpertRows) -> Iterator[CallSum]:
    """Yield the statistics of a step and the counts of its routers.

    Once a step: valid targets or pairs (int64), the four statistics, those of pairs and the losses
    of all routers, and the expert counts of all layers for the record. For each micro-batch and MoE
    layer of the rank, besides:

    - with a balance loss over the micro-batch, its expert counts, over the ranks that share it;
    - with one over sequences, the counts of each sequence, over the same ranks;
    - with one over the global batch, the counts, over all ranks that share that batch;
    - with Sinkhorn routing, the logits of the rank's tokens.
    """
    yield Collective.ALL_REDUCE, "dp_cp", INT64_BYTES, 1
    moe = job.model.moe
    holds_pairs = job.workload.loss.objective is Objective.DPO
    statistics_bytes = _STATISTICS_BYTES + holds_pairs * _REWARD_BYTES
    if moe is None:
        yield Collective.ALL_REDUCE, "world", statistics_bytes, 1
        return
    layers = len(job.model.routed_layers)
    # Whether some rank had more rows than its budget is one statistic more.
    statistics_bytes += bool(job.layout.rank_capacity) * _FLAG_BYTES
    yield Collective.ALL_REDUCE, "world", statistics_bytes + layers * _LAYER_LOSS_BYTES, 1
    yield Collective.ALL_REDUCE, "world", INT64_BYTES * layers * moe.experts, 1
    if not rows.layers:
        return
    loss, router = job.workload.loss, job.workload.router
    passes = rows.micro_batches * len(rows.layers)
    counts_bytes = INT64_BYTES * passes * moe.experts
    if loss.aux_coeff:
        yield Collective.ALL_REDUCE, "tp_cp", counts_bytes, passes
    if loss.seq_aux_coeff:
        yield Collective.ALL_REDUCE, "tp_cp", job.layout.mbs * counts_bytes, passes
    if loss.global_aux_coeff:
        yield Collective.ALL_REDUCE, "tp_cp_dp", counts_bytes, passes
    if router.assignment is RouterAssignment.SINKHORN:
        logits_bytes = job.micro_batch_tokens * moe.experts * router.router_dtype.nbytes
        yield Collective.ALL_GATHER, "tp_cp", passes * logits_bytes, passes


def _answer_calls(job: Job, chunks: Sequence[Chunk], micro_batches: int) -> Iterator[CallSum]:
    """Yield the gathers of the nll of tokens (fp32), of whose sums the losses of pairs are made."""
    if job.workload.loss.objective is Objective.DPO:
        calls = micro_batches * sum(chunk.has_loss for chunk in chunks)
        yield Collective.ALL_GATHER, "cp", calls * FP32_BYTES * job.tp_group_tokens, calls


def _gradient_calls(
    workload: Workload, layout: Layout, sets: Sequence[BucketSet], micro_batches: int
) -> Iterator[CallSum]:
    """Yield the reduction of gradients and the gather of updated weights, a call a bucket.

    zero=2 and 3 reduce after every micro-batch, zero=3 gathers for each forward and each backward.
    Hybrid sharding sums the sharded gradients over the replicas once a step.
    """
    reductions = gathers = 1
    if layout.zero >= 2:
        reductions = micro_batches
    if layout.zero == 3:
        gathers = 2 * micro_batches
    reduce_op = Collective.REDUCE_SCATTER if layout.zero else Collective.ALL_REDUCE
    for bucket_set in sets:
        count = len(bucket_set.buckets)
        group = fsdp.state_group(layout, bucket_set.group)
        gradient_bytes = workload.grad_dtype.nbytes * bucket_set.numel
        weight_bytes = activation_nbytes(workload) * bucket_set.numel
        yield reduce_op, group, reductions * gradient_bytes, reductions * count
        if layout.shard:
            replica_group = fsdp.fsdp_groups(layout, bucket_set.group).replica_group
            yield Collective.ALL_REDUCE, replica_group, gradient_bytes // bucket_set.shards, count
        if bucket_set.holders:
            shard_bytes = reductions * gradient_bytes // bucket_set.shards
            yield Collective.ALL_REDUCE, "pp", shard_bytes, reductions * count
        if layout.zero:
            shard_bytes = gathers * weight_bytes // bucket_set.shards
            yield Collective.ALL_GATHER, group, shard_bytes, gathers * count


def _unit_calls(
    job: Job, pp_rank: int, units: Sequence[fsdp.FsdpUnit], micro_batches: int
) -> Iterator[CallSum]:
    """Yield the calls of fully_shard: gathers of each unit, and reductions of its gradients.

    After each backward what its chunk used of a unit is reduced. Once a step the ranks that hold
    replicas of shards sum their gradients, then the pipeline ranks that hold the same parameter;
    these sums are of fp32.
    """
    if not units:
        return
    c = activation_nbytes(job.workload)
    grad_bytes = job.workload.grad_dtype.nbytes
    table = schedule.timetable(job.layout, micro_batches)[pp_rank]
    backwards = Counter(row.chunk for row in table if row.kind is RowKind.B)
    for unit in units:
        gathers = fsdp.count_gathers(job.layout, unit, table)
        yield Collective.ALL_GATHER, unit.group, gathers * c * unit.padded_numel, gathers
        for chunk, count in backwards.items():
            numel = sum(shard.elements.padded for shard in unit.shards if chunk in shard.chunks)
            reduced_bytes = count * grad_bytes * unit.ranks * numel
            yield Collective.REDUCE_SCATTER, unit.group, reduced_bytes, count if numel else 0
        for group, numel in unit.replicated_numel.items():
            yield Collective.ALL_REDUCE, group, FP32_BYTES * numel, int(numel > 0)
        for shard in unit.shards:
            if shard.holders and shard.elements.own:
                yield Collective.ALL_REDUCE, "pp", FP32_BYTES * shard.elements.own, 1


def _scale_calls(job: Job, pp_rank: int) -> Iterator[CallSum]:
    """Yield the maximum of the amaxes of delayed FP8 scales over the ranks of a stage."""
    nbytes = amax_reduction_bytes(job, pp_rank)
    if nbytes:
        yield Collective.ALL_REDUCE, "tp_cp_dp", nbytes, 1


def _replica_calls(job: Job, rank: int) -> Iterator[CallSum]:
    for nbytes, count in replica_calls(job, rank):
        yield Collective.ALL_TO_ALL, "ep", nbytes, count


def _pipeline_calls(job: Job, pp_rank: int, micro_batches: int) -> Iterator[CallSum]:
    """Yield the sends of hidden states to the next virtual stage, and of gradients back.

    Nothing is sent to a stage on the same rank.
    """
    layout = job.layout
    sends = 0
    for vpp_rank in range(layout.vpp):
        stage = virtual_stage(layout, pp_rank, vpp_rank)
        targets = (p2p.output_stage(layout, kind, stage) for kind in (RowKind.F, RowKind.B))
        for target in targets:
            if target is not None:
                target_rank, _ = stage_position(layout, target)
                sends += target_rank != pp_rank
    width = job.model.residual_streams * job.model.hidden_size
    hidden_bytes = activation_nbytes(job.workload) * job.micro_batch_tokens * width
    yield Collective.P2P, "pp", micro_batches * sends * hidden_bytes, micro_batches * sends
