"""Flat buffers: weights, gradients and optimizer state of a bucket of parameters, each one long
tensor.

Weights live in a buffer of the compute dtype and the model's parameters are views into it;
gradients accumulate in fp32; the fp32 master copy and the two moments (fp32 or bf16) cover only the
shard that this rank owns (docs/formulas.md 2), and live in host memory with offload=optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

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
from moewright.rules.buckets import BucketEntry, plan_buckets, shard_range
from moewright.spec.layout import Offload
from moewright.spec.ledger import Component, MemoryRow, Module


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRange:
    """What this rank owns of one parameter: elements [first, last) of it, from `start` on in the
    shard."""

    slot: NamedParameter
    first: int
    last: int
    start: int

    @property
    def shard_slice(self) -> slice:
        return slice(self.start, self.start + self.last - self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatBucket:
    """One bucket's tensors on this rank; `group` shares the gradients, `sharded` says whether it
    shares the state.

    `holders`: the pipeline ranks that hold the bucket, where there are several (rules.shards).
    """

    group: Group
    holder_group: Group | None
    sharded: bool
    on_host: bool  # master and moments live in host memory, and are updated there
    weights: torch.Tensor
    grads: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad_views: tuple[tuple[NamedParameter, torch.Tensor], ...]  # each parameter's gradient
    owned: tuple[OwnedRange, ...]

    @property
    def replica_count(self) -> int:
        """Ranks of the world that hold this rank's shard of the gradients."""
        return (1 if self.sharded else self.group.size) * (
            self.holder_group.size if self.holder_group else 1
        )

    def start_reduce(self) -> AsyncCollective:
        """Start to sum the gradients over the group; it brings this rank's shard of them."""
        if not self.sharded or self.group.size == 1:
            return start_all_reduce(self.grads, self.group)
        shard = self.grads.new_empty(len(self.master))
        return start_reduce_scatter(shard, self.grads, self.group)

    def start_all_gather(self) -> AsyncCollective:
        """Round the master copy to the compute dtype; start to give every rank of the group the
        whole of it."""
        if self.sharded and self.group.size > 1:
            return start_all_gather(self.weights, self.master.to(self.weights), self.group)
        self.weights.copy_(self.master)
        return AsyncCollective(out=self.weights, tensor=self.master, work=None)

    def memory_rows(self) -> list[MemoryRow]:
        """Bytes of every buffer by component and module; what belongs to no parameter is OTHER."""
        whole = [(slot.module, view.numel()) for slot, view in self.grad_views]
        owned = [(part.slot.module, part.last - part.first) for part in self.owned]
        rows = split_by_module(
            Component.WEIGHTS, self.weights, whole, self.weights.nbytes
        ) + split_by_module(Component.GRADIENTS, self.grads, whole, self.grads.nbytes)
        rows += split_by_module(
            Component.HOST if self.on_host else Component.MASTER,
            self.master,
            owned,
            self.master.nbytes,
        )
        for moment in (self.exp_avg, self.exp_avg_sq):
            rows += split_by_module(
                Component.HOST if self.on_host else Component.MOMENTS, moment, owned, moment.nbytes
            )
        return rows

    def local_shards(self) -> list[LocalShard]:
        """Master and moments as boxes of the global tensors."""
        states = (
            ("", self.master),
            ("optim/exp_avg/", self.exp_avg),
            ("optim/exp_avg_sq/", self.exp_avg_sq),
        )
        return [
            piece
            for prefix, flat in states
            for piece in build_local_shards(self.owned, prefix, flat)
        ]


def build_local_shards(
    parts: Sequence[OwnedRange], prefix: str, flat: torch.Tensor
) -> list[LocalShard]:
    """A tensor laid out as the shard, as boxes of the global tensors `prefix` + name; padding is in
    none."""
    found: list[LocalShard] = []
    for part in parts:
        passed = 0  # elements of the parameter before those of `at`
        for at in part.slot.placement.split_rows() or (part.slot.placement,):
            # Only the first dim is ever padded, so what lies inside comes first.
            first, last = (
                max(part.first - passed, 0),
                min(part.last - passed, prod(at.unpadded_shape)),
            )
            if first < last:
                start = part.start + passed + first - part.first
                found += flat_range_shards(
                    prefix + part.slot.name,
                    global_shape=at.global_shape,
                    offsets=at.offsets,
                    local_shape=at.unpadded_shape,
                    start=first,
                    flat=flat[start : start + last - first],
                )
            passed += prod(at.local_shape)
    return found


def build_buckets(
    run: Runtime,
    slots: Sequence[NamedParameter],
    group: Group,
    holder_group: Group | None,
    initial: Callable[[NamedParameter], torch.Tensor],
) -> list[FlatBucket]:
    """Lay parameters out in reverse registration order, about the order in which backward finishes
    them."""
    by_name = {slot.name: slot for slot in slots}
    sharded, on_host = run.mesh.layout.zero > 0, Offload.OPTIMIZER in run.mesh.layout.offload
    home = torch.device("cpu") if on_host else run.device
    moment_dtype = torch_dtype(run.workload.optimizer.moment_dtype)
    shards, index = (group.size, group.index) if sharded else (1, 0)
    planned = plan_buckets(
        [(slot.name, slot.parameter.numel()) for slot in reversed(slots)],
        shards=shards,
        bucket_elements=run.workload.optimizer.bucket_elements,
    )
    buckets = []
    for bucket in planned:
        start, stop = shard_range(bucket, shards, index)
        weights = torch.zeros(bucket.numel, dtype=run.dtype, device=run.device)
        grads = torch.zeros(bucket.numel, dtype=torch.float32, device=run.device)
        master = torch.zeros(stop - start, dtype=torch.float32, device=home)
        exp_avg, exp_avg_sq = (
            torch.zeros(stop - start, dtype=moment_dtype, device=home) for _ in range(2)
        )
        views, parts = [], []
        for entry in bucket.entries:
            slot = by_name[entry.name]
            value = initial(slot).to(run.device)
            here = slice(entry.start, entry.start + entry.numel)
            slot.owner.weight = nn.Parameter(weights[here].view(slot.parameter.shape))
            slot.owner.weight.data.copy_(value)
            views.append((slot, grads[here].view(slot.parameter.shape)))
            part = _intersect(slot, entry, start, stop)
            if part is not None:
                master[part.shard_slice] = value.flatten()[part.first : part.last]
                parts.append(part)
        buckets.append(
            FlatBucket(
                group=group,
                holder_group=holder_group,
                sharded=sharded,
                on_host=on_host,
                weights=weights,
                grads=grads,
                master=master,
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                grad_views=tuple(views),
                owned=tuple(parts),
            )
        )
    return buckets


def _intersect(
    slot: NamedParameter, entry: BucketEntry, start: int, stop: int
) -> OwnedRange | None:
    first, last = max(entry.start, start), min(entry.start + entry.numel, stop)
    if first >= last:
        return None
    return OwnedRange(
        slot=slot, first=first - entry.start, last=last - entry.start, start=first - start
    )


def split_by_module(
    component: Component, buffer: torch.Tensor, spans: Sequence[tuple[Module, int]], nbytes: int
) -> list[MemoryRow]:
    """Rows of elements like the buffer's, in all `nbytes`; what belongs to no module is OTHER."""
    size = buffer.element_size()
    rows = [
        MemoryRow(component=component, module=module, bytes=count * size) for module, count in spans
    ]
    padding = nbytes - sum(row.bytes for row in rows)
    return [*rows, MemoryRow(component=component, module=Module.OTHER, bytes=padding)]
