"""Flat buffers: the weights, gradients and optimizer state of a bucket, each in one long tensor.

Weights live in a buffer of the compute dtype and the model's parameters are views into it;
gradients accumulate in grad_dtype; optimizer state covers only the shard that this rank owns
(docs/formulas.md 2). With offload=optimizer the first of it lives in host memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moewright.engine.comm.collectives import (
    AsyncCollective,
    Group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from moewright.engine.model.layers import NamedParameter
from moewright.engine.optim.optimizer_states import (
    SegmentBuilder,
    StateSegment,
    StoredStates,
    split_by_module,
    state_tensors,
    store_states,
)
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.rules.optimizers import shard_multiple
from moewright.rules.shapes.buckets import Bucket, offloaded_numel, plan_buckets, shard_range
from moewright.rules.shapes.fsdp import (
    flat_buffer_layout,
    fsdp_groups,
    is_fsdp_sharded,
    state_group,
)
from moewright.rules.shapes.shards import GRADIENT_GROUPS, gradient_group, holding_pp_ranks
from moewright.spec.layout import Offload
from moewright.spec.ledger import Component, MemoryRow

# The moment when the last gradient of a bucket is ready, so that it is reduced under backward.


class GradReadyTracker:
    """A tracker that calls `on_bucket_ready` with the number of each bucket, in the order given.

    It does so once every gradient of the bucket is ready. How often a gradient comes in a step
    depends on the timetable (micro-batches, chunks that share a table) and not on the data, so it
    is taken from the step before, as DDP does with a static graph; the first step therefore
    overlaps nothing. The order is the same on all ranks, because they have to meet in the
    collectives: a bucket that is ready waits for those before it.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[int, Sequence[str]]],
        on_bucket_ready: Callable[[int], None],
    ) -> None:
        self._buckets = tuple(buckets)
        self._on_bucket_ready = on_bucket_ready
        self._position = {
            name: position for position, (_, names) in enumerate(buckets) for name in names
        }
        self._micro_batches = 1
        self._ready_counts: Counter[str] = Counter()
        self._expected_counts: dict[str, int] = {}
        self._missing: list[int] = []  # gradients that each bucket still waits for
        self._next = 0

    def begin_step(self, micro_batches: int) -> None:
        """Start a step of so many micro-batches."""
        # The counts of the step before, scaled to so many micro-batches. A parameter whose count
        # cannot be scaled has no expected count, and its bucket waits for `flush`.
        self._expected_counts = {
            name: count * micro_batches // self._micro_batches
            for name, count in self._ready_counts.items()
            if count % self._micro_batches == 0
        }
        self._micro_batches = micro_batches
        self._ready_counts = Counter()
        self._missing = [len(names) for _, names in self._buckets]
        self._next = 0

    def mark_ready(self, name: str) -> None:
        """Note that one gradient of a parameter was added.

        Raises:
            RuntimeError: if its bucket is reduced already.
        """
        position = self._position[name]
        if position < self._next:
            raise RuntimeError(
                f"a gradient of {name} came after its bucket was reduced: run without overlap=grad"
            )
        self._ready_counts[name] += 1
        if self._ready_counts[name] == self._expected_counts.get(name):
            self._missing[position] -= 1
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._report_next()

    def flush(self) -> None:
        """Report the buckets that are left: all gradients are ready."""
        while self._next < len(self._buckets):
            self._report_next()

    def _report_next(self) -> None:
        number, _ = self._buckets[self._next]
        self._next += 1
        self._on_bucket_ready(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketGroups:
    """The groups of a bucket, as FlatBucket says."""

    group: Group
    replica_group: Group | None
    holder_group: Group | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatBucket:
    """One bucket's tensors on this rank.

    `group` shares the gradients, and the state too where `sharded` is set. `replica_group` are the
    ranks that hold the same shard of an optimizer of several instances. `holder_group` are the
    pipeline ranks that hold the bucket, where there are several (rules.shapes.shards). `segments`
    are the optimizer state of the shard, cut where part of it is offloaded.
    """

    group: Group
    replica_group: Group | None
    holder_group: Group | None
    sharded: bool
    weights: torch.Tensor
    grads: torch.Tensor
    grad_views: tuple[tuple[NamedParameter, torch.Tensor], ...]
    segments: tuple[StateSegment, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter, _ in self.grad_views)

    @property
    def shard_numel(self) -> int:
        return sum(segment.master.numel() for segment in self.segments)

    @property
    def replica_count(self) -> int:
        """How many ranks of the world hold this rank's shard of the gradients."""
        count = 1 if self.sharded else self.group.size
        for group in self.outer_groups:
            count *= group.size
        return count

    @property
    def outer_groups(self) -> tuple[Group, ...]:
        """The groups that sum this rank's shard of the gradients after `group` has."""
        return tuple(group for group in (self.replica_group, self.holder_group) if group)

    def start_reduce(self) -> AsyncCollective:
        """Start to sum the gradients over the group; the result is this rank's shard of them."""
        if not self.sharded or self.group.size == 1:
            # In place: every rank keeps the whole sum.
            return start_all_reduce(self.grads, self.group)
        shard = self.grads.new_empty(self.shard_numel)
        return start_reduce_scatter(shard, self.grads, self.group)

    def start_all_gather(self) -> AsyncCollective:
        """Round the master copy to the compute dtype, and start to give all of it to every rank."""
        if self.sharded and self.group.size > 1:
            # Without a second buffer, where no part of the state is elsewhere.
            if len(self.segments) == 1:
                shard = self.segments[0].master.to(self.weights)
            else:
                shard = self.weights.new_empty(self.shard_numel)
                self._round_master(shard)
            return start_all_gather(self.weights, shard, self.group)
        self._round_master(self.weights)
        return AsyncCollective(out=self.weights, tensor=self.weights, work=None)

    def _round_master(self, out: torch.Tensor) -> None:
        for segment in self.segments:
            out[segment.shard_slice].copy_(segment.master)

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of every buffer by module; what belongs to no parameter is OTHER."""
        all_spans = [(parameter.module, view.numel()) for parameter, view in self.grad_views]
        return [
            *split_by_module(Component.WEIGHTS, self.weights, all_spans),
            *split_by_module(Component.GRADIENTS, self.grads, all_spans),
            *(row for segment in self.segments for row in segment.memory_rows()),
        ]

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the buffers of which `memory_rows` has the bytes."""
        yield from (self.weights, self.grads)
        for segment in self.segments:
            yield from state_tensors(segment)

    def stored_states(self) -> list[StoredStates]:
        """Return the master copy and the moments as checkpoints hold them."""
        return [store_states(segment) for segment in self.segments]


def build_buckets(
    runtime: Runtime,
    parameters: Sequence[NamedParameter],
    initial_value: Callable[[NamedParameter], torch.Tensor],
) -> list[FlatBucket]:
    """Build the buckets of all parameters that fully_shard does not cut.

    A bucket's parameters are summed over the same group and held by the same pipeline ranks.
    """
    mesh = runtime.mesh
    layout = mesh.layout
    flat_layout = flat_buffer_layout(layout)
    members_by_name = {parameter.name: parameter for parameter in parameters}
    planned_buckets: list[tuple[BucketGroups, Bucket]] = []
    for group in GRADIENT_GROUPS:
        if is_fsdp_sharded(layout, group):
            continue
        replica_group = None
        if flat_layout.shard:
            replica_group = mesh.group(fsdp_groups(flat_layout, group).replica_group)
        by_holders: dict[tuple[int, ...], list[NamedParameter]] = defaultdict(list)
        for parameter in parameters:
            if gradient_group(parameter.placement.sharding, layout) == group:
                holders = holding_pp_ranks(parameter.name, runtime.model, layout)
                by_holders[holders].append(parameter)
        for holders, members in sorted(by_holders.items(), key=lambda item: item[0]):
            groups = BucketGroups(
                group=mesh.group(state_group(flat_layout, group)),
                replica_group=replica_group,
                holder_group=mesh.shared_table_groups.get(holders),
            )
            planned_buckets += [
                (groups, planned) for planned in _plan_buckets(runtime, members, groups.group)
            ]
    shards = [_own_slice(runtime, planned, groups.group) for groups, planned in planned_buckets]
    numels = [stop - start for start, stop in shards]
    hosted = 0
    if Offload.OPTIMIZER in layout.offload:
        hosted = int(offloaded_numel(sum(numels), layout.offload_fraction))
    buckets: list[FlatBucket] = []
    for (groups, planned), numel in zip(planned_buckets, numels, strict=True):
        hosted_here = min(hosted, numel)
        hosted -= hosted_here
        buckets.append(
            _build_bucket(runtime, planned, members_by_name, groups, initial_value, hosted_here)
        )
    return buckets


def _plan_buckets(
    runtime: Runtime, parameters: Sequence[NamedParameter], group: Group
) -> tuple[Bucket, ...]:
    """Lay parameters out in buckets, in reverse registration order.

    That is about the order in which backward finishes them.
    """
    return plan_buckets(
        [(parameter.name, parameter.parameter.numel()) for parameter in reversed(parameters)],
        shards=_shard_count(runtime, group),
        bucket_elements=runtime.workload.optimizer.bucket_elements,
        shard_multiple=shard_multiple(runtime.workload.optimizer),
    )


def _own_slice(runtime: Runtime, planned: Bucket, group: Group) -> tuple[int, int]:
    """Return the elements [start, stop) of a bucket whose state this rank owns."""
    is_sharded = runtime.mesh.layout.zero > 0
    return shard_range(planned, _shard_count(runtime, group), group.index if is_sharded else 0)


def _shard_count(runtime: Runtime, group: Group) -> int:
    return group.size if runtime.mesh.layout.zero > 0 else 1


def _build_bucket(
    runtime: Runtime,
    planned: Bucket,
    parameters: Mapping[str, NamedParameter],
    groups: BucketGroups,
    initial_value: Callable[[NamedParameter], torch.Tensor],
    hosted_numel: int,
) -> FlatBucket:
    """Lay parameters, by name, out in a bucket.

    The first `hosted_numel` elements of this rank's shard have their state in host memory.
    """
    device = runtime.device
    start, stop = _own_slice(runtime, planned, groups.group)
    weights = torch.zeros(planned.numel, dtype=runtime.dtype, device=device)
    grads = torch.zeros(
        planned.numel, dtype=torch_dtype(runtime.workload.grad_dtype), device=device
    )
    cut = start + hosted_numel
    builders = [
        SegmentBuilder(runtime, first, last, first=first - start, on_host=on_host)
        for first, last, on_host in ((start, cut, True), (cut, stop, False))
        if first < last
    ]
    grad_views = []
    for entry in planned.entries:
        parameter = parameters[entry.name]
        shape = parameter.parameter.shape
        value = initial_value(parameter).to(device)
        span = slice(entry.start, entry.start + entry.numel)
        parameter.owner.weight = nn.Parameter(weights[span].view(shape))
        # By `data`: autograd refuses to write in place into a leaf.
        parameter.owner.weight.data.copy_(value)
        grad_views.append((parameter, grads[span].view(shape)))
        for builder in builders:
            builder.add(entry, parameter, value)
    return FlatBucket(
        group=groups.group,
        replica_group=groups.replica_group,
        holder_group=groups.holder_group,
        sharded=runtime.mesh.layout.zero > 0,
        weights=weights,
        grads=grads,
        grad_views=tuple(grad_views),
        segments=tuple(builder.build() for builder in builders),
    )
