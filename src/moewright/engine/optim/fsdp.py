"""ZeRO-2 and ZeRO-3: states sharded by torch's fully_shard (docs/adr/0008).

The sharded weights are the fp32 master. A unit is gathered in the compute dtype for its forward and
again for its backward; with ZeRO-2 all units stay gathered, and are gathered anew after an update.
Gradients are summed and sharded in grad_dtype after every micro-batch, and these sums are added in
fp32. Ranks that hold the same shard sum its gradient at the end of the step. Every byte goes
through engine.comm.collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from moewright.engine.comm.collectives import (
    Group,
    all_reduce,
    start_all_gather,
    start_reduce_scatter,
)
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.layer import TransformerLayer
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.transformer import Transformer
from moewright.engine.optim.moments import Moment
from moewright.engine.optim.optimizer_states import (
    OwnedRange,
    StoredStates,
    build_moments,
    split_by_module,
    split_moment_by_module,
    state_tensors,
    store_states,
    uses_muon,
)
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.engine.torch_private import (
    AllGather,
    ReduceScatter,
    disable_modes,
    has_fake_mode,
    keep_shards,
    storage_id,
)
from moewright.rules.shapes.fsdp import FsdpGroups, fsdp_groups, fsdp_units, offloaded_names
from moewright.rules.shapes.shards import gradient_group, holding_pp_ranks
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow

NoteGradient = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """This rank's rows of one parameter and their optimizer state, flat.

    The ranks of `replica_group` hold the same rows, and so do the pipeline ranks of `holder_group`
    where several hold the parameter.
    """

    named: NamedParameter
    parameter: nn.Parameter  # a DTensor
    on_host: bool  # rows, gradients and moments live in host memory
    replica_group: Group
    holder_group: Group | None
    master: torch.Tensor
    exp_avg: Moment
    exp_avg_sq: Moment
    momentum: torch.Tensor
    owned: tuple[OwnedRange, ...]

    @property
    def first(self) -> int:
        return 0

    @property
    def shard_slice(self) -> slice:
        return slice(0, self.master.numel())

    @property
    def segments(self) -> tuple[ShardedParameter, ...]:
        """The state of the rows, all of it in one memory."""
        return (self,)

    @property
    def replica_count(self) -> int:
        """How many ranks of the world hold the same rows."""
        return self.replica_group.size * (self.holder_group.size if self.holder_group else 1)

    def gradient(self) -> torch.Tensor:
        """Return the gradient, which is zero for a parameter that no micro-batch used."""
        grad = self.parameter.grad
        return torch.zeros_like(self.master) if grad is None else _local_tensor(grad).view(-1)

    def stored_states(self) -> list[StoredStates]:
        """Return the master copy and the moments as checkpoints hold them."""
        return [store_states(self)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpParams:
    """All parameters of this rank that fully_shard shards, by the unit that moves them.

    With `stays_gathered` (ZeRO-2) whole weights stay from one update to the next.
    """

    root: FSDPModule
    modules: tuple[FSDPModule, ...]  # of the units, in their order
    stays_gathered: bool
    units: tuple[tuple[ShardedParameter, ...], ...]
    device: torch.device

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        return tuple(parameter for unit in self.units for parameter in unit)

    def begin_step(self) -> None:
        """Forget the gradients of the last step; an evaluation may have left the root gathered."""
        if not self.stays_gathered:
            self.root.reshard()
        for parameter in self.parameters:
            parameter.parameter.grad = None

    @contextmanager
    def gather_all(self) -> Iterator[None]:
        """Have the whole weights of all units inside; every rank calls this."""
        if not self.stays_gathered:
            for module in self.modules:
                module.unshard()
        try:
            yield
        finally:
            if not self.stays_gathered:
                for module in self.modules:
                    module.reshard()

    @contextmanager
    def watch_gradients(self, note: NoteGradient) -> Iterator[None]:
        """Call `note` with each gradient of whole weights, before it is scattered."""
        with self.gather_all():
            # Hooks of the whole weights, which are those of the modules while units are gathered.
            handles = [
                parameter.named.owner.weight.register_post_accumulate_grad_hook(
                    _build_watch(note, parameter.named.name)
                )
                for parameter in self.parameters
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def all_gather_params(self) -> None:
        """Bring updated weights to every rank where they stay gathered, unit by unit."""
        if self.stays_gathered:
            for module in self.modules:
                # A unit that is gathered would not be gathered again.
                module.reshard()
                module.unshard()

    def reduce_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of `parameters`, summed over the ranks that hold the same rows.

        There is a call for each unit and replica group, and for each parameter that several
        pipeline ranks hold.
        """
        gradients = []
        for unit in self.units:
            unit_gradients = [parameter.gradient() for parameter in unit]
            groups = {parameter.replica_group.name: parameter.replica_group for parameter in unit}
            for group in groups.values():
                members = [
                    gradient
                    for parameter, gradient in zip(unit, unit_gradients, strict=True)
                    if parameter.replica_group is group
                ]
                self._sum_over(group, members)
            for parameter, gradient in zip(unit, unit_gradients, strict=True):
                if parameter.holder_group is not None:
                    self._sum_over(parameter.holder_group, [gradient])
            gradients += unit_gradients
        return gradients

    def _sum_over(self, group: Group, gradients: Sequence[torch.Tensor]) -> None:
        """Sum gradients over a group, in place, in one call."""
        if group.size == 1 or not any(len(gradient) for gradient in gradients):
            return
        # Gradients of offloaded units lie in host memory.
        total = all_reduce(torch.cat(list(gradients)).to(self.device), group)
        sums = total.split([len(gradient) for gradient in gradients])
        for gradient, gradient_sum in zip(gradients, sums, strict=True):
            gradient.copy_(gradient_sum)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a gathered weight."""
        weights = (parameter.named.owner.weight for parameter in self.parameters)
        return any(
            not isinstance(weight, DTensor) and storage_id(weight) == storage_id(tensor)
            for weight in weights
        )

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of which `memory_rows` has the bytes."""
        for parameter in self.parameters:
            if self.stays_gathered:
                yield parameter.named.owner.weight
            yield _local_tensor(parameter.parameter)
            if parameter.parameter.grad is not None:
                yield _local_tensor(parameter.parameter.grad)
            yield from state_tensors(parameter)

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of the sharded tensors, and of whole weights that stay beside them.

        Storage that holds no row is OTHER.
        """
        rows: list[MemoryRow] = []
        for parameter in self.parameters:
            weight = parameter.named.owner.weight
            if self.stays_gathered:
                whole_spans = [(parameter.named.module, weight.numel())]
                rows += split_by_module(Component.WEIGHTS, weight, whole_spans)
            spans = [(parameter.named.module, parameter.master.numel())]
            storage_bytes = _local_tensor(parameter.parameter).untyped_storage().nbytes()
            on_host = parameter.on_host
            master = Component.MASTER.placed(on_host=on_host)
            rows += split_by_module(master, parameter.master, spans, storage_bytes)
            moments = Component.MOMENTS.placed(on_host=on_host)
            momentum_spans = [(parameter.named.module, parameter.momentum.numel())]
            rows += split_by_module(moments, parameter.momentum, momentum_spans)
            for moment in (parameter.exp_avg, parameter.exp_avg_sq):
                moment_spans = [(parameter.named.module, len(moment.tensors[0]))]
                rows += split_moment_by_module(moments, moment, moment_spans)
        for on_host in (False, True):
            grads = [
                (parameter.named.module, _local_tensor(parameter.parameter.grad))
                for parameter in self.parameters
                if parameter.on_host == on_host and parameter.parameter.grad is not None
            ]
            if grads:
                spans = [(module, grad.numel()) for module, grad in grads]
                storages = {storage_id(grad): grad.untyped_storage().nbytes() for _, grad in grads}
                _, like = grads[0]
                component = Component.GRADIENTS.placed(on_host=on_host)
                rows += split_by_module(component, like, spans, sum(storages.values()))
        return rows


def _build_watch(note: NoteGradient, name: str) -> Callable[[torch.Tensor], None]:
    def watch(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            note(name, weight.grad)

    return watch


class _CountedCollective:
    """What both collectives of fully_shard ask of theirs: a group that counts, and its buffers."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _FsdpAllGather(_CountedCollective, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        with self._group.tape.pause():  # weights are no part of a micro-batch
            pending = start_all_gather(output_tensor, input_tensor, self._group)
        if async_op:
            return pending.work
        pending.wait()
        return None


class _FsdpReduceScatter(_CountedCollective, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with self._group.tape.pause():
            pending = start_reduce_scatter(output_tensor, input_tensor, self._group)
        if async_op:
            return pending.work
        pending.wait()
        return None


def apply_fsdp(
    runtime: Runtime,
    model: nn.Module,
    parameters: Sequence[NamedParameter],
    initial_value: Callable[[NamedParameter], torch.Tensor],
) -> FsdpParams:
    """Shard `parameters` (rules.shapes.fsdp); all others of the model are left alone."""
    layout = runtime.mesh.layout
    device = runtime.device
    stays_gathered = layout.zero == 2
    for parameter in parameters:
        value = initial_value(parameter).to(device, torch.float32)
        parameter.owner.weight = nn.Parameter(value)
    offloaded = offloaded_names(layout, fsdp_units(runtime.model, layout, runtime.mesh.rank))
    mp_policy = MixedPrecisionPolicy(
        param_dtype=runtime.dtype,
        reduce_dtype=torch_dtype(runtime.workload.grad_dtype),
        cast_forward_inputs=False,
    )
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    remaining = {parameter.parameter: parameter for parameter in parameters}
    units: list[list[tuple[NamedParameter, nn.Parameter, Group]]] = []
    unit_modules = []
    meshes: dict[str, DeviceMesh] = {}
    # From the inside out: a unit takes what those within it have left.
    for module in (*experts, *layers, model):
        members = [remaining.pop(weight) for weight in module.parameters() if weight in remaining]
        # A root without parameters of its own moves nothing, but follows the units below it through
        # a step.
        if not members and module is not model:
            continue
        first = next(iter(members or parameters))
        group = runtime.mesh.group(_find_groups(layout, first).shard_group)
        if group.name not in meshes:
            meshes[group.name] = _build_device_mesh(group, device)
        weights = {parameter.parameter for parameter in members}
        fully_shard(
            module,
            mesh=meshes[group.name],
            reshard_after_forward=module is not model and not stays_gathered,
            mp_policy=mp_policy,
            offload_policy=_offload_policy(device) if first.name in offloaded else OffloadPolicy(),
            # fully_shard would take all parameters below, those of flat buffers too.
            ignored_params={weight for weight in module.parameters() if weight not in weights},
        )
        assert isinstance(module, FSDPModule)
        if has_fake_mode():
            keep_shards(module)
        module.set_reshard_after_backward(not stays_gathered, recurse=False)
        # The loss is divided already, and gloo has no sum with a factor: a plain sum in any world.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_FsdpAllGather(group))
        module.set_custom_reduce_scatter(_FsdpReduceScatter(group))
        units.append([(parameter, parameter.parameter, group) for parameter in members])
        unit_modules.append(module)
    assert isinstance(model, FSDPModule)
    if layout.vpp > 1 and not stays_gathered:
        assert isinstance(model, Transformer)
        _prefetch_within_chunks(model)
    if stays_gathered:
        # The first gather may pad a shard in memory of its own: what it leaves is the master.
        for module in unit_modules:
            module.unshard()
    return FsdpParams(
        root=model,
        modules=tuple(unit_modules),
        stays_gathered=stays_gathered,
        units=tuple(
            tuple(
                _build_sharded_parameter(
                    runtime, named, tensor, group, on_host=named.name in offloaded
                )
                for named, tensor, group in unit
            )
            for unit in units
        ),
        device=device,
    )


def _prefetch_within_chunks(model: Transformer) -> None:
    """Let the backward of a layer gather the layer before it in its chunk.

    By itself it gathers what ran before it in a forward, which may be another chunk's. A unit that
    is told to gather itself, which is done, gathers nothing: experts wait for their own backward,
    because a layer's hook comes once more with the gradient of its balance losses, when its experts
    may be done.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])
    for layers in model.chunk_layers():
        units = [layer for layer in reversed(layers) if isinstance(layer, FSDPModule)]
        for unit, following in pairwise(units):
            unit.set_modules_to_backward_prefetch([following])


def _build_device_mesh(group: Group, device: torch.device) -> DeviceMesh:
    """Build torch's view of a group.

    It computes with rank numbers, which a dry run must not take for tensors of the job.
    """
    assert group.handle is not None  # something is sharded over it
    with disable_modes():
        return DeviceMesh.from_group(group.handle, device.type)


def _find_groups(layout: Layout, parameter: NamedParameter) -> FsdpGroups:
    return fsdp_groups(layout, gradient_group(parameter.placement.sharding, layout))


def _build_sharded_parameter(
    runtime: Runtime,
    parameter: NamedParameter,
    tensor: nn.Parameter,
    group: Group,
    *,
    on_host: bool,
) -> ShardedParameter:
    """Build the state of a parameter whose sharded weight is `tensor`, a DTensor."""
    local = _local_tensor(tensor)
    rows, *row_shape = tensor.shape
    # Shards have ceil(rows / ranks) rows, so that the last ranks may have none.
    first_row = min(rows, group.index * -(-rows // group.size))
    first = first_row * prod(row_shape)
    has_momentum = uses_muon(runtime, parameter)
    owned = OwnedRange(
        parameter=parameter,
        first=first,
        last=first + local.numel(),
        start=0,
        moment_start=0,
        has_momentum=has_momentum,
    )
    moments_numel = 0 if has_momentum else local.numel()
    momentum_numel = local.numel() - moments_numel
    layout = runtime.mesh.layout
    replica_group = _find_groups(layout, parameter).replica_group
    holders = holding_pp_ranks(parameter.name, runtime.model, layout)
    exp_avg, exp_avg_sq = build_moments(runtime, moments_numel, local.device)
    return ShardedParameter(
        named=parameter,
        parameter=tensor,
        on_host=on_host,
        replica_group=runtime.mesh.group(replica_group),
        holder_group=runtime.mesh.shared_table_groups.get(holders),
        master=local.view(-1),
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        momentum=torch.zeros(momentum_numel, dtype=torch.float32, device=local.device),
        owned=(owned,),
    )


def _offload_policy(device: torch.device) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def is_fully_sharded(parameter: NamedParameter) -> bool:
    """Return whether fully_shard has cut a parameter."""
    return isinstance(parameter.parameter, DTensor)


def local_weight(parameter: NamedParameter) -> torch.Tensor:
    """Return this rank's part of a parameter, which fully_shard may have cut."""
    weight = parameter.parameter
    return weight.to_local() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local: torch.Tensor = tensor.to_local()
    return local.detach()
