"""Collectives of the token dispatchers of one rank in one step: payload handed in, and calls.

docs/formulas.md 3 has the payload of one layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from moewright.cost.routed_rows import ExpertRows, run_lengths, sum_rows
from moewright.cost.volumes.collective_calls import CallSum, repeats_forward
from moewright.rules import expert_placement, grid, routing
from moewright.rules.job import Job
from moewright.rules.routing import DispatchCounts
from moewright.rules.saved.recompute import activation_nbytes
from moewright.spec.choices import Payload
from moewright.spec.hardware import Collective
from moewright.spec.layout import CapacityFill, Recompute
from moewright.spec.model import MoeSpec
from moewright.spec.units import FP32_BYTES, INT32_BYTES, INT64_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class _DispatchVolume:
    """The sizes of a step's dispatches, over all micro-batches and MoE layers of a rank.

    `passes` are micro-batches x layers, each with so many `forwards` (two where recompute runs the
    forward again). `slots` is the number of expert slots of all ranks, summed over the passes.
    """

    row_bytes: int
    counts: DispatchCounts
    slots: int
    passes: int
    forwards: int


def dispatch_calls(job: Job, rows: ExpertRows) -> Iterator[CallSum]:
    """Yield what the dispatcher moves: forward, the forwards that recompute repeats, backward."""
    moe = job.model.moe
    if moe is None or not rows.layers:
        return
    micro_batches = rows.micro_batches
    layer_slots = (expert_placement.count_slots(job, layer) for layer in rows.layers)
    volume = _DispatchVolume(
        row_bytes=activation_nbytes(job.workload) * job.model.expert_width,
        counts=_sum_dispatches(rows),
        slots=micro_batches * sum(layer_slots),
        passes=micro_batches * len(rows.layers),
        forwards=1 + repeats_forward(job.layout, Recompute.MOE),
    )
    facts = job.layout.dispatcher.facts
    if facts.payload is Payload.TOKENS:
        yield from _all_gather_calls(job, moe, volume)
    elif facts.is_library:
        yield from _library_calls(job, moe, volume)
    elif facts.payload is Payload.COPIES:
        yield from _dedup_calls(job, moe, volume)
    else:
        yield from _all_to_all_calls(job, rows, volume)


def _sum_dispatches(rows: ExpertRows) -> DispatchCounts:
    """Return the counts of all dispatches of a step together."""
    # Micro-batches that are alike and follow each other are taken once.
    weighted = [
        (counts, times) for layers, times in run_lengths(rows.dispatches) for counts in layers
    ]
    return DispatchCounts(
        **{
            field.name: sum(times * getattr(counts, field.name) for counts, times in weighted)
            for field in fields(DispatchCounts)
        }
    )


def _all_to_all_calls(job: Job, rows: ExpertRows, volume: _DispatchVolume) -> Iterator[CallSum]:
    """Yield counts where sizes are not known, rows out, probabilities, and rows back.

    Backward moves the last three the other way. ETP ranks gather each other's counts, rows and
    probabilities, parts padded to the widest, and reduce-scatter the results; in backward the
    transposed.
    """
    etp = job.layout.etp
    row_bytes = volume.row_bytes
    passes = volume.passes
    forwards = volume.forwards
    exchanges_counts = job.layout.capacity_fill is CapacityFill.USED
    counts_bytes = exchanges_counts * INT64_BYTES * volume.slots
    sent = volume.counts.rows_sent
    received = sum_rows(rows.own_ep_rows)
    forward_bytes = counts_bytes + sent * (row_bytes + FP32_BYTES) + received * row_bytes
    backward_bytes = sent * row_bytes + received * (row_bytes + FP32_BYTES)
    forward_calls = (exchanges_counts + 3) * passes
    yield Collective.ALL_TO_ALL, "ep", forwards * forward_bytes, forwards * forward_calls
    yield Collective.ALL_TO_ALL, "ep", backward_bytes, 3 * passes
    widest = sum_rows(rows.widest_etp_rows)
    gathered_bytes = counts_bytes + widest * (row_bytes + FP32_BYTES)
    gather_calls = (exchanges_counts + 2) * passes
    # A reduce-scatter is handed a part for each rank, a gather its own.
    summed_bytes = etp * widest * row_bytes
    yield Collective.ALL_GATHER, "etp", forwards * gathered_bytes, forwards * gather_calls
    yield Collective.REDUCE_SCATTER, "etp", forwards * summed_bytes, forwards * passes
    yield Collective.ALL_GATHER, "etp", widest * row_bytes, passes
    yield Collective.REDUCE_SCATTER, "etp", etp * widest * (row_bytes + FP32_BYTES), 2 * passes


def _all_gather_calls(job: Job, moe: MoeSpec, volume: _DispatchVolume) -> Iterator[CallSum]:
    """Yield the gathers of choices, tokens and probabilities, and the scatter of the sums.

    Backward is the transposed.
    """
    passes, forwards = volume.passes, volume.forwards
    ranks = job.layout.ep * job.layout.etp
    tokens = passes * job.micro_batch_tokens
    token_bytes = tokens * volume.row_bytes
    prob_bytes = tokens * moe.router.top_k * FP32_BYTES
    choice_bytes = tokens * moe.router.top_k * INT64_BYTES
    gathered_bytes = choice_bytes + token_bytes + prob_bytes
    yield Collective.ALL_GATHER, "etp_ep", forwards * gathered_bytes, forwards * 3 * passes
    yield Collective.REDUCE_SCATTER, "etp_ep", forwards * ranks * token_bytes, forwards * passes
    yield Collective.ALL_GATHER, "etp_ep", token_bytes, passes
    yield Collective.REDUCE_SCATTER, "etp_ep", ranks * (token_bytes + prob_bytes), 2 * passes


def _dedup_calls(job: Job, moe: MoeSpec, volume: _DispatchVolume) -> Iterator[CallSum]:
    """Yield the calls of the de-duplicating dispatcher, once for each crossing.

    Forward: counts; the wanted experts of each copy (int32), its row and its probabilities; partial
    sums back. Backward: gradients of the sums out, those of rows and probabilities back. ETP ranks
    gather all that each other receives, parts padded to the widest, and reduce-scatter the sums; in
    backward the transposed.
    """
    layout = job.layout
    counts = volume.counts
    row_bytes = volume.row_bytes
    passes = volume.passes
    forwards = volume.forwards
    ranks = grid.axis_size(layout, "ep_near")
    experts_bytes = INT32_BYTES * moe.router.top_k
    probs_bytes = FP32_BYTES * moe.router.top_k
    copy_bytes = experts_bytes + row_bytes + probs_bytes
    counts_bytes = INT64_BYTES * (volume.slots * ranks // layout.ep + passes * ranks)
    group = "ep_near" if layout.ep_node else "ep"
    crossings = [(group, counts_bytes, counts.copies_out, counts.copies_in)]
    nodes = routing.dispatch_nodes(layout)
    if nodes:
        node_counts_bytes = INT64_BYTES * (volume.slots + passes * (layout.ep + nodes))
        copies = counts.node_copies_out, counts.node_copies_in
        crossings.append(("ep_far", node_counts_bytes, *copies))
    for group, told_bytes, copies_out, copies_in in crossings:
        forward_bytes = told_bytes + copies_out * copy_bytes + copies_in * row_bytes
        backward_bytes = copies_out * row_bytes + copies_in * (row_bytes + probs_bytes)
        yield Collective.ALL_TO_ALL, group, forwards * forward_bytes, forwards * 5 * passes
        yield Collective.ALL_TO_ALL, group, backward_bytes, 3 * passes
    padded = counts.copies_gathered
    # All ranks' parts are padded to one width.
    widest = padded // layout.etp
    gathered_bytes = counts_bytes + widest * copy_bytes
    yield Collective.ALL_GATHER, "etp", forwards * gathered_bytes, forwards * 4 * passes
    yield Collective.REDUCE_SCATTER, "etp", forwards * padded * row_bytes, forwards * passes
    yield Collective.ALL_GATHER, "etp", widest * row_bytes, passes
    yield Collective.REDUCE_SCATTER, "etp", padded * (row_bytes + probs_bytes), 2 * passes


def _library_calls(job: Job, moe: MoeSpec, volume: _DispatchVolume) -> Iterator[CallSum]:
    """Yield what DeepEP and HybridEP are handed, which is not what they move.

    Forward: tokens, choices (int64) and probabilities; the sum of each copy that came. Backward:
    gradients of the sums, and those of copies and their probabilities. HybridEP keeps the
    probabilities of all local experts for a copy.
    """
    row_bytes = volume.row_bytes
    passes = volume.passes
    forwards = volume.forwards
    top_k = moe.router.top_k
    copy_probs = top_k
    if job.layout.dispatcher.facts.brings_local_probs:
        copy_probs = moe.experts // job.layout.ep
    tokens = passes * job.micro_batch_tokens
    copies = volume.counts.copies_in
    token_bytes = row_bytes + INT64_BYTES * top_k + FP32_BYTES * top_k
    forward_bytes = tokens * token_bytes + copies * row_bytes
    backward_bytes = tokens * row_bytes + copies * (row_bytes + FP32_BYTES * copy_probs)
    yield Collective.ALL_TO_ALL, "ep", forwards * forward_bytes, forwards * 4 * passes
    yield Collective.ALL_TO_ALL, "ep", backward_bytes, 3 * passes
