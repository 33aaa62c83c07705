"""The terms of a peak that the timetable does not move, each stated once.

A term is a function of ranks (`RankBatch`) and of what the terms before it booked, and returns the
bytes of each component [ranks, columns]. An estimate makes rows of them, a search sums them: a new
term is a function and a line in one of the lists below. What a timetable moves is in
cost.memory.peak, `LIVE_TERMS` and `ModelMemory.transient_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot
from typing import Any

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.buffers import fsdp_buffer_bytes, gathered_bytes, resident_bytes
from moewright.cost.memory.fsdp_states import flat_state_rows, offloaded_rows, unit_state_rows
from moewright.cost.memory.host_memory import element_nbytes
from moewright.cost.memory.model_states import (
    book_states,
    checkpoint_bytes,
    frozen_nbytes,
    makes_step_gradients,
    moves_units,
    step_gradient_bytes,
)
from moewright.cost.memory.rank_batch import Booked, RankBatch, add_booked
from moewright.cost.memory.replicas import replica_rows
from moewright.cost.stage_parts import Array
from moewright.rules import grid
from moewright.rules.adapters import is_trained
from moewright.rules.delayed_scaling import delayed_scaling_rows, is_delayed
from moewright.rules.job import COPIES, Job
from moewright.rules.shapes.param import Param
from moewright.rules.weight_copies import weight_copy_rows
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import SaveMode

_DEGREES = ("tp", "cp", "ep", "etp")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeakTerm:
    """A term of a peak: its bytes, and the fields of a layout on which they depend.

    `fields` are those of all that a search varies beside the pipeline (SEARCHED_FIELDS). A field
    that is missing here makes a score differ from its estimate.
    """

    book: Callable[[RankBatch, Booked], Booked]
    fields: tuple[str, ...]


def model_states(ranks: RankBatch, _: Booked) -> Booked:
    """Return weights, gradients, master weights and moments of what trains, and the host's part.

    Units of fully_shard that the host holds are moved whole. Where it holds a part of them, each
    rank is asked for its own; where it holds all, they are sums of what each parameter takes.
    """
    sym = ranks.sym
    if moves_units(sym.layout, trained=sym.trained_share):
        if sym.layout.offload_fraction < 1:
            return ranks.sum_rows(_unit_rows)
        return add_booked(ranks.sum_rows(_flat_rows), ranks.sum_parameters(offloaded_rows))
    return book_states(
        sym.workload,
        sym.layout,
        ranks.count_elements(),
        is_linear=ranks.is_linear,
        padding=ranks.columns[Module.OTHER],
        trained=sym.trained_share,
        frozen_nbytes=ranks.constants["frozen_weight_bytes"],
    )


def _unit_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    return unit_state_rows(job, grid.stage_rank(job.layout, pp_rank))


def _flat_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    return flat_state_rows(job, grid.stage_rank(job.layout, pp_rank))


def frozen_weights(ranks: RankBatch, _: Booked) -> Booked:
    """Return the weights of frozen parts, of which every rank holds its whole shard."""
    if not ranks.sym.workload.fine_tuning.freeze:
        return {}
    return ranks.sum_parameters(_frozen_rows)


def _frozen_rows(job: Job, params: Sequence[Param]) -> Iterator[MemoryRow]:
    for param in params:
        if not is_trained(job.workload.fine_tuning, param.name):
            nbytes = frozen_nbytes(param, job)
            yield MemoryRow(component=Component.WEIGHTS, module=param.module, bytes=nbytes)


def expert_replicas(ranks: RankBatch, _: Booked) -> Booked:
    """Return the weights and gradients of replicas of hot experts."""
    if not ranks.sym.layout.spare:
        return {}
    return ranks.sum_rows(replica_rows)


def delayed_scales(ranks: RankBatch, _: Booked) -> Booked:
    """Return the scales of delayed FP8, their histories and amaxes."""
    if not is_delayed(ranks.sym.workload):
        return {}
    return ranks.sum_rows(delayed_scaling_rows)


def weight_copies(ranks: RankBatch, booked: Booked) -> Booked:
    """Return the narrow copies of linear weights, which stay for all micro-batches.

    In a fused stack they are a share of the weights that the terms before this one booked.
    """
    sym = ranks.sym
    if sym.is_low_precision and not sym.is_fused:
        return ranks.sum_rows(weight_copy_rows)
    # Units of fully_shard on the host have no weights beside their fp32 shards under ZeRO-3.
    if not sym.is_low_precision or Component.WEIGHTS not in booked:
        return {}
    share = ranks.constants.low_precision_bytes("weight_copies", sym.dtype) / sym.c
    return {
        # Whole bytes first, as the rows of an estimate have them: a search has to get the same sum.
        Component.WEIGHTS: np.rint(share * np.floor(booked[Component.WEIGHTS]) * ranks.is_linear)
    }


def fixed_buffers(ranks: RankBatch, _: Booked) -> Booked:
    """Return placeholders, workspaces, shared buffers and a packed weight that is widened."""
    sym, constants = ranks.sym, ranks.constants
    nbytes = ranks.by_contents(
        lambda kinds, has_head: resident_bytes(constants, sym, kinds, has_head=has_head)
    )
    return {Component.BUFFERS: ranks.book(nbytes, Module.OTHER)}


def gathered_layers(ranks: RankBatch, _: Booked) -> Booked:
    """Return the layers that are whole beside what ZeRO-2 and ZeRO-3 shard."""
    sym = ranks.sym
    if sym.layout.zero < 2:
        return {}
    nbytes = gathered_bytes(sym.workload, ranks.count_by_layer(), zero=sym.layout.zero)
    return {Component.TRANSIENT: ranks.book(nbytes, Module.OTHER)}


def fsdp_buffers(ranks: RankBatch, _: Booked) -> Booked:
    """Return what torch's FSDP holds besides the gathered layers."""
    if ranks.sym.layout.zero != 3:
        return {}
    return {Component.TRANSIENT: ranks.book(ranks.by_degree(fsdp_buffer_bytes), Module.OTHER)}


def checkpoint_copies(ranks: RankBatch, _: Booked) -> Booked:
    """Return the copies of states in host memory; a CPU's memory is the host's.

    They are that of an asynchronous checkpoint, and those that ranks keep for each other.
    """
    workload = ranks.sym.workload
    keeps_peers = workload.checkpoint.peer_every_steps > 0 and ranks.sym.layout.world_size > 1
    if workload.checkpoint.mode is SaveMode.SYNC and not keeps_peers:
        return {}
    nbytes = checkpoint_bytes(workload, ranks.count_checkpointed())
    if keeps_peers:
        own = ranks.count_elements().own.sum(axis=1)
        nbytes = nbytes + COPIES * element_nbytes(workload) * own
    component = Component.BUFFERS.placed(on_host=ranks.sym.is_fused)
    return {component: ranks.book(nbytes, Module.OTHER)}


def step_gradients(ranks: RankBatch, _: Booked) -> Booked:
    """Return the fp32 gradients that the optimizer makes of narrower ones."""
    if not makes_step_gradients(ranks.sym.workload, ranks.sym.layout):
        return {}
    own = ranks.count_elements().own.sum(axis=1)
    nbytes = step_gradient_bytes(ranks.sym.workload, ranks.sym.layout, own)
    return {Component.TRANSIENT: ranks.book(nbytes, Module.OTHER)}


# The fields in which the layouts of a group differ from those of another, or are chosen for it.
SEARCHED_FIELDS = (*_DEGREES, "mbs", "zero", "offload", "dispatcher", "cp_comm", "overlap")

_SHARDED = (*_DEGREES, "zero", "offload")

# What ranks hold all step long, in the order in which it is worked out.
RESIDENT_TERMS: tuple[PeakTerm, ...] = (
    PeakTerm(book=model_states, fields=_SHARDED),
    PeakTerm(book=frozen_weights, fields=_DEGREES),
    PeakTerm(book=expert_replicas, fields=_DEGREES),
    PeakTerm(book=delayed_scales, fields=("ep",)),
    PeakTerm(book=weight_copies, fields=(*_SHARDED, "mbs")),  # after all weights that have copies
    PeakTerm(book=fixed_buffers, fields=(*_DEGREES, "mbs", "dispatcher")),
    PeakTerm(book=gathered_layers, fields=(*_DEGREES, "zero")),
    PeakTerm(book=fsdp_buffers, fields=(*_DEGREES, "zero", "mbs")),
    PeakTerm(book=checkpoint_copies, fields=_SHARDED),
)

# What the optimizer's step holds, when all activations are free.
OPTIMIZER_TERMS: tuple[PeakTerm, ...] = (PeakTerm(book=step_gradients, fields=_SHARDED),)


def book_terms(ranks: RankBatch, terms: Sequence[PeakTerm]) -> list[Booked]:
    """Return what each of these terms books."""
    sums: Booked = {}
    booked = []
    for term in terms:
        more = ranks.recall(term, term.fields, partial(term.book, ranks, sums))
        sums = add_booked(sums, more)
        booked.append(more)
    return booked


def device_bytes(ranks: RankBatch, terms: Sequence[PeakTerm]) -> Array:
    """Sum what these terms hold on the device of each rank [ranks]; one 0 where none has any."""
    total = np.zeros((1, 1))
    for booked in book_terms(ranks, terms):
        for component, nbytes in booked.items():
            if component is not Component.HOST:
                total = total + nbytes
    return np.asarray(total.sum(axis=1))


def host_bytes(ranks: RankBatch, terms: Sequence[PeakTerm]) -> Array:
    """Sum what these terms hold in host memory for each rank [ranks]; one 0 where none has any."""
    total = np.zeros((1, 1))
    for booked in book_terms(ranks, terms):
        if Component.HOST in booked:
            total = total + booked[Component.HOST]
    return np.asarray(total.sum(axis=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOverhead:
    """What a device holds beyond what is allocated, and the standard deviation of the whole.

    `bytes` are floats, or arrays of one shape, by component.
    """

    bytes: dict[Component, Any]
    sd_bytes: Any


def runtime_overhead(
    constants: Constants, allocated: Any, *, groups: Any, buffers: int
) -> RuntimeOverhead:
    """Return the overhead of `allocated` bytes and of so many communicating process `groups`.

    Both may be arrays of one shape. `buffers` are the bytes that a dispatcher registers.
    """
    # Errors of what is allocated and of what the allocator reserves beside it are independent.
    shares_sd = hypot(constants["reserved_share_sd"], constants["allocated_share_sd"])
    allocated_variance = (shares_sd * allocated) ** 2
    # Not independent: all groups of a run are off by the same bytes, so their deviations add.
    communicator_variance = (groups * constants["communicator_bytes_sd"]) ** 2
    return RuntimeOverhead(
        bytes={
            Component.FRAGMENTATION: constants["reserved_share"] * allocated
            + constants["context_bytes"]
            + constants["stack_bytes"],
            Component.COMMUNICATION: groups * constants["communicator_bytes"] + buffers,
        },
        sd_bytes=(allocated_variance + communicator_variance) ** 0.5,
    )


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
