"""Bytes of weights, gradients, master weights and moments on one rank, exactly as flat buffers hold
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from moewright.rules import buckets, fsdp, grid, shards
from moewright.rules.parameters import Param
from moewright.rules.recompute import activation_nbytes
from moewright.spec.layout import Layout, Offload
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import SaveMode, Workload

MASTER_BYTES = 4
_OFFLOADED = (Component.MASTER, Component.MOMENTS)  # by offload=optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSet:
    """The buckets of a rank's parameters that one group reduces, and the slice of them that is the
    rank's.

    `group_size`: ranks that share their states, all of the group unless sharding is hybrid.
    `holders`: pipeline ranks that then sum their slices.
    """

    group: str
    holders: tuple[int, ...]
    group_size: int
    shards: int
    index: int
    buckets: tuple[buckets.Bucket, ...]
    modules: tuple[tuple[str, Module], ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return sum(bucket.numel for bucket in self.buckets)


def bucket_sets(
    model: ModelSpec, workload: Workload, layout: Layout, rank: int
) -> tuple[BucketSet, ...]:
    """By the group that reduces them (rules.shards), in that order, what several pipeline ranks
    hold apart."""
    held = shards.stage_parameters(model, layout, grid.coordinate(layout, rank, "pp"))
    return _sets(held, model, workload, layout, rank)


def stage_bucket_sets(
    model: ModelSpec, workload: Workload, layout: Layout
) -> tuple[tuple[BucketSet, ...], ...]:
    """`bucket_sets` of the first rank of every pipeline stage."""
    stage = layout.world_size // layout.pp
    held = shards.parameters_by_stage(model, layout)
    return tuple(
        _sets(mine, model, workload, layout, pp_rank * stage) for pp_rank, mine in enumerate(held)
    )


def _sets(
    held: Sequence[Param], model: ModelSpec, workload: Workload, layout: Layout, rank: int
) -> tuple[BucketSet, ...]:
    found = []
    for group in shards.GRADIENT_GROUPS:
        members = [
            param
            for param in reversed(held)
            if shards.gradient_group(param.sharded_dims, layout) == group
        ]
        by_holders = [
            (shards.holding_pp_ranks(param.name, model, layout), param) for param in members
        ]
        for key in sorted({key for key, _ in by_holders}):
            params = [param for own, param in by_holders if own == key]
            found.append(_bucket_set(params, workload, layout, rank, group, holders=key))
    return tuple(found)


def _bucket_set(
    params: Sequence[Param],
    workload: Workload,
    layout: Layout,
    rank: int,
    group: str,
    *,
    holders: tuple[int, ...],
) -> BucketSet:
    over = fsdp.state_group(layout, group)
    size = grid.group_size(layout, over)
    count = size if layout.zero else 1
    return BucketSet(
        group=group,
        holders=holders,
        group_size=size,
        shards=count,
        index=grid.group_ranks(layout, over, rank).index(rank) if layout.zero else 0,
        buckets=buckets.plan_buckets(
            [(param.name, prod(shards.local_shape(param, layout))) for param in params],
            shards=count,
            bucket_elements=workload.optimizer.bucket_elements,
        ),
        modules=tuple((param.name, param.module) for param in params),
    )


def state_bytes_per_parameter(workload: Workload) -> dict[Component, int]:
    """Bytes that one parameter takes in each state."""
    return {
        Component.WEIGHTS: activation_nbytes(workload),
        Component.GRADIENTS: workload.grad_dtype.nbytes,
        Component.MASTER: MASTER_BYTES,
        Component.MOMENTS: 2 * workload.optimizer.moment_dtype.nbytes,
    }


def sharded_states(zero: int) -> frozenset[Component]:
    """zero=1 shards master weights and moments; zero=3 weights and gradients as well; zero=0
    nothing."""
    if zero == 0:
        return frozenset()
    owned = frozenset({Component.MASTER, Component.MOMENTS})
    return owned if zero < 3 else owned | {Component.WEIGHTS, Component.GRADIENTS}


def fsdp_rows(
    workload: Workload, layout: Layout, units: Sequence[fsdp.FsdpUnit]
) -> tuple[MemoryRow, ...]:
    """Memory rows of what fully_shard cuts: the part of a rank is the fp32 master; room without
    rows is OTHER's. With an offloaded optimizer all of it is in host memory, gradients too.
    """
    sums: dict[tuple[Component, Module], int] = {}
    away = Offload.OPTIMIZER in layout.offload
    sizes = (
        (Component.MASTER, MASTER_BYTES, True),
        (Component.GRADIENTS, workload.grad_dtype.nbytes, True),
        (Component.MOMENTS, 2 * workload.optimizer.moment_dtype.nbytes, False),
    )
    for cut in (cut for unit in units for cut in unit.shards):
        for component, nbytes, padded in sizes:
            for module, numel in (
                (cut.module, cut.own_numel),
                (Module.OTHER, (cut.padded_numel - cut.own_numel) * padded),
            ):
                key = Component.HOST if away else component, module
                sums[key] = sums.get(key, 0) + numel * nbytes
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )


def state_rows(
    workload: Workload, layout: Layout, sets: Sequence[BucketSet]
) -> tuple[MemoryRow, ...]:
    """Memory rows of all states. A slice of a bucket is booked to the modules it overlaps, padding
    to OTHER."""
    element, sharded = state_bytes_per_parameter(workload), sharded_states(layout.zero)
    sums: dict[tuple[Component, Module], int] = {}
    for bucket_set in sets:
        whole = dict(_overlaps(bucket_set, whole=True))
        own = dict(_overlaps(bucket_set, whole=False))
        for component, nbytes in element.items():
            for module, numel in (own if component in sharded else whole).items():
                key = component, module
                sums[key] = sums.get(key, 0) + numel * nbytes
    if Offload.OPTIMIZER in layout.offload:
        for component, module in [key for key in sums if key[0] in _OFFLOADED]:
            here = round((1 - layout.offload_fraction) * sums[component, module])
            key = Component.HOST, module
            sums[key] = sums.get(key, 0) + sums[component, module] - here
            sums[component, module] = here
    return tuple(
        MemoryRow(component=component, module=module, bytes=nbytes)
        for (component, module), nbytes in sorted(sums.items())
        if nbytes
    )


def checkpoint_copy_bytes(workload: Workload, layout: Layout, sets: Sequence[BucketSet]) -> int:
    """What a rank keeps in host memory, from the first save on, for checkpoints that are written
    beside training: a copy of its part of master weights and moments, of which those that hold the
    same share the work.
    """
    if workload.checkpoint.mode is SaveMode.SYNC:
        return 0
    elements = sum(
        one.numel // (grid.group_size(layout, one.group) * max(1, len(one.holders))) for one in sets
    )
    return elements * (MASTER_BYTES + 2 * workload.optimizer.moment_dtype.nbytes)


def _overlaps(bucket_set: BucketSet, *, whole: bool) -> Iterator[tuple[Module, int]]:
    """Elements by module: of all buckets, or of the rank's slices."""
    modules = dict(bucket_set.modules)
    sums: dict[Module, int] = {}
    total = 0
    for bucket in bucket_set.buckets:
        start, stop = (0, bucket.numel)
        if not whole:
            start, stop = buckets.shard_range(bucket, bucket_set.shards, bucket_set.index)
        total += stop - start
        for entry in bucket.entries:
            inside = min(stop, entry.start + entry.numel) - max(start, entry.start)
            if inside > 0:
                module = modules[entry.name]
                sums[module] = sums.get(module, 0) + inside
    yield from sums.items()
    yield Module.OTHER, total - sum(sums.values())
