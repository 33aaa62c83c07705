"""Bytes of weights, gradients, master weights and moments, exactly as flat buffers hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from moewright.cost.stage_parts import Array
from moewright.rules import grid
from moewright.rules.adapters import adapter_parameters, is_frozen, is_trained, trains_all
from moewright.rules.job import Job
from moewright.rules.optimizers import (
    is_muon_matrix,
    moment_nbytes,
    scale_nbytes,
    shard_multiple,
    stored_nbytes,
)
from moewright.rules.packed_base import (
    holds_packed,
    is_packed,
    packed_bytes_per_element,
    packed_nbytes,
)
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import buckets, fsdp, shards
from moewright.rules.shapes.param import Param
from moewright.rules.shapes.parameters import parameters
from moewright.spec.layout import Layout, Offload
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import ModelSpec
from moewright.spec.units import FP32_BYTES
from moewright.spec.workload import Dtype, MatrixUpdate, SaveMode, Workload

MASTER_BYTES = FP32_BYTES
MOMENTUM_BYTES = 4  # Muon's, in fp32
# Modules whose weights are operands of 8-bit linears; router, embedding, norms and head stay in 16
# bits.
LINEAR_MODULES = frozenset(
    {Module.ATTENTION, Module.DENSE_MLP, Module.EXPERTS, Module.SHARED_EXPERTS}
)
_OFFLOADED = (Component.MASTER, Component.MOMENTS)  # by offload=optimizer
_UNIT_OFFLOADED = (*_OFFLOADED, Component.GRADIENTS)  # where units of fully_shard are moved whole


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSet:
    """The buckets of parameters that one group reduces, and the slice that a rank owns.

    `group_size` is the number of ranks that share their states: the whole group, unless sharding is
    hybrid. `holders` are the pipeline ranks that hold the same parameters and sum their slices
    after that; () where one rank alone holds them. This rank owns slice `index` of `shards`.
    """

    group: str
    holders: tuple[int, ...]
    group_size: int
    shards: int
    index: int
    buckets: tuple[buckets.Bucket, ...]
    modules: tuple[tuple[str, Module], ...]
    matrices: frozenset[str]  # parameters that Muon updates

    @property
    def numel(self) -> int:
        """The elements of all buckets, padding included."""
        return sum(bucket.numel for bucket in self.buckets)


def bucket_sets(
    job: Job, rank: int, groups: Sequence[str] = shards.GRADIENT_GROUPS
) -> tuple[BucketSet, ...]:
    """Return the bucket sets of a rank by that of `groups` which reduces them, in their order.

    Parameters that several pipeline ranks hold have sets of their own. Beside frozen weights they
    are those of adapters.
    """
    if not groups:
        return ()
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    if is_frozen(job.workload):
        params: Sequence[Param] = [
            param
            for param in adapter_parameters(job.model, job.workload.fine_tuning)
            if shards.holds_parameter(param, job.layout, job.model, pp_rank)
        ]
    else:
        params = _trained(shards.stage_parameters(job.model, job.layout, pp_rank), job)
    return _sets(params, job, rank, groups)


def _trained(params: Sequence[Param], job: Job) -> list[Param]:
    return [param for param in params if is_trained(job.workload.fine_tuning, param.name)]


def frozen_rows(job: Job, rank: int) -> tuple[MemoryRow, ...]:
    """Return the memory rows of frozen weights, of which every rank holds its whole shard."""
    fine_tuning = job.workload.fine_tuning
    if trains_all(fine_tuning):
        return ()
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    return tuple(
        MemoryRow(
            component=Component.WEIGHTS,
            module=param.module,
            bytes=frozen_nbytes(param, job),
        )
        for param in shards.stage_parameters(job.model, job.layout, pp_rank)
        if not is_trained(fine_tuning, param.name)
    )


def frozen_nbytes(param: Param, job: Job) -> int:
    """Return the bytes of a rank's part of a frozen weight."""
    local_shape = shards.local_shape(param, job.layout)
    if is_packed(param.name, param.module, param.shape, job.workload.fine_tuning):
        return packed_nbytes(param.shape, local_shape, job.workload.fine_tuning.quantize_base)
    return activation_nbytes(job.workload) * prod(local_shape)


def stage_bucket_sets(job: Job) -> tuple[tuple[BucketSet, ...], ...]:
    """Return the bucket sets of the first rank of every pipeline stage, without frozen parts.

    Where adapters train, they are those of the weights beside them.
    """
    params = shards.parameters_by_stage(job.model, job.layout)
    if job.workload.fine_tuning.freeze:
        params = tuple(tuple(_trained(stage_params, job)) for stage_params in params)
    return tuple(
        _sets(stage_params, job, grid.stage_rank(job.layout, pp_rank))
        for pp_rank, stage_params in enumerate(params)
    )


def _sets(
    params: Sequence[Param],
    job: Job,
    rank: int,
    groups: Sequence[str] = shards.GRADIENT_GROUPS,
) -> tuple[BucketSet, ...]:
    sets = []
    for group in groups:
        by_holders: dict[tuple[int, ...], list[Param]] = {}
        # About the order in which backward finishes them (docs/formulas.md 2).
        for param in reversed(params):
            if shards.gradient_group(param.sharded_dims, job.layout) == group:
                holders = shards.holding_pp_ranks(param.name, job.model, job.layout)
                by_holders.setdefault(holders, []).append(param)
        for holders in sorted(by_holders):
            members = by_holders[holders]
            sets.append(
                _bucket_set(members, job.workload, job.layout, rank, group, holders=holders)
            )
    return tuple(sets)


def _bucket_set(
    params: Sequence[Param],
    workload: Workload,
    layout: Layout,
    rank: int,
    group: str,
    *,
    holders: tuple[int, ...],
) -> BucketSet:
    state_group = fsdp.state_group(layout, group)
    size = grid.group_size(layout, state_group)
    count = size if layout.zero else 1
    return BucketSet(
        group=group,
        holders=holders,
        group_size=size,
        shards=count,
        index=grid.group_ranks(layout, state_group, rank).index(rank) if layout.zero else 0,
        buckets=buckets.plan_buckets(
            [(param.name, prod(shards.local_shape(param, layout))) for param in params],
            shards=count,
            bucket_elements=workload.optimizer.bucket_elements,
            shard_multiple=shard_multiple(workload.optimizer),
        ),
        modules=tuple((param.name, param.module) for param in params),
        matrices=frozenset(param.name for param in params if is_updated_by_muon(workload, param)),
    )


def is_updated_by_muon(workload: Workload, param: Param) -> bool:
    """Return whether Muon updates a parameter in this workload."""
    is_asked_for = workload.optimizer.matrix_update is MatrixUpdate.MUON
    return is_asked_for and is_muon_matrix(param.name, len(param.shape), param.module)


def state_bytes_per_parameter(workload: Workload) -> dict[Component, int]:
    """Return the bytes that one parameter takes in each state."""
    return {
        Component.WEIGHTS: activation_nbytes(workload),
        Component.GRADIENTS: workload.grad_dtype.nbytes,
        Component.MASTER: MASTER_BYTES,
        Component.MOMENTS: moment_nbytes(workload.optimizer),
    }


def moves_units(layout: Layout, *, trained: float) -> bool:
    """Return whether the optimizer's states are offloaded by whole units of fully_shard.

    Their shards are the fp32 weights, and gradients go with them. Adapters, the `trained` share of
    a model, are in no unit.
    """
    return trained == 1 and layout.zero >= 2 and Offload.OPTIMIZER in layout.offload


def _unit_bytes_per_parameter(workload: Workload, zero: int) -> dict[Component, int]:
    """Return the bytes that one parameter takes in each state under fully_shard."""
    return {
        **state_bytes_per_parameter(workload),
        Component.WEIGHTS: activation_nbytes(workload) if zero == 2 else 0,
        Component.GRADIENTS: MASTER_BYTES,
    }


def least_state_bytes(model: ModelSpec, workload: Workload) -> int:
    """Return a lower bound of the bytes of all states of a model, wherever and however they lie.

    Every layout holds each parameter in each state at least once. It is 0 beside frozen weights.
    """
    if not trains_all(workload.fine_tuning):
        return 0
    least = min(
        sum(per_parameter.values())
        for per_parameter in (
            state_bytes_per_parameter(workload),
            _unit_bytes_per_parameter(workload, zero=3),
        )
    )
    if workload.optimizer.matrix_update is MatrixUpdate.MUON:
        # A lower bound: as if Muon updated every parameter.
        least -= max(0, moment_nbytes(workload.optimizer) - MOMENTUM_BYTES)
    return least * sum(param.numel for param in parameters(model))


def sharded_states(zero: int) -> frozenset[Component]:
    """Return the states that a level of ZeRO shards.

    zero=1 shards master weights and moments, zero=2 gradients as well, zero=3 weights too; zero=0
    nothing.
    """
    if zero == 0:
        return frozenset()
    owned = frozenset({Component.MASTER, Component.MOMENTS})
    if zero == 1:
        return owned
    return owned | (
        {Component.GRADIENTS} if zero == 2 else {Component.WEIGHTS, Component.GRADIENTS}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateElements:
    """The elements of ranks' model states, in arrays of one shape [ranks, columns].

    `whole` are those of its parameters before ZeRO shards them, `own` those of its shards, and
    `matrices` those of the shards that Muon updates. Of the last two `hosted` and `hosted_matrices`
    lie in host memory.
    """

    whole: Array
    own: Array
    matrices: Array
    hosted: Array
    hosted_matrices: Array

    def total(self) -> StateElements:
        """Return the sums of each rank [ranks]."""
        return StateElements(
            whole=self.whole.sum(axis=1),
            own=self.own.sum(axis=1),
            matrices=self.matrices.sum(axis=1),
            hosted=self.hosted.sum(axis=1),
            hosted_matrices=self.hosted_matrices.sum(axis=1),
        )


def scale_bytes(
    workload: Workload, elements: StateElements, *, trained: float = 1.0
) -> dict[Component, Any]:
    """Return the bytes of the scales of 8-bit moments, on the device and in host memory.

    `elements` are those of whole ranks.
    """
    hosted = elements.hosted - elements.hosted_matrices
    on_device = elements.own - elements.matrices - hosted
    return {
        component: trained * scale_nbytes(workload.optimizer, numel)
        for component, numel in ((Component.MOMENTS, on_device), (Component.HOST, hosted))
    }


def state_bytes(
    workload: Workload,
    layout: Layout,
    elements: StateElements,
    *,
    trained: float = 1.0,
    frozen_nbytes: float = 0.0,
    packed: Array | float = 0.0,
) -> dict[Component, Array]:
    """Return the bytes of all states; those of an offloaded optimizer are in host memory.

    Where whole units of fully_shard are, gradients are there too (`moves_units`).
    Where adapters train, `trained` is their share, frozen weights of `frozen_nbytes` an element (at
    least an activation's) have no other state, and every rank holds them whole but under ZeRO-3.
    Of them `packed` elements are held in fewer bits.
    """
    sharded = sharded_states(layout.zero)
    per_parameter = state_bytes_per_parameter(workload)
    offloaded: tuple[Component, ...] = _OFFLOADED
    if moves_units(layout, trained=trained):
        per_parameter = _unit_bytes_per_parameter(workload, layout.zero)
        offloaded = _UNIT_OFFLOADED
    sizes = {
        component: nbytes * (elements.own if component in sharded else elements.whole)
        for component, nbytes in per_parameter.items()
    }
    if trained != 1:
        adapters = {component: trained * nbytes for component, nbytes in sizes.items()}
        widened = max(1.0, frozen_nbytes / activation_nbytes(workload))
        weights = widened * sizes[Component.WEIGHTS] + adapters[Component.WEIGHTS]
        saving = widened * activation_nbytes(workload) - packed_bytes_per_element(workload)
        weights = weights - saving * packed
        sizes = {**adapters, Component.WEIGHTS: weights}
    saved_bytes = per_parameter[Component.MOMENTS] - MOMENTUM_BYTES  # by Muon's one momentum
    if workload.optimizer.matrix_update is MatrixUpdate.MUON:
        sizes[Component.MOMENTS] = sizes[Component.MOMENTS] - elements.matrices * saved_bytes
    if Offload.OPTIMIZER not in layout.offload:
        return sizes
    on_host = {
        component: trained * elements.hosted * per_parameter[component] for component in offloaded
    }
    if workload.optimizer.matrix_update is MatrixUpdate.MUON:
        on_host[Component.MOMENTS] -= elements.hosted_matrices * saved_bytes
    for component, nbytes in on_host.items():
        sizes[component] = sizes[component] - nbytes
    return {**sizes, Component.HOST: sum(on_host.values(), start=np.zeros_like(elements.own))}


def makes_step_gradients(workload: Workload, layout: Layout) -> bool:
    """Return whether the optimizer makes fp32 gradients of narrower ones at a step."""
    return workload.grad_dtype is not Dtype.FP32 and layout.zero < 2


def step_gradient_bytes(workload: Workload, layout: Layout, own: Any) -> Any:
    """Return the bytes of the fp32 gradients that the optimizer makes of narrower ones at a step.

    They are of the rank's shards, `own` elements (a number or an array), whole before the first is
    used, and free before the next forward; those of an optimizer on the host lie there. Peaks of
    Moonlight that no recompute lowers are these (docs/log/planner_accuracy.md).
    """
    if not makes_step_gradients(workload, layout):
        return 0 * own
    return MASTER_BYTES * (own - hosted_elements(layout, own))


def hosted_elements(layout: Layout, own: Any) -> Any:
    """Return how many elements of a rank's shards are updated in host memory."""
    if Offload.OPTIMIZER not in layout.offload:
        return 0 * own
    return buckets.offloaded_numel(own, layout.offload_fraction)


def state_rows(
    workload: Workload,
    layout: Layout,
    sets: Sequence[BucketSet],
    *,
    trained: float = 1.0,
    frozen_nbytes: float = 0.0,
) -> tuple[MemoryRow, ...]:
    """Return the memory rows of all states, booked to modules; padding is booked to OTHER."""
    modules = tuple(Module)
    states = book_states(
        workload,
        layout,
        count_state_elements(sets, layout),
        is_linear=np.array([module in LINEAR_MODULES for module in modules]),
        padding=modules.index(Module.OTHER),
        trained=trained,
        frozen_nbytes=frozen_nbytes,
    )
    return tuple(
        MemoryRow(component=component, module=module, bytes=int(nbytes))
        for component, sizes in sorted(states.items())
        for module, nbytes in sorted(zip(modules, sizes[0].tolist(), strict=True))
        if nbytes
    )


def book_states(
    workload: Workload,
    layout: Layout,
    elements: StateElements,
    *,
    is_linear: Array,
    padding: int,
    trained: float = 1.0,
    frozen_nbytes: float = 0.0,
) -> dict[Component, Array]:
    """Return the bytes of all states of ranks [ranks, columns], as `elements` are counted.

    `is_linear` [columns] is the mask of linear weights, and `padding` the column of what belongs to
    no module.
    """
    packed: Array | float = 0.0
    if holds_packed(workload):
        is_sharded = Component.WEIGHTS in sharded_states(layout.zero)
        packed = is_linear * (elements.own if is_sharded else elements.whole)
    states = state_bytes(
        workload,
        layout,
        elements,
        trained=trained,
        frozen_nbytes=frozen_nbytes,
        packed=packed,
    )
    for component, nbytes in scale_bytes(workload, elements.total(), trained=trained).items():
        booked = np.array(states.get(component, np.zeros_like(elements.own)))
        booked[:, padding] += nbytes
        states[component] = booked
    return states


def count_state_elements(sets: Sequence[BucketSet], layout: Layout) -> StateElements:
    """Count the elements of a rank by module [1, modules].

    The first of the rank's shards are those that are offloaded.
    """
    modules = tuple(Module)
    hosted = int(
        hosted_elements(layout, sum(bucket_set.numel // bucket_set.shards for bucket_set in sets))
    )
    counts = {name: np.zeros((1, len(modules))) for name in StateElements.__slots__}
    for bucket_set in sets:
        wholes = [(0, bucket.numel) for bucket in bucket_set.buckets]
        slices = _own_slices(bucket_set)
        hosted_slices = []
        for start, stop in slices:
            # The host has the first of all owned elements, in the order of the rank's buckets.
            count = min(hosted, stop - start)
            hosted_slices.append((start, start + count))
            hosted -= count
        for prefix, spans in (("whole", wholes), ("own", slices), ("hosted", hosted_slices)):
            for module, numel, is_matrix in _overlaps(bucket_set, spans):
                counts[prefix][0, modules.index(module)] += numel
                if is_matrix and prefix != "whole":
                    name = "matrices" if prefix == "own" else "hosted_matrices"
                    counts[name][0, modules.index(module)] += numel
    return StateElements(**counts)


def _own_slices(bucket_set: BucketSet) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of each bucket that the rank owns."""
    return [
        buckets.shard_range(bucket, bucket_set.shards, bucket_set.index)
        for bucket in bucket_set.buckets
    ]


def own_elements(bucket_set: BucketSet) -> Iterator[tuple[str, int]]:
    """Yield the elements of the rank's slices by parameter."""
    yield from _elements_in(bucket_set, _own_slices(bucket_set))


def _elements_in(
    bucket_set: BucketSet, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int]]:
    """Yield by parameter how many elements lie in a span of each bucket."""
    for bucket, (start, stop) in zip(bucket_set.buckets, spans, strict=True):
        for entry in bucket.entries:
            inside = min(stop, entry.start + entry.numel) - max(start, entry.start)
            if inside > 0:
                yield entry.name, inside


def count_copied(layout: Layout, sets: Sequence[BucketSet]) -> int:
    """Count the elements that a rank copies to host memory for asynchronous checkpoints.

    It keeps the copy from the first save on: its part of master weights and moments, which ranks
    that hold the same elements share among them.
    """
    return sum(
        int(copied_elements(layout, bucket_set.group, bucket_set.numel, len(bucket_set.holders)))
        for bucket_set in sets
    )


def copied_elements(layout: Layout, group: str, numel: Any, holders: Any) -> Any:
    """Return a rank's part of the elements that `group` reduces on `holders` pipeline ranks."""
    # Ranks that hold the same elements write a part each.
    return numel // (grid.group_size(layout, group) * np.maximum(1, holders))


def checkpoint_bytes(workload: Workload, elements: Any) -> Any:
    """Return the bytes of the host copy of so many elements; 0 for synchronous checkpoints."""
    if workload.checkpoint.mode is SaveMode.SYNC:
        return 0 * elements
    return elements * (MASTER_BYTES + stored_nbytes(workload.optimizer))


def _overlaps(
    bucket_set: BucketSet, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[Module, int, bool]]:
    """Yield the elements in a span of each bucket by module, and whether Muon updates them.

    Padding is OTHER.
    """
    modules = dict(bucket_set.modules)
    padding = sum(stop - start for start, stop in spans)
    for name, numel in _elements_in(bucket_set, spans):
        padding -= numel
        yield modules[name], numel, name in bucket_set.matrices
    yield Module.OTHER, padding, False
