"""Bytes of the copies of states that ranks keep for each other in host memory."""

from __future__ import annotations

from moewright.cost.memory.fsdp_states import flat_bucket_sets
from moewright.cost.memory.model_states import (
    MASTER_BYTES,
    MOMENTUM_BYTES,
    is_updated_by_muon,
    own_elements,
)
from moewright.rules import grid
from moewright.rules.job import Job
from moewright.rules.moments import stored_nbytes
from moewright.rules.peer_copies import GENERATIONS
from moewright.rules.shapes import fsdp, shards
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import Dtype, Workload

_UPDATES_BYTES = 8  # how many there were
_LOSS_SCALE_BYTES = 8
_BIAS_BYTES = 4
_TABLE_BYTES = 8


def peer_copy_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the row of the copies that a rank holds: of its own state, and of the rank before."""
    world_size = job.layout.world_size
    if not job.workload.checkpoint.peer_every_steps or world_size == 1:
        return ()
    ranks = (rank, (rank - 1) % world_size)
    nbytes = GENERATIONS * sum(_state_nbytes(job, number) for number in ranks)
    return (MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=nbytes),)


def element_nbytes(workload: Workload) -> int:
    """Return the bytes of a copied element: its master weight and its moments."""
    return MASTER_BYTES + stored_nbytes(workload.optimizer)


def _state_nbytes(job: Job, rank: int) -> int:
    """Return the bytes of all that a checkpoint would hold of a rank, without padding."""
    matrix_bytes = MASTER_BYTES + MOMENTUM_BYTES
    other_bytes = element_nbytes(job.workload)
    nbytes = _UPDATES_BYTES + _router_nbytes(job, rank)
    if job.workload.precision is Dtype.FP16:
        nbytes += _LOSS_SCALE_BYTES
    for bucket_set in flat_bucket_sets(job, rank):
        for name, numel in own_elements(bucket_set):
            nbytes += numel * (matrix_bytes if name in bucket_set.matrices else other_bytes)
    for unit in fsdp.fsdp_units(job.model, job.layout, rank):
        for shard in unit.shards:
            is_matrix = is_updated_by_muon(job.workload, shard.param)
            nbytes += shard.own_numel * (matrix_bytes if is_matrix else other_bytes)
    return nbytes


def _router_nbytes(job: Job, rank: int) -> int:
    """Return the bytes of selection biases and of tables of experts in the layers of a rank."""
    moe = job.model.moe
    if moe is None:
        return 0
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    params = shards.stage_parameters(job.model, job.layout, pp_rank)
    layers = {param.layer for param in params if ".moe.experts." in param.name}
    nbytes = 0
    for layer in layers:
        if layer < moe.router.hash_layers:
            nbytes += _TABLE_BYTES * job.model.vocab_size * moe.router.top_k
        elif moe.router.selection_bias:
            nbytes += _BIAS_BYTES * moe.experts
    return nbytes
