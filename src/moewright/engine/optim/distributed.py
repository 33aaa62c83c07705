"""The distributed optimizer: fp32 gradient accumulation, reduction over the right grid, AdamW on
owned shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from moewright.engine.checkpoint import Piece
from moewright.engine.comm.collectives import Flight, all_reduce
from moewright.engine.model.experts import Experts
from moewright.engine.model.layers import Slot, slots_of
from moewright.engine.model.replicas import Replicas
from moewright.engine.observe.counters import identity
from moewright.engine.optim.flat_buffers import FlatBucket, boxes_of, build_buckets
from moewright.engine.optim.fsdp import FullySharded, ShardedParameter, shard_fully
from moewright.engine.optim.grad_ready import Arrivals
from moewright.engine.optim.loss_scale import LossScale
from moewright.engine.optim.update import Update, adamw_update
from moewright.engine.runtime import Runtime
from moewright.rules.fsdp import cuts
from moewright.rules.shards import GRADIENT_GROUPS, gradient_group, holders
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
        initial: Callable[[Slot], torch.Tensor],
        rule: Update = adamw_update,
    ) -> None:
        self._run, self._rule = run, rule
        slots, layout = slots_of(model), run.mesh.layout
        groups = [
            (slot, run.mesh.group(gradient_group(slot.placement.cuts, layout))) for slot in slots
        ]
        cut = [slot for slot, group in groups if cuts(layout, group.name)]
        self.buckets: list[FlatBucket] = []
        for group in GRADIENT_GROUPS:
            members = [slot for slot, of in groups if of.name == group and not cuts(layout, group)]
            by_holders = [(holders(slot.name, run.model, layout), slot) for slot in members]
            for key in sorted({key for key, _ in by_holders}):
                some = [slot for own, slot in by_holders if own == key]
                self.buckets += build_buckets(
                    run, some, run.mesh.group(group), run.mesh.shared.get(key), initial
                )
        self._replicas = [
            each.replicas for each in model.modules() if isinstance(each, Experts) and each.replicas
        ]
        for each in self._replicas:
            each.fetch()
        self.fully = shard_fully(run, model, cut, initial) if cut else None
        self._cut = self.fully.parameters if self.fully else ()
        self._holders: list[FlatBucket | ShardedParameter] = [*self.buckets, *self._cut]
        self._updates = torch.zeros(1, dtype=torch.int64)  # made so far; a skipped step is none
        self._scale = LossScale(run.workload)
        self._pending: set[str] = set()
        self._reductions: dict[int, Flight] = {}
        self._gathers: dict[int, Flight] = {}
        self._shards: list[torch.Tensor] = []
        number = {slot.name: place for place, slot in enumerate(slots)}
        held = [[slot.name for slot, _ in bucket.views] for bucket in self.buckets]
        # Backward goes through the model from its end, so a bucket is full when its first parameter
        # has its gradient.
        self._order = sorted(range(len(held)), key=lambda i: -min(number[name] for name in held[i]))
        replicated = {id(part) for each in self._replicas for part in each.parts}
        waiting = {
            i
            for i, bucket in enumerate(self.buckets)
            if any(id(slot.owner) in replicated for slot, _ in bucket.views)
        }
        due = sorted(
            self._order, key=waiting.__contains__
        )  # what is full waits for what comes before it
        self._arrivals = Arrivals([(i, held[i]) for i in due], self._reduce_one)
        self._late = Overlap.PARAM in layout.overlap
        for index, bucket in enumerate(self.buckets):
            early = Overlap.GRAD in layout.overlap and index not in waiting
            for slot, view in bucket.views:
                slot.parameter.register_post_accumulate_grad_hook(
                    self._accumulate(slot.name, view, early=early)
                )
                if self._late:
                    slot.owner.arrive = partial(self._land, index)

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
                self._arrivals.came(name)

        return hook

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; gradients are that much larger until
        `update`."""
        return self._scale.value

    def judge(self, *, finite: bool) -> None:
        """Tell, once a step, whether all gradients of the world were finite."""
        self._scale.judge(finite=finite)

    def begin(self, micro_batches: int) -> None:
        """Forget the gradients of the last step; the first of each parameter overwrites instead of
        adding."""
        self._pending = {slot.name for bucket in self.buckets for slot, _ in bucket.views}
        self._reductions = {}
        self._arrivals.begin(micro_batches)
        for each in self._replicas:
            each.begin()
        if self.fully is not None:
            self.fully.begin()

    def _reduce_one(self, index: int) -> None:
        """Start to reduce a bucket. A parameter that no micro-batch used has a zero gradient."""
        for slot, view in self.buckets[index].views:
            if slot.name in self._pending:
                view.zero_()
        self._reductions[index] = self.buckets[index].reduce()

    def reduce(self) -> float:
        """Sum gradients over the data-parallel groups; returns this rank's part of the squared
        global norm.

        Summing the parts over the world counts every parameter once: replicas of a gradient divide
        their part.
        """
        self._send_home()
        self._arrivals.finish()
        self._shards = [self._reductions[index].land() for index in range(len(self.buckets))]
        for bucket, shard in zip(self.buckets, self._shards, strict=True):
            if bucket.holders is not None:
                all_reduce(shard, bucket.holders)
        own = sum(
            _squared_norm(shard) / bucket.replicas
            for bucket, shard in zip(self.buckets, self._shards, strict=True)
        )
        cut = self.fully.reduce() if self.fully else []
        self._shards += cut
        return own + sum(
            _squared_norm(g) / each.copies.size for each, g in zip(self._cut, cut, strict=True)
        )

    def _send_home(self) -> None:
        """Add the gradients of replicas to those of the experts that they are of, which wait for it
        to be reduced."""
        views = {
            id(slot.owner): (slot, view) for bucket in self.buckets for slot, view in bucket.views
        }
        for each in self._replicas:
            own = [views[id(part)] for part in each.parts]
            for slot, view in own:
                if slot.name in self._pending:
                    self._pending.discard(slot.name)
                    view.zero_()
            each.send_home([view for _, view in own])

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
                places = [part.place for part in bucket.parts if part.slot.decays == decay]
                weight_decay = spec.weight_decay if decay else 0.0
                self._rule(bucket, shard, places, spec, lr=lr, weight_decay=weight_decay, done=done)
        self._shards = []

    def gradients(self) -> list[Piece]:
        """The reduced gradients, "grad/" + name, before clipping; between `reduce` and `update`."""
        pairs = zip(self._holders, self._shards, strict=True)
        return [
            piece for bucket, shard in pairs for piece in boxes_of(bucket.parts, "grad/", shard)
        ]

    def publish(self) -> None:
        """Bring the updated weights to every rank: now, or under way to their first use with
        overlap=param."""
        for index in reversed(self._order):  # as forward uses them
            self._gathers[index] = self.buckets[index].publish()
        if not self._late:
            self.settle()
        for each in self._replicas:
            each.fetch()

    def settle(self) -> None:
        """Wait for weights that are under way: before the process group is left."""
        for index in list(self._gathers):
            self._land(index)

    def _land(self, index: int) -> None:
        if index in self._gathers:
            self._gathers.pop(index).land()

    def memory(self) -> tuple[MemoryRow, ...]:
        """Bytes held, one row a (component, module)."""
        held: dict[tuple[Component, Module], int] = defaultdict(int)
        holders: list[FlatBucket | FullySharded | Replicas] = [*self.buckets, *self._replicas]
        holders += [self.fully] if self.fully else []
        for holder in holders:
            for row in holder.memory():
                held[(row.component, row.module)] += row.bytes
        return tuple(MemoryRow(component=c, module=m, bytes=size) for (c, m), size in held.items())

    def pieces(self) -> list[Piece]:
        """Everything a checkpoint must hold of parameters and their optimizer state, by global
        name."""
        updates = Piece(name="optim/updates", global_shape=(1,), offsets=(0,), tensor=self._updates)
        states = [piece for holder in self._holders for piece in holder.pieces()]
        return [updates, *self._scale.pieces(), *states]

    def resident(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the weight buffers."""
        if self.fully is not None and self.fully.resident(tensor):
            return True
        if any(each.resident(tensor) for each in self._replicas):
            return True
        return any(identity(bucket.weights) == identity(tensor) for bucket in self.buckets)


def _squared_norm(flat: torch.Tensor) -> float:
    """Sum of squares: fp32 within a million elements, fp64 over them (a whole pass in fp64 costs
    ten times as much)."""
    return sum(float(torch.linalg.vector_norm(part)) ** 2 for part in flat.split(_NORM_ELEMENTS))
