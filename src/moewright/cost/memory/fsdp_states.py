"""Bytes of the model states that torch's fully_shard shards."""

from __future__ import annotations

from collections import Counter
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
from moewright.rules.shapes import fsdp, shards
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import Workload


def flat_bucket_sets(job: Job, rank: int) -> tuple[BucketSet, ...]:
    """Return the bucket sets of what fully_shard leaves in a rank's flat buffers."""
    flat_job = replace(job, layout=fsdp.flat_buffer_layout(job.layout))
    groups = [
        group for group in shards.GRADIENT_GROUPS if not fsdp.is_fsdp_sharded(job.layout, group)
    ]
    return bucket_sets(flat_job, rank, groups)


def unit_state_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory rows of a rank's states in flat buffers and in fully_shard's units."""
    flat_sets = flat_bucket_sets(job, rank)
    flat_rows: tuple[MemoryRow, ...] = ()
    if flat_sets:
        flat_rows = state_rows(job.workload, fsdp.flat_buffer_layout(job.layout), flat_sets)
    return (
        *flat_rows,
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
    # Layers are alike, and so are most of their shards.
    alike = Counter(
        (
            shard.module,
            shard.own_numel,
            shard.padded_numel,
            shard.param.name in offloaded,
            is_updated_by_muon(workload, shard.param),
        )
        for unit in units
        for shard in unit.shards
    )
    for (module, own_numel, padded_numel, is_offloaded, is_matrix), count in alike.items():
        moment_bytes = MOMENTUM_BYTES if is_matrix else moment_nbytes(workload.optimizer)
        scale_bytes = 0 if is_matrix else scale_nbytes(workload.optimizer, own_numel)
        # The padding of master weights and gradients is allocated too, that of moments is not.
        padding = (padded_numel - own_numel) * MASTER_BYTES
        for component, own_bytes, other_bytes in (
            (Component.MASTER, own_numel * MASTER_BYTES, padding),
            (Component.GRADIENTS, own_numel * MASTER_BYTES, padding),
            (Component.MOMENTS, own_numel * moment_bytes, scale_bytes),
        ):
            booked_to = Component.HOST if is_offloaded else component
            for booked_in, nbytes in ((module, own_bytes), (Module.OTHER, other_bytes)):
                key = booked_to, booked_in
                sums[key] = sums.get(key, 0) + count * nbytes
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )
