"""The distributed optimizer: gradient accumulation, reduction over the right grid, updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from moewright.engine.checkpoint import LocalShard, whole_shard
from moewright.engine.comm.collectives import AsyncCollective, all_reduce
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.optim.flat_buffers import FlatBucket, GradReadyTracker, build_buckets
from moewright.engine.optim.frozen_weights import FrozenWeights
from moewright.engine.optim.fsdp import ShardedParameter, apply_fsdp
from moewright.engine.optim.moments import PlainMoment
from moewright.engine.optim.muon import MuonUpdate
from moewright.engine.optim.optimizer_states import (
    OptimizerStates,
    OwnedRange,
    StoredStates,
    WholeRange,
    build_local_shards,
    copy_to_state_device,
)
from moewright.engine.optim.update_rules import UpdateRule, adamw_update, split_ranges
from moewright.engine.runtime import Runtime
from moewright.engine.torch_private import foreach_norm, storage_id
from moewright.rules.shapes.fsdp import (
    is_fsdp_sharded,
)
from moewright.rules.shapes.shards import gradient_group
from moewright.spec.layout import Overlap
from moewright.spec.ledger import MemoryRow
from moewright.spec.run import GRADIENT_RANGE_PREFIX, REDUCE_RANGE_PREFIX
from moewright.spec.workload import Dtype, MatrixUpdate, Workload

# The scale of the loss in fp16, where small gradients would vanish and large ones overflow.


class LossScaler:
    """A dynamic scale of the loss; it is always 1 unless in fp16.

    All ranks have the same one, because all update it by the same global norm.
    """

    def __init__(self, workload: Workload) -> None:
        self._spec = workload.scaling
        self._is_active = workload.precision is Dtype.FP16
        scale = self._spec.initial_loss_scale if self._is_active else 1.0
        # The scale, and the finite steps since it last changed.
        self._state = torch.tensor([scale, 0.0])

    @property
    def value(self) -> float:
        """The factor of the loss."""
        return float(self._state[0]) if self._is_active else 1.0

    def update(self, *, finite: bool) -> None:
        """Halve the scale after a step that was not finite; double it at the end of a window."""
        if not self._is_active:
            return
        if not finite:
            self._state[0] = max(self.value / 2, self._spec.min_loss_scale)
            self._state[1] = 0.0
            return
        self._state[1] += 1
        if int(self._state[1]) >= self._spec.loss_scale_window:
            self._state[0] *= 2
            self._state[1] = 0.0

    def local_shards(self) -> list[LocalShard]:
        """Return what a checkpoint must hold of it."""
        if not self._is_active:
            return []
        return [whole_shard("optim/loss_scale", self._state)]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePiece:
    """Consecutive elements of a parameter that AdamW updates, with their state.

    The moments are in fp32, and copies where they are not stored so.
    """

    name: str
    has_weight_decay: bool
    on_host: bool
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor  # fp32, as it was reduced; empty once the update is done
    are_moments_exact: bool  # whether they are stored as the update leaves them


@dataclass(frozen=True, kw_only=True, slots=True)
class _BorrowedStates:
    """Copies of the state of a piece, which another rank may own."""

    master: torch.Tensor
    exp_avg: PlainMoment
    exp_avg_sq: PlainMoment
    momentum: torch.Tensor
    owned: tuple[OwnedRange, ...] = ()
    first: int = 0
    on_host: bool = False


def ignore_gradient(name: str, gradient: torch.Tensor) -> None:
    """Do nothing with a gradient that nobody asked for."""


# A norm is taken in fp32 over so many elements, and in fp64 over those parts.
_NORM_ELEMENTS = 1 << 20


class DistributedOptimizer:
    """A replicated (zero=0) or ZeRO-1, -2 or -3 optimizer over all parameters of this rank.

    Gradients are summed over the group in which a parameter is replicated, never averaged: the loss
    is already divided by the global number of targets. They are accumulated and reduced in
    grad_dtype; norm and update take them in fp32. With overlap=grad a bucket is reduced during
    backward, as soon as the last of its gradients is ready; a bucket that gets gradients of expert
    replicas is reduced after backward. With overlap=param the weights of an updated bucket are
    gathered while the next is updated, and during the next forward. An optimizer of several
    instances (zero=1 with `shard`) shards states within each of them. Neither overlap changes a bit
    of any result.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        initial_value: Callable[[NamedParameter], torch.Tensor],
        update_rule: UpdateRule = adamw_update,
    ) -> None:
        self._runtime = runtime
        self._update_rule = update_rule
        all_parameters = list_parameters(model)
        parameters = [parameter for parameter in all_parameters if parameter.owner.is_trained]
        self.frozen = FrozenWeights(
            runtime,
            [parameter for parameter in all_parameters if not parameter.owner.is_trained],
            initial_value,
        )
        self.buckets = build_buckets(runtime, parameters, initial_value)
        self._replicas = [
            module.replicas
            for module in model.modules()
            if isinstance(module, RoutedExperts) and module.replicas
        ]
        # After the buckets, which have just drawn the weights of the owners.
        for replicas in self._replicas:
            replicas.fetch_weights()
        sharded = [parameter for parameter in parameters if _uses_fsdp(runtime, parameter)]
        self.fsdp = apply_fsdp(runtime, model, sharded, initial_value) if sharded else None
        self._fsdp_parameters = self.fsdp.parameters if self.fsdp else ()
        self._state_holders: list[FlatBucket | ShardedParameter] = [
            *self.buckets,
            *self._fsdp_parameters,
        ]
        self._muon = MuonUpdate(runtime, parameters, self.buckets, self._fsdp_parameters)
        # Updates made so far; a skipped step is none.
        self._updates = torch.zeros(1, dtype=torch.int64)
        self._loss_scaler = LossScaler(runtime.workload)
        # Parameters whose gradient buffer still holds the last step's gradient.
        self._stale: set[str] = set()
        self._reductions: dict[int, AsyncCollective] = {}
        self._param_gathers: dict[int, AsyncCollective] = {}
        self._grad_shards: list[torch.Tensor] = []
        # Called with each bucket that holds this rank's own gradients, before they are reduced.
        self.before_reduce: Callable[[FlatBucket], None] = lambda bucket: None
        # Called with the name of a parameter and each gradient of it, before that is added up.
        self.before_add: Callable[[str, torch.Tensor], None] = ignore_gradient
        self._overlaps_param_gather = Overlap.PARAM in runtime.mesh.layout.overlap
        self._backward_order = self._order_buckets(parameters)
        # As forward uses them.
        self._gather_order = tuple(reversed(self._backward_order))
        # Where the update of a bucket ends with it, and not with all matrices, its weights travel
        # while the next bucket is updated.
        is_adamw = runtime.workload.optimizer.matrix_update is MatrixUpdate.ADAMW
        self._gathers_in_update = self._overlaps_param_gather and is_adamw
        self._gathers_started: set[int] = set()
        self._grad_tracker = self._build_grad_tracker()
        self._open_range = runtime.counters.wait_clock.open_range
        self._add_hooks()

    def _order_buckets(self, parameters: Sequence[NamedParameter]) -> list[int]:
        """Return the buckets in the order in which backward fills them.

        Backward goes through the model from its end, so a bucket is full when its first parameter
        has its gradient.
        """
        position = {parameter.name: index for index, parameter in enumerate(parameters)}

        def first_position(index: int) -> int:
            return min(position[name] for name in self.buckets[index].names)

        return sorted(range(len(self.buckets)), key=first_position, reverse=True)

    def _find_replicated_buckets(self) -> set[int]:
        """Return the buckets that have to wait for the gradients of expert replicas."""
        replicated = {id(part) for replicas in self._replicas for part in replicas.parts}
        return {
            index
            for index, bucket in enumerate(self.buckets)
            if any(id(parameter.owner) in replicated for parameter, _ in bucket.grad_views)
        }

    def _build_grad_tracker(self) -> GradReadyTracker:
        # A full bucket waits for those before it, so those that wait for replicas come last.
        waiting = self._find_replicated_buckets()
        order = sorted(self._backward_order, key=lambda index: index in waiting)
        return GradReadyTracker(
            [(index, self.buckets[index].names) for index in order], self._reduce_bucket
        )

    def _add_hooks(self) -> None:
        overlaps_reduce = Overlap.GRAD in self._runtime.mesh.layout.overlap
        waiting = self._find_replicated_buckets()
        for index, bucket in enumerate(self.buckets):
            reduces_early = overlaps_reduce and index not in waiting
            # Buckets that wait for replicas are reduced after the backward in any case.
            mark = "" if index in waiting else f"{GRADIENT_RANGE_PREFIX}{index}"
            for parameter, grad_view in bucket.grad_views:
                hook = self._build_grad_hook(parameter.name, grad_view, reduces_early, mark)
                parameter.parameter.register_post_accumulate_grad_hook(hook)
                if self._overlaps_param_gather:
                    parameter.owner.ensure_ready = partial(self._wait_for_bucket, index)

    def _build_grad_hook(
        self, name: str, grad_view: torch.Tensor, reduces_early: bool, mark: str
    ) -> Callable[[torch.Tensor], None]:
        graphs = self._runtime.part_graphs
        open_range = self._open_range

        def accumulate(weight: torch.Tensor) -> None:
            if weight.grad is None:
                return
            self.before_add(name, weight.grad)
            if name in self._stale:
                self._stale.discard(name)
                grad_view.copy_(weight.grad)
            else:
                grad_view.add_(weight.grad)
            # The buffer has the sum, and this gradient would live on beside it.
            weight.grad = None
            if reduces_early:
                # A graph adds gradients; the host reduces buckets.
                graphs.call_outside(partial(self._grad_tracker.mark_ready, name))
            elif mark:
                with open_range(mark):  # the last of a bucket: with overlap it would be reduced
                    pass

        return accumulate

    @property
    def has_replicas(self) -> bool:
        """Whether experts of other ranks have copies on this one."""
        return bool(self._replicas)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward; gradients are that much larger until `update`.

        It is 1 unless in fp16.
        """
        return self._loss_scaler.value

    def update_loss_scale(self, *, finite: bool) -> None:
        """Adapt the scale, once a step, to whether all gradients of the world were finite."""
        self._loss_scaler.update(finite=finite)

    def begin_step(self, micro_batches: int) -> None:
        """Forget the gradients of the last step.

        The first gradient of each parameter overwrites instead of adding; that of a captured part
        is added to zeros, as all that its graph adds.
        """
        self._stale = {name for bucket in self.buckets for name in bucket.names}
        if self._runtime.part_graphs.is_active:
            self._stale.clear()
            for bucket in self.buckets:
                bucket.grads.zero_()
        self._reductions = {}
        self._grad_tracker.begin_step(micro_batches)
        for replicas in self._replicas:
            replicas.begin_step()
        if self.fsdp is not None:
            self.fsdp.begin_step()

    @property
    def unwritten_gradients(self) -> frozenset[str]:
        """The parameters that have no gradient of this step yet; set after a graph has written."""
        return frozenset(self._stale)

    @unwritten_gradients.setter
    def unwritten_gradients(self, names: frozenset[str]) -> None:
        self._stale = set(names)

    def _reduce_bucket(self, index: int) -> None:
        """Start to reduce a bucket; a parameter that no micro-batch used has a zero gradient."""
        for parameter, grad_view in self.buckets[index].grad_views:
            if parameter.name in self._stale:
                grad_view.zero_()
        self.before_reduce(self.buckets[index])
        in_trace = self._open_range(f"{REDUCE_RANGE_PREFIX}{index}")
        with self._runtime.mesh.tape.pause(), in_trace:  # it is no part of a micro-batch
            self._reductions[index] = self.buckets[index].start_reduce()

    def reduce_gradients(self) -> torch.Tensor:
        """Sum gradients over the data-parallel groups.

        Returns this rank's part of the squared global norm, fp64 on the device. The sum of the
        parts over the world counts every parameter once: ranks that hold the same gradient divide
        their part.
        """
        # Before the rest is reduced: these gradients are added into buckets.
        self._reduce_replica_gradients()
        self._grad_tracker.flush()
        bucket_shards = [self._reductions.pop(index).wait() for index in range(len(self.buckets))]
        for bucket, shard in zip(self.buckets, bucket_shards, strict=True):
            # After the group has cut the sum: each rank sums its own shard alone.
            for group in bucket.outer_groups:
                all_reduce(shard, group)
        squares = [
            _squared_norm(shard) / bucket.replica_count
            for bucket, shard in zip(self.buckets, bucket_shards, strict=True)
        ]
        fsdp_shards = self.fsdp.reduce_gradients() if self.fsdp else []
        self._grad_shards = [*bucket_shards, *fsdp_shards]
        squares += [
            _squared_norm(shard) / parameter.replica_count
            for parameter, shard in zip(self._fsdp_parameters, fsdp_shards, strict=True)
        ]
        device = self._runtime.device
        # A sum that begins with a tensor, for a rank may hold no parameter.
        return sum(
            (x.to(device) for x in squares), torch.zeros((), dtype=torch.float64, device=device)
        )

    def _reduce_replica_gradients(self) -> None:
        """Add the gradients of expert replicas to those of their experts, before the reduction."""
        grad_views = {
            id(parameter.owner): (parameter.name, grad_view)
            for bucket in self.buckets
            for parameter, grad_view in bucket.grad_views
        }
        for replicas in self._replicas:
            expert_grads = []
            for part in replicas.parts:
                name, grad_view = grad_views[id(part)]
                if name in self._stale:
                    self._stale.discard(name)
                    grad_view.zero_()
                expert_grads.append(grad_view)
            replicas.send_gradients(expert_grads)

    def update(self, *, lr: float, scale: float) -> None:
        """Do one update with gradients times `scale` (the clipping factor).

        Matrices decay, vectors do not.
        """
        updates_done = int(self._updates)
        scale /= self.loss_scale
        self._updates += 1
        others = range(len(self.buckets), len(self._state_holders))
        # In the order in which the next forward reads the weights.
        for index in (*self._gather_order, *others):
            holder = self._state_holders[index]
            for segment in holder.segments:
                shard_grads = self._grad_shards[index][segment.shard_slice]
                self._update_segment(segment, shard_grads, lr, scale, updates_done)
            if self._gathers_in_update and index not in others:
                self._start_param_gather(index)
        self._grad_shards = []
        # After all segments: a matrix may lie in several, and on several ranks.
        self._muon.update(lr=lr)

    def _update_segment(
        self,
        segment: OptimizerStates,
        shard_grads: torch.Tensor,
        lr: float,
        scale: float,
        updates_done: int,
    ) -> None:
        """Update a segment; its gradients in fp32 are gone when the next one's are made."""
        spec = self._runtime.workload.optimizer
        grads = copy_to_state_device(shard_grads, segment.master.device).float()
        if scale != 1.0:
            grads.mul_(scale)
        self._muon.add_gradients(segment, grads)
        for decays in (True, False):
            owned = [
                part
                for part in segment.owned
                if part.parameter.has_weight_decay == decays and not part.has_momentum
            ]
            self._update_rule(
                segment,
                grads,
                owned,
                spec,
                lr=lr,
                weight_decay=spec.weight_decay if decays else 0.0,
                updates_done=updates_done,
            )

    def list_pieces(self) -> Iterator[UpdatePiece]:
        """Yield what AdamW updates on this rank, piece by piece; matrices of Muon are left out."""
        for index, holder in enumerate(self._state_holders):
            for segment in holder.segments:
                gradients = segment.master.new_empty(0)
                if self._grad_shards:
                    gradients = self._grad_shards[index][segment.shard_slice]
                    gradients = copy_to_state_device(gradients, segment.master.device)
                for owned in segment.owned:
                    if not owned.has_momentum:
                        yield from _cut_pieces(segment, owned, gradients)

    def repeat_update(
        self, numbers: torch.Tensor, *, has_weight_decay: bool, lr: float, scale: float
    ) -> torch.Tensor:
        """Do the coming update on copies: master, both moments and gradients, [4, n] fp32.

        Returns the master and the moments after it, [3, n].
        """
        spec = self._runtime.workload.optimizer
        master, exp_avg, exp_avg_sq, gradients = numbers.unbind()
        factor = scale / self.loss_scale
        if factor != 1.0:
            gradients.mul_(factor)
        borrowed = _BorrowedStates(
            master=master,
            exp_avg=PlainMoment(exp_avg),
            exp_avg_sq=PlainMoment(exp_avg_sq),
            momentum=master.new_empty(0),
        )
        self._update_rule(
            borrowed,
            gradients,
            [WholeRange(numel=len(master))],
            spec,
            lr=lr,
            weight_decay=spec.weight_decay if has_weight_decay else 0.0,
            updates_done=int(self._updates),
        )
        return numbers[:3]

    def gradient_shards(self) -> list[LocalShard]:
        """Return the reduced gradients, named "grad/" + name, before clipping.

        To be called between `reduce_gradients` and `update`.
        """
        pairs = zip(self._state_holders, self._grad_shards, strict=True)
        return [
            shard
            for holder, grads in pairs
            for segment in holder.segments
            for shard in build_local_shards(
                segment.owned, "grad/", grads[segment.shard_slice].float()
            )
        ]

    def all_gather_params(self) -> None:
        """Bring the updated weights to every rank.

        With overlap=param they are then under way to their first use, those that `update` began
        with since they were updated.
        """
        for index in self._gather_order:
            if index not in self._gathers_started:
                self._start_param_gather(index)
        self._gathers_started.clear()
        if self.fsdp is not None:
            self.fsdp.all_gather_params()
        if not self._overlaps_param_gather:
            self.finish_pending()
        # It reads weights of the owners, which waits for their buckets.
        for replicas in self._replicas:
            replicas.fetch_weights()

    def _start_param_gather(self, index: int) -> None:
        self._param_gathers[index] = self.buckets[index].start_all_gather()
        self._gathers_started.add(index)

    def finish_pending(self) -> None:
        """Wait for weights that are under way, before the process group is left."""
        # A list, because each wait takes its bucket out.
        for index in list(self._param_gathers):
            self._wait_for_bucket(index)

    def _wait_for_bucket(self, index: int) -> None:
        if index in self._param_gathers:
            self._param_gathers.pop(index).wait()

    def memory_rows(self) -> Iterator[MemoryRow]:
        """Yield the bytes held; several rows may be of one component and module."""
        yield from self.frozen.memory_rows()
        for bucket in self.buckets:
            yield from bucket.memory_rows()
        for replicas in self._replicas:
            yield from replicas.memory_rows()
        if self.fsdp is not None:
            yield from self.fsdp.memory_rows()
        if self._runtime.delayed_scaling is not None:
            yield from self._runtime.delayed_scaling.memory_rows()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of which `memory_rows` has the bytes."""
        yield from self.frozen.state_tensors()
        for bucket in self.buckets:
            yield from bucket.state_tensors()
        for replicas in self._replicas:
            yield from replicas.state_tensors()
        if self.fsdp is not None:
            yield from self.fsdp.state_tensors()
        if self._runtime.delayed_scaling is not None:
            yield from self._runtime.delayed_scaling.state_tensors()

    def local_shards(self) -> list[LocalShard]:
        """Return all that a checkpoint holds of parameters and optimizer state, by global name.

        8-bit moments are copies in bf16.
        """
        states = [shard for stored in self._store_states() for shard in stored.shards]
        return [*self._scalar_shards(), *states]

    def load(
        self, others: Sequence[LocalShard], load: Callable[[Sequence[LocalShard]], None]
    ) -> None:
        """Have `load` read the shards of a checkpoint, `others` with those of the optimizer."""
        states = self._store_states()
        shards = [shard for stored in states for shard in stored.shards]
        load([*self._scalar_shards(), *shards, *others])
        for stored in states:
            stored.take()

    def _store_states(self) -> list[StoredStates]:
        return [stored for holder in self._state_holders for stored in holder.stored_states()]

    def _scalar_shards(self) -> list[LocalShard]:
        return [whole_shard("optim/updates", self._updates), *self._loss_scaler.local_shards()]

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in the weight buffers."""
        if self.fsdp is not None and self.fsdp.is_weight(tensor):
            return True
        if self.frozen.is_weight(tensor):
            return True
        if any(replicas.is_weight(tensor) for replicas in self._replicas):
            return True
        return any(storage_id(bucket.weights) == storage_id(tensor) for bucket in self.buckets)


def _cut_pieces(
    states: OptimizerStates, owned: OwnedRange, gradients: torch.Tensor
) -> Iterator[UpdatePiece]:
    for block, moments in split_ranges([owned]):
        yield UpdatePiece(
            name=owned.parameter.name,
            has_weight_decay=owned.parameter.has_weight_decay,
            on_host=states.on_host,
            master=states.master[block],
            exp_avg=states.exp_avg.read(moments),
            exp_avg_sq=states.exp_avg_sq.read(moments),
            gradient=gradients[block].float(),
            are_moments_exact=not (states.exp_avg.is_narrow or states.exp_avg_sq.is_narrow),
        )


def _gradient_group(runtime: Runtime, parameter: NamedParameter) -> str:
    """Return the name of the group over which a parameter's gradient is summed."""
    return gradient_group(parameter.placement.sharding, runtime.mesh.layout)


def _uses_fsdp(runtime: Runtime, parameter: NamedParameter) -> bool:
    return is_fsdp_sharded(runtime.mesh.layout, _gradient_group(runtime, parameter))


def _squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in fp64: in fp32 within a million elements, in fp64 over them.

    A whole pass in fp64 costs ten times as much. Nothing is read by the host.
    """
    norms = foreach_norm(flat.split(_NORM_ELEMENTS), torch.float32)
    return torch.stack(norms).double().square().sum()
