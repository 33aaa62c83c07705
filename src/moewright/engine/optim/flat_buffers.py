"""Flat buffers: the weights, gradients and optimizer state of a bucket, each in one long tensor.

Weights live in a buffer of the compute dtype and the model's parameters are views into it;
gradients accumulate in grad_dtype; the fp32 master copy and the two moments (fp32 or bf16) cover
only the shard that this rank owns (docs/formulas.md 2), and live in host memory with
offload=optimizer. Matrices that Muon updates have one fp32 momentum in place of the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch
from torch import nn

from moewright.engine.checkpoint import LocalShard, flat_range_shards
from moewright.engine.comm.collectives import (
    AsyncCollective,
    Group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from moewright.engine.model.layers import NamedParameter
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.rules.buckets import plan_buckets, shard_range
from moewright.rules.muon import is_muon_matrix
from moewright.spec.layout import Offload
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import MatrixUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRange:
    """The elements [first, last) of a parameter that a rank owns, from `start` on in its shard.

    Their moments, or their momentum where `has_momentum`, are from `moment_start` on in theirs.
    """

    parameter: NamedParameter
    first: int
    last: int
    start: int
    moment_start: int
    has_momentum: bool

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def shard_slice(self) -> slice:
        return slice(self.start, self.start + self.numel)

    @property
    def moment_slice(self) -> slice:
        return slice(self.moment_start, self.moment_start + self.numel)


class OptimizerStates(Protocol):
    """Flat tensors of master weights and moments of a shard, and what lies in them."""

    @property
    def owned(self) -> Sequence[OwnedRange]: ...
    @property
    def master(self) -> torch.Tensor: ...
    @property
    def exp_avg(self) -> torch.Tensor: ...
    @property
    def exp_avg_sq(self) -> torch.Tensor: ...
    @property
    def momentum(self) -> torch.Tensor: ...


def uses_muon(runtime: Runtime, parameter: NamedParameter) -> bool:
    """Tell whether Muon updates a parameter."""
    dims = len(parameter.placement.local_shape)
    return runtime.workload.optimizer.matrix_update is MatrixUpdate.MUON and is_muon_matrix(
        parameter.name, dims, parameter.module
    )


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
    pipeline ranks that hold the bucket, where there are several (rules.shards).
    """

    group: Group
    replica_group: Group | None
    holder_group: Group | None
    sharded: bool
    on_host: bool  # master and moments live in host memory, and are updated there
    weights: torch.Tensor
    grads: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    momentum: torch.Tensor
    grad_views: tuple[tuple[NamedParameter, torch.Tensor], ...]
    owned: tuple[OwnedRange, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter, _ in self.grad_views)

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
            return start_all_reduce(self.grads, self.group)
        shard = self.grads.new_empty(len(self.master))
        return start_reduce_scatter(shard, self.grads, self.group)

    def start_all_gather(self) -> AsyncCollective:
        """Round the master copy to the compute dtype, and start to give all of it to every rank."""
        if self.sharded and self.group.size > 1:
            return start_all_gather(self.weights, self.master.to(self.weights), self.group)
        self.weights.copy_(self.master)
        return AsyncCollective(out=self.weights, tensor=self.master, work=None)

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of every buffer by module; what belongs to no parameter is OTHER."""
        all_spans = [(parameter.module, view.numel()) for parameter, view in self.grad_views]
        owned_spans = [(owned.parameter.module, owned.numel) for owned in self.owned]
        moment_spans, momentum_spans = (
            [
                (owned.parameter.module, owned.numel)
                for owned in self.owned
                if owned.has_momentum == has_momentum
            ]
            for has_momentum in (False, True)
        )
        master = Component.HOST if self.on_host else Component.MASTER
        moments = Component.HOST if self.on_host else Component.MOMENTS
        return [
            *split_by_module(Component.WEIGHTS, self.weights, all_spans),
            *split_by_module(Component.GRADIENTS, self.grads, all_spans),
            *split_by_module(master, self.master, owned_spans),
            *split_by_module(moments, self.exp_avg, moment_spans),
            *split_by_module(moments, self.exp_avg_sq, moment_spans),
            *split_by_module(moments, self.momentum, momentum_spans),
        ]

    def local_shards(self) -> list[LocalShard]:
        """Return the master copy and the moments as boxes of the global tensors."""
        return build_state_shards(self)


def build_state_shards(states: OptimizerStates) -> list[LocalShard]:
    """Return the optimizer state of the owned ranges as boxes of the global tensors."""
    moved = [replace(owned, start=owned.moment_start) for owned in states.owned]
    adamw = [owned for owned in moved if not owned.has_momentum]
    muon = [owned for owned in moved if owned.has_momentum]
    return [
        *build_local_shards(states.owned, "", states.master),
        *build_local_shards(adamw, "optim/exp_avg/", states.exp_avg),
        *build_local_shards(adamw, "optim/exp_avg_sq/", states.exp_avg_sq),
        *build_local_shards(muon, "optim/momentum/", states.momentum),
    ]


def build_local_shards(
    ranges: Sequence[OwnedRange], prefix: str, flat: torch.Tensor
) -> list[LocalShard]:
    """Return a flat tensor of owned ranges as boxes of the global tensors `prefix` + name.

    Padding is in none of them.
    """
    shards: list[LocalShard] = []
    for owned in ranges:
        placement = owned.parameter.placement
        passed = 0  # elements of the parameter that lie before `part`
        for part in placement.split_rows() or (placement,):
            # Only the first dim is ever padded, so the unpadded elements come first.
            first = max(owned.first - passed, 0)
            last = min(owned.last - passed, prod(part.unpadded_shape))
            if first < last:
                start = owned.start + passed + first - owned.first
                shards += flat_range_shards(
                    prefix + owned.parameter.name,
                    global_shape=part.global_shape,
                    offsets=part.offsets,
                    local_shape=part.unpadded_shape,
                    start=first,
                    flat=flat[start : start + last - first],
                )
            passed += prod(part.local_shape)
    return shards


def build_buckets(
    runtime: Runtime,
    parameters: Sequence[NamedParameter],
    groups: BucketGroups,
    initial_value: Callable[[NamedParameter], torch.Tensor],
) -> list[FlatBucket]:
    """Lay parameters out in buckets, in reverse registration order.

    That is about the order in which backward finishes them.
    """
    layout = runtime.mesh.layout
    device = runtime.device
    on_host = Offload.OPTIMIZER in layout.offload
    state_device = torch.device("cpu") if on_host else device
    moment_dtype = torch_dtype(runtime.workload.optimizer.moment_dtype)
    grad_dtype = torch_dtype(runtime.workload.grad_dtype)
    group = groups.group
    sharded = layout.zero > 0
    shard_count = group.size if sharded else 1
    shard_index = group.index if sharded else 0
    parameters_by_name = {parameter.name: parameter for parameter in parameters}
    planned_buckets = plan_buckets(
        [(parameter.name, parameter.parameter.numel()) for parameter in reversed(parameters)],
        shards=shard_count,
        bucket_elements=runtime.workload.optimizer.bucket_elements,
    )
    buckets = []
    for planned in planned_buckets:
        start, stop = shard_range(planned, shard_count, shard_index)
        weights = torch.zeros(planned.numel, dtype=runtime.dtype, device=device)
        grads = torch.zeros(planned.numel, dtype=grad_dtype, device=device)
        master = new_state(stop - start, torch.float32, state_device, device)
        grad_views = []
        owned_ranges: list[OwnedRange] = []
        momentum_numel = 0
        for entry in planned.entries:
            parameter = parameters_by_name[entry.name]
            shape = parameter.parameter.shape
            value = initial_value(parameter).to(device)
            span = slice(entry.start, entry.start + entry.numel)
            parameter.owner.weight = nn.Parameter(weights[span].view(shape))
            parameter.owner.weight.data.copy_(value)
            grad_views.append((parameter, grads[span].view(shape)))
            first, last = max(entry.start, start), min(entry.start + entry.numel, stop)
            if first >= last:
                continue
            has_momentum = uses_muon(runtime, parameter)
            owned = OwnedRange(
                parameter=parameter,
                first=first - entry.start,
                last=last - entry.start,
                start=first - start,
                moment_start=momentum_numel if has_momentum else first - start - momentum_numel,
                has_momentum=has_momentum,
            )
            momentum_numel += owned.numel * has_momentum
            master[owned.shard_slice] = value.flatten()[owned.first : owned.last]
            owned_ranges.append(owned)
        moments_numel = stop - start - momentum_numel
        buckets.append(
            FlatBucket(
                group=group,
                replica_group=groups.replica_group,
                holder_group=groups.holder_group,
                sharded=sharded,
                on_host=on_host,
                weights=weights,
                grads=grads,
                master=master,
                exp_avg=new_state(moments_numel, moment_dtype, state_device, device),
                exp_avg_sq=new_state(moments_numel, moment_dtype, state_device, device),
                momentum=new_state(momentum_numel, torch.float32, state_device, device),
                grad_views=tuple(grad_views),
                owned=tuple(owned_ranges),
            )
        )
    return buckets


def new_state(
    numel: int, dtype: torch.dtype, state_device: torch.device, device: torch.device
) -> torch.Tensor:
    """Return zeros for optimizer state; what a GPU offloads lies in page-locked host memory.

    Copies to and from other memory are staged, and wait.
    """
    is_offloaded = device.type == "cuda" and state_device.type == "cpu"
    return torch.zeros(numel, dtype=dtype, device=state_device, pin_memory=is_offloaded)


def copy_to_state_device(grads: torch.Tensor, state_device: torch.device) -> torch.Tensor:
    """Return gradients where optimizer state is updated: as they are, or copied to the host."""
    if grads.device.type == state_device.type:
        return grads
    host = torch.empty(grads.shape, dtype=grads.dtype, device=state_device, pin_memory=True)
    host.copy_(grads, non_blocking=True)
    torch.cuda.current_stream(grads.device).synchronize()
    return host


def split_by_module(
    component: Component,
    buffer: torch.Tensor,
    spans: Sequence[tuple[Module, int]],
    nbytes: int | None = None,
) -> list[MemoryRow]:
    """Return memory rows of spans of a buffer's elements.

    They add up to `nbytes`, by default the bytes of the buffer's whole storage; what belongs to no
    module is OTHER.
    """
    size = buffer.element_size()
    rows = [
        MemoryRow(component=component, module=module, bytes=count * size) for module, count in spans
    ]
    total = buffer.untyped_storage().nbytes() if nbytes is None else nbytes
    padding = total - sum(row.bytes for row in rows)
    return [*rows, MemoryRow(component=component, module=Module.OTHER, bytes=padding)]
