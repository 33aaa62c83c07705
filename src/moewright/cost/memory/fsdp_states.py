"""Bytes of the model states that torch's fully_shard shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moewright.cost.memory.model_states import (
    MASTER_BYTES,
    MOMENTUM_BYTES,
    BucketSet,
    bucket_sets,
    is_updated_by_muon,
    state_rows,
)
from moewright.rules import grid
from moewright.rules.job import Job
from moewright.rules.optimizers import moment_nbytes, scale_nbytes
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import fsdp, shards
from moewright.rules.shapes.param import Param
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


def flat_state_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory rows of what fully_shard leaves in a rank's flat buffers."""
    flat_sets = flat_bucket_sets(job, rank)
    if not flat_sets:
        return ()
    return state_rows(job.workload, fsdp.flat_buffer_layout(job.layout), flat_sets)


def unit_state_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory rows of a rank's states in flat buffers and in fully_shard's units."""
    return (
        *flat_state_rows(job, rank),
        *fsdp_rows(job.workload, job.layout, fsdp.fsdp_units(job.model, job.layout, rank)),
    )


def unit_gradient_bytes(layout: Layout, units: Sequence[fsdp.FsdpUnit], *, with_host: bool) -> int:
    """Return the bytes of the gradients that fully_shard makes as backwards end.

    `with_host`: those that are in host memory too.
    """
    offloaded = fsdp.offloaded_names(layout, units)
    return sum(
        MASTER_BYTES * shard.elements.padded
        for unit in units
        for shard in unit.shards
        if with_host or shard.param.name not in offloaded
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShardForm:
    """What the bytes of a rank's part of a parameter depend on; layers are alike, so most are."""

    module: Module
    elements: fsdp.ShardElements
    is_offloaded: bool
    is_matrix: bool


def fsdp_rows(
    workload: Workload, layout: Layout, units: Sequence[fsdp.FsdpUnit]
) -> tuple[MemoryRow, ...]:
    """Return the memory rows of what fully_shard shards: a rank's part is the fp32 master.

    Gradients are added in fp32. Under zero=2 whole weights stay beside it, in the compute dtype.
    Padding is booked to OTHER. What is offloaded of the optimizer is in host memory by whole units,
    gradients too, but for whole weights.
    """
    offloaded = fsdp.offloaded_names(layout, units)
    forms = Counter(
        _ShardForm(
            module=shard.module,
            elements=shard.elements,
            is_offloaded=shard.param.name in offloaded,
            is_matrix=is_updated_by_muon(workload, shard.param),
        )
        for unit in units
        for shard in unit.shards
    )
    return _form_rows(workload, layout, forms)


def offloaded_rows(job: Job, params: Sequence[Param]) -> tuple[MemoryRow, ...]:
    """Return the memory rows of parameters on the first rank of a stage, all of them offloaded.

    Those are `fsdp_rows` of the units that the parameters are in: where every unit is moved, what
    a parameter takes does not depend on the others. What lies in flat buffers is left out.
    """
    layout = job.layout
    forms: Counter[_ShardForm] = Counter()
    for param in params:
        group = shards.gradient_group(param.sharded_dims, layout)
        if not fsdp.is_fsdp_sharded(layout, group):
            continue
        ranks = grid.group_size(layout, fsdp.fsdp_groups(layout, group).shard_group)
        form = _ShardForm(
            module=param.module,
            elements=fsdp.count_elements(param, layout, ranks=ranks, place=0),
            is_offloaded=True,
            is_matrix=is_updated_by_muon(job.workload, param),
        )
        forms[form] += 1
    return _form_rows(job.workload, layout, forms)


def _form_rows(
    workload: Workload, layout: Layout, forms: Counter[_ShardForm]
) -> tuple[MemoryRow, ...]:
    """Return the memory rows of so many parts of each form."""
    sums: dict[tuple[Component, Module], int] = {}
    for form, count in forms.items():
        elements = form.elements
        if layout.zero == 2:
            whole = {form.module: elements.whole, Module.OTHER: elements.padding}
            for module, numel in whole.items():
                key = Component.WEIGHTS, module
                sums[key] = sums.get(key, 0) + count * numel * activation_nbytes(workload)
        # Muon has one momentum, and no scales.
        moment_bytes = MOMENTUM_BYTES if form.is_matrix else moment_nbytes(workload.optimizer)
        scale_bytes = 0 if form.is_matrix else scale_nbytes(workload.optimizer, elements.own)
        # The padding of master weights and gradients is allocated too, that of moments is not.
        own_bytes = elements.own * MASTER_BYTES
        padding = (elements.padded - elements.own) * MASTER_BYTES
        for component, nbytes, other_bytes in (
            (Component.MASTER, own_bytes, padding),
            (Component.GRADIENTS, own_bytes, padding),
            (Component.MOMENTS, elements.own * moment_bytes, scale_bytes),
        ):
            booked_to = component.placed(on_host=form.is_offloaded)
            for booked_in, booked_bytes in ((form.module, nbytes), (Module.OTHER, other_bytes)):
                key = booked_to, booked_in
                sums[key] = sums.get(key, 0) + count * booked_bytes
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )
