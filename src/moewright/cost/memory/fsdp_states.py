"""Bytes of the model states that torch's fully_shard shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moewright.cost.memory.model_states import (
    MASTER_BYTES,
    MOMENTUM_BYTES,
    BucketSet,
    bucket_sets,
    is_updated_by_muon,
    state_rows,
)
from moewright.rules.job import Job
from moewright.rules.optimizers import moment_nbytes, scale_nbytes
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import fsdp
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import Workload


def flat_bucket_sets(job: Job, rank: int) -> list[BucketSet]:
    """Return the bucket sets of what fully_shard leaves in a rank's flat buffers."""
    flat_job = replace(job, layout=fsdp.flat_buffer_layout(job.layout))
    return [
        bucket_set
        for bucket_set in bucket_sets(flat_job, rank)
        if not fsdp.is_fsdp_sharded(job.layout, bucket_set.group)
    ]


def unit_state_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory rows of a rank's states in flat buffers and in fully_shard's units."""
    flat_layout = fsdp.flat_buffer_layout(job.layout)
    return (
        *state_rows(job.workload, flat_layout, flat_bucket_sets(job, rank)),
        *fsdp_rows(job.workload, job.layout, fsdp.fsdp_units(job.model, job.layout, rank)),
    )


def unit_gradient_bytes(layout: Layout, units: Sequence[fsdp.FsdpUnit], *, with_host: bool) -> int:
    """Return the bytes of the gradients that fully_shard makes as backwards end.

    `with_host`: those that are in host memory too.
    """
    offloaded = fsdp.offloaded_names(layout, units)
    return sum(
        MASTER_BYTES * shard.padded_numel
        for unit in units
        for shard in unit.shards
        if with_host or shard.param.name not in offloaded
    )


def fsdp_rows(
    workload: Workload, layout: Layout, units: Sequence[fsdp.FsdpUnit]
) -> tuple[MemoryRow, ...]:
    """Return the memory rows of what fully_shard shards: a rank's part is the fp32 master.

    Gradients are added in fp32. Under zero=2 whole weights stay beside it, in the compute dtype.
    Padding is booked to OTHER. What is offloaded of the optimizer is in host memory by whole units,
    gradients too, but for whole weights.
    """
    sums: dict[tuple[Component, Module], int] = {}
    offloaded = fsdp.offloaded_names(layout, units)
    if layout.zero == 2:
        for unit in units:
            for shard in unit.shards:
                whole = {
                    shard.module: shard.whole_numel,
                    Module.OTHER: unit.ranks * shard.padded_numel - shard.whole_numel,
                }
                for module, numel in whole.items():
                    key = Component.WEIGHTS, module
                    sums[key] = sums.get(key, 0) + numel * activation_nbytes(workload)
    for shard in (shard for unit in units for shard in unit.shards):
        is_offloaded = shard.param.name in offloaded
        moment_bytes = moment_nbytes(workload.optimizer)
        scale_bytes = scale_nbytes(workload.optimizer, shard.own_numel)
        if is_updated_by_muon(workload, shard.param):
            moment_bytes, scale_bytes = MOMENTUM_BYTES, 0
        # component, bytes of an element, and whether the padding is allocated too
        sizes = (
            (Component.MASTER, MASTER_BYTES, True),
            (Component.GRADIENTS, MASTER_BYTES, True),
            (Component.MOMENTS, moment_bytes, False),
        )
        padding = shard.padded_numel - shard.own_numel
        for component, nbytes, is_padded in sizes:
            booked_to = Component.HOST if is_offloaded else component
            for module, numel in (
                (shard.module, shard.own_numel),
                (Module.OTHER, padding if is_padded else 0),
            ):
                key = booked_to, module
                sums[key] = sums.get(key, 0) + numel * nbytes
        key = (Component.HOST if is_offloaded else Component.MOMENTS), Module.OTHER
        sums[key] = sums.get(key, 0) + scale_bytes
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )
