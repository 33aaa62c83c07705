"""The distributed optimizer: fp32 gradient accumulation, reduction over the right grid, AdamW on
owned shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm.collectives import AsyncCollective, all_reduce
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.model.replicas import ExpertReplicas
from moewright.engine.observe.counters import storage_id
from moewright.engine.optim.flat_buffers import FlatBucket, build_buckets, build_local_shards
from moewright.engine.optim.fsdp import FsdpParams, ShardedParameter, apply_fsdp
from moewright.engine.optim.grad_ready import GradReadyTracker
from moewright.engine.optim.loss_scale import LossScaler
from moewright.engine.optim.update_rules import UpdateRule, adamw_update
from moewright.engine.runtime import Runtime
from moewright.rules.fsdp import is_fsdp_sharded
from moewright.rules.shards import GRADIENT_GROUPS, gradient_group, holding_pp_ranks
from moewright.spec.layout import Overlap
from moewright.spec.ledger import Component, MemoryRow, Module

_NORM_ELEMENTS = 1 << 20


class DistributedOptimizer:
    """Replicated (zero=0), ZeRO-1 or ZeRO-3 optimizer over all parameters of this rank; `rule`
    makes the update.

    Gradients are summed over the group in which a parameter is held in copies, never averaged: the
    loss is already divided by the global number of targets. With overlap=grad a bucket is reduced
    under backward, as soon as the last of its gradients is in, but after backward where replicas of
    its experts send theirs home; with overlap=param updated weights come under the next forward.
    Neither changes a bit.
    """

    def __init__(
        self,
        run: Runtime,
        model: nn.Module,
        initial: Callable[[NamedParameter], torch.Tensor],
        update_rule: UpdateRule = adamw_update,
    ) -> None:
        self._run, self._rule = run, update_rule
        slots, layout = list_parameters(model), run.mesh.layout
        groups = [
            (slot, run.mesh.group(gradient_group(slot.placement.sharding, layout)))
            for slot in slots
        ]
        cut = [slot for slot, group in groups if is_fsdp_sharded(layout, group.name)]
        self.buckets: list[FlatBucket] = []
        for group in GRADIENT_GROUPS:
            members = [
                slot
                for slot, of in groups
                if of.name == group and not is_fsdp_sharded(layout, group)
            ]
            by_holders = [
                (holding_pp_ranks(slot.name, run.model, layout), slot) for slot in members
            ]
            for key in sorted({key for key, _ in by_holders}):
                some = [slot for own, slot in by_holders if own == key]
                self.buckets += build_buckets(
                    run, some, run.mesh.group(group), run.mesh.shared_table_groups.get(key), initial
                )
        self._replicas = [
            each.replicas
            for each in model.modules()
            if isinstance(each, RoutedExperts) and each.replicas
        ]
        for each in self._replicas:
            each.fetch_weights()
        self.fsdp = apply_fsdp(run, model, cut, initial) if cut else None
        self._cut = self.fsdp.parameters if self.fsdp else ()
        self._holders: list[FlatBucket | ShardedParameter] = [*self.buckets, *self._cut]
        self._updates = torch.zeros(1, dtype=torch.int64)  # made so far; a skipped step is none
        self._scale = LossScaler(run.workload)
        self._pending: set[str] = set()
        self._reductions: dict[int, AsyncCollective] = {}
        self._gathers: dict[int, AsyncCollective] = {}
        self._shards: list[torch.Tensor] = []
        number = {slot.name: place for place, slot in enumerate(slots)}
        held = [[slot.name for slot, _ in bucket.grad_views] for bucket in self.buckets]
        # Backward goes through the model from its end, so a bucket is full when its first parameter
        # has its gradient.
        self._order = sorted(range(len(held)), key=lambda i: -min(number[name] for name in held[i]))
        replicated = {id(part) for each in self._replicas for part in each.parts}
        waiting = {
            i
            for i, bucket in enumerate(self.buckets)
            if any(id(slot.owner) in replicated for slot, _ in bucket.grad_views)
        }
        due = sorted(
            self._order, key=waiting.__contains__
        )  # what is full waits for what comes before it
        self._grad_tracker = GradReadyTracker([(i, held[i]) for i in due], self._reduce_one)
        self._overlaps_param_gather = Overlap.PARAM in layout.overlap
        for index, bucket in enumerate(self.buckets):
            early = Overlap.GRAD in layout.overlap and index not in waiting
            for slot, view in bucket.grad_views:
                slot.parameter.register_post_accumulate_grad_hook(
                    self._accumulate(slot.name, view, early=early)
                )
                if self._overlaps_param_gather:
                    slot.owner.ensure_ready = partial(self._wait_for_bucket, index)

    def _accumulate(
        self, name: str, view: torch.Tensor, *, early: bool
    ) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return
            if name in self._pending:
                self._pending.discard(name)
                view.copy_(parameter.grad)
            else:
                view.add_(parameter.grad)
            parameter.grad = None
            if early:
                self._grad_tracker.mark_ready(name)

        return hook

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; gradients are that much larger until
        `update`."""
        return self._scale.value

    def update_loss_scale(self, *, finite: bool) -> None:
        """Tell, once a step, whether all gradients of the world were finite."""
        self._scale.update(finite=finite)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the gradients of the last step; the first of each parameter overwrites instead of
        adding."""
        self._pending = {slot.name for bucket in self.buckets for slot, _ in bucket.grad_views}
        self._reductions = {}
        self._grad_tracker.begin_step(micro_batches)
        for each in self._replicas:
            each.begin_step()
        if self.fsdp is not None:
            self.fsdp.begin_step()

    def _reduce_one(self, index: int) -> None:
        """Start to reduce a bucket. A parameter that no micro-batch used has a zero gradient."""
        for slot, view in self.buckets[index].grad_views:
            if slot.name in self._pending:
                view.zero_()
        self._reductions[index] = self.buckets[index].start_reduce()

    def reduce_gradients(self) -> float:
        """Sum gradients over the data-parallel groups; returns this rank's part of the squared
        global norm.

        Summing the parts over the world counts every parameter once: replicas of a gradient divide
        their part.
        """
        self._reduce_replica_gradients()
        self._grad_tracker.flush()
        self._shards = [self._reductions[index].wait() for index in range(len(self.buckets))]
        for bucket, shard in zip(self.buckets, self._shards, strict=True):
            if bucket.holder_group is not None:
                all_reduce(shard, bucket.holder_group)
        own = sum(
            _squared_norm(shard) / bucket.replica_count
            for bucket, shard in zip(self.buckets, self._shards, strict=True)
        )
        cut = self.fsdp.reduce_gradients() if self.fsdp else []
        self._shards += cut
        return own + sum(
            _squared_norm(g) / each.replica_group.size
            for each, g in zip(self._cut, cut, strict=True)
        )

    def _reduce_replica_gradients(self) -> None:
        """Add the gradients of replicas to those of the experts that they are of, which wait for it
        to be reduced."""
        views = {
            id(slot.owner): (slot, view)
            for bucket in self.buckets
            for slot, view in bucket.grad_views
        }
        for each in self._replicas:
            own = [views[id(part)] for part in each.parts]
            for slot, view in own:
                if slot.name in self._pending:
                    self._pending.discard(slot.name)
                    view.zero_()
            each.send_gradients([view for _, view in own])

    def update(self, *, lr: float, scale: float) -> None:
        """One update with gradients times `scale` (the clipping factor). Matrices decay, vectors do
        not."""
        spec, done = self._run.workload.optimizer, int(self._updates)
        scale /= self.loss_scale
        self._updates += 1
        for bucket, shard in zip(self._holders, self._shards, strict=True):
            if scale != 1.0:
                shard.mul_(scale)
            shard = shard.to(bucket.master.device)
            for decay in (True, False):
                places = [
                    part.shard_slice for part in bucket.owned if part.slot.has_weight_decay == decay
                ]
                weight_decay = spec.weight_decay if decay else 0.0
                self._rule(bucket, shard, places, spec, lr=lr, weight_decay=weight_decay, done=done)
        self._shards = []

    def gradient_shards(self) -> list[LocalShard]:
        """The reduced gradients, "grad/" + name, before clipping; between `reduce` and `update`."""
        pairs = zip(self._holders, self._shards, strict=True)
        return [
            piece
            for bucket, shard in pairs
            for piece in build_local_shards(bucket.owned, "grad/", shard)
        ]

    def all_gather_params(self) -> None:
        """Bring the updated weights to every rank: now, or under way to their first use with
        overlap=param."""
        for index in reversed(self._order):  # as forward uses them
            self._gathers[index] = self.buckets[index].start_all_gather()
        if not self._overlaps_param_gather:
            self.finish_pending()
        for each in self._replicas:
            each.fetch_weights()

    def finish_pending(self) -> None:
        """Wait for weights that are under way: before the process group is left."""
        for index in list(self._gathers):
            self._wait_for_bucket(index)

    def _wait_for_bucket(self, index: int) -> None:
        if index in self._gathers:
            self._gathers.pop(index).wait()

    def memory_rows(self) -> tuple[MemoryRow, ...]:
        """Bytes held, one row a (component, module)."""
        held: dict[tuple[Component, Module], int] = defaultdict(int)
        holders: list[FlatBucket | FsdpParams | ExpertReplicas] = [*self.buckets, *self._replicas]
        holders += [self.fsdp] if self.fsdp else []
        for holder in holders:
            for row in holder.memory_rows():
                held[(row.component, row.module)] += row.bytes
        return tuple(MemoryRow(component=c, module=m, bytes=size) for (c, m), size in held.items())

    def local_shards(self) -> list[LocalShard]:
        """Everything a checkpoint must hold of parameters and their optimizer state, by global
        name."""
        updates = LocalShard(
            name="optim/updates", global_shape=(1,), offsets=(0,), tensor=self._updates
        )
        states = [piece for holder in self._holders for piece in holder.local_shards()]
        return [updates, *self._scale.local_shards(), *states]

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the weight buffers."""
        if self.fsdp is not None and self.fsdp.is_weight(tensor):
            return True
        if any(each.is_weight(tensor) for each in self._replicas):
            return True
        return any(storage_id(bucket.weights) == storage_id(tensor) for bucket in self.buckets)


def _squared_norm(flat: torch.Tensor) -> float:
    """Sum of squares: fp32 within a million elements, fp64 over them (a whole pass in fp64 costs
    ten times as much)."""
    return sum(float(torch.linalg.vector_norm(part)) ** 2 for part in flat.split(_NORM_ELEMENTS))
