"""What a checkpoint holds of a rank, and the copies of it that lie in host memory, to the byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from moewright.cost.memory.fsdp_states import flat_bucket_sets
from moewright.cost.memory.model_states import (
    MASTER_BYTES,
    MOMENTUM_BYTES,
    BucketSet,
    is_updated_by_muon,
    own_elements,
)
from moewright.rules import grid
from moewright.rules.adapters import is_frozen, is_trained
from moewright.rules.checkpoint_shares import share_range
from moewright.rules.delayed_scaling import SCALES_OF_LINEAR, is_delayed, scaled_linears
from moewright.rules.job import GENERATIONS, Job
from moewright.rules.optimizers import stored_widths
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import fsdp, shards
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.units import FP32_BYTES
from moewright.spec.workload import Dtype, SaveMode

_UPDATES_BYTES = 8  # how many there were
_SCALER_NUMBERS = 2  # the scale of the loss, and the steps since it changed
_TABLE_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldState:
    """So many elements of `width` bytes, which `holders` hold alike, the rank among them."""

    holders: tuple[int, ...]  # ranks, ascending
    width: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


def peer_copy_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the row of the copies that a rank holds: of its own state, and of the rank before."""
    world_size = job.layout.world_size
    if not job.workload.checkpoint.peer_every_steps or world_size == 1:
        return ()
    nbytes = GENERATIONS * sum(
        state.nbytes
        for holder in (rank, (rank - 1) % world_size)
        for state in _list_states(job, holder)
    )
    return (MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=nbytes),)


def save_copy_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the row of the copy that a rank writes asynchronous checkpoints from."""
    if job.workload.checkpoint.mode is SaveMode.SYNC:
        return ()
    sums: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
    for state in _list_states(job, rank):
        sums[state.holders, state.width] += state.numel
    nbytes = 0
    for (holders, width), numel in sums.items():
        start, stop = share_range(numel, len(holders), holders.index(rank))
        nbytes += width * (stop - start)
    return (MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=nbytes),)


def _list_states(job: Job, rank: int) -> Iterator[HeldState]:
    """Yield all that a checkpoint holds of a rank, without padding."""
    # The number of updates is the same on every rank.
    yield HeldState(holders=tuple(range(job.layout.world_size)), width=_UPDATES_BYTES, numel=1)
    if job.workload.precision is Dtype.FP16:
        yield HeldState(
            holders=tuple(range(job.layout.world_size)), width=FP32_BYTES, numel=_SCALER_NUMBERS
        )
    yield from _list_optimizer_states(job, rank)
    yield from _list_frozen_weights(job, rank)
    yield from _list_router_states(job, rank)
    yield from _list_delayed_scales(job, rank)


def _list_optimizer_states(job: Job, rank: int) -> Iterator[HeldState]:
    for bucket_set in flat_bucket_sets(job, rank):
        holders = _list_flat_holders(job, bucket_set, rank)
        for name, numel in own_elements(bucket_set):
            for width in _state_widths(job, is_matrix=name in bucket_set.matrices):
                yield HeldState(holders=holders, width=width, numel=numel)
    for unit in fsdp.fsdp_units(job.model, job.layout, rank):
        for shard in unit.shards:
            replicas = grid.group_ranks(job.layout, shard.replica_group, rank)
            holders = _on_stages(job, replicas, shard.holders, rank)
            for width in _state_widths(
                job, is_matrix=is_updated_by_muon(job.workload, shard.param)
            ):
                yield HeldState(holders=holders, width=width, numel=shard.elements.own)


def _state_widths(job: Job, *, is_matrix: bool) -> tuple[int, ...]:
    """Return the bytes of an element's master weight and of each of its moments."""
    if is_matrix:
        return MASTER_BYTES, MOMENTUM_BYTES
    return MASTER_BYTES, *stored_widths(job.workload.optimizer)


def _list_flat_holders(job: Job, bucket_set: BucketSet, rank: int) -> tuple[int, ...]:
    """Return the ranks that own the same slices of flat buckets."""
    layout = fsdp.flat_buffer_layout(job.layout)
    if not layout.zero:
        replicas = grid.group_ranks(layout, bucket_set.group, rank)
    elif layout.shard:
        replica_group = fsdp.fsdp_groups(layout, bucket_set.group).replica_group
        replicas = grid.group_ranks(layout, replica_group, rank)
    else:
        replicas = (rank,)
    return _on_stages(job, replicas, bucket_set.holders, rank)


def _on_stages(
    job: Job, replicas: tuple[int, ...], pp_ranks: tuple[int, ...], rank: int
) -> tuple[int, ...]:
    """Return the ranks of `replicas` on all pipeline ranks that hold the same parameter."""
    if not pp_ranks:
        return tuple(sorted(replicas))
    step = grid.stride(job.layout, "pp")
    # Ranks of a group differ in other coordinates: a shift along pp finds them on another stage.
    first = grid.coordinate(job.layout, rank, "pp")
    return tuple(
        sorted(replica + (pp_rank - first) * step for pp_rank in pp_ranks for replica in replicas)
    )


def _list_frozen_weights(job: Job, rank: int) -> Iterator[HeldState]:
    """Yield frozen parts; of a model whose adapters alone train, the weights are not saved."""
    fine_tuning = job.workload.fine_tuning
    if is_frozen(job.workload):
        return
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    for param in shards.stage_parameters(job.model, job.layout, pp_rank):
        if not is_trained(fine_tuning, param.name):
            group = shards.gradient_group(param.sharded_dims, job.layout)
            pp_ranks = shards.holding_pp_ranks(param.name, job.model, job.layout)
            yield HeldState(
                holders=_on_stages(job, grid.group_ranks(job.layout, group, rank), pp_ranks, rank),
                width=activation_nbytes(job.workload),
                numel=prod(shards.local_shape(param, job.layout)),
            )


def _list_router_states(job: Job, rank: int) -> Iterator[HeldState]:
    """Yield selection biases and tables of experts in the layers of a rank."""
    moe = job.model.moe
    if moe is None:
        return
    stage = _list_stage_ranks(job, rank)
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    params = shards.stage_parameters(job.model, job.layout, pp_rank)
    for layer in sorted({param.layer for param in params if ".moe.experts." in param.name}):
        if layer < moe.router.hash_layers:
            numel = job.model.vocab_size * moe.router.top_k
            yield HeldState(holders=stage, width=_TABLE_BYTES, numel=numel)
        elif moe.router.selection_bias:
            yield HeldState(holders=stage, width=FP32_BYTES, numel=moe.experts)


def _list_delayed_scales(job: Job, rank: int) -> Iterator[HeldState]:
    """Yield the histories and scales of the linears of a rank, and of the experts that it owns."""
    if not is_delayed(job.workload):
        return
    numbers = SCALES_OF_LINEAR * (job.workload.delayed.amax_history_len + 1)  # and the scale
    stage = _list_stage_ranks(job, rank)
    ep_rank = grid.coordinate(job.layout, rank, "ep")
    owners = tuple(other for other in stage if grid.coordinate(job.layout, other, "ep") == ep_rank)
    for linear in scaled_linears(job, grid.coordinate(job.layout, rank, "pp"), ep_rank):
        is_expert = linear.experts > 1
        yield HeldState(
            holders=owners if is_expert else stage,
            width=FP32_BYTES,
            numel=numbers * len(linear.owned),
        )


def _list_stage_ranks(job: Job, rank: int) -> tuple[int, ...]:
    return tuple(sorted(grid.group_ranks(job.layout, "tp_cp_dp", rank)))
