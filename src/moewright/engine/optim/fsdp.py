"""ZeRO-3: weights, gradients and optimizer state cut over the ranks by torch's fully_shard
(docs/adr/0008).

The cut weights are the fp32 master; a unit is gathered in the compute dtype for its forward and
again for its backward, and its gradients are summed and cut in fp32 after every micro-batch. Ranks
that hold the same part sum its gradient at the end of the step. Every byte goes through
engine.collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm.collectives import (
    Group,
    all_reduce,
    start_all_gather,
    start_reduce_scatter,
)
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.transformer import TransformerLayer
from moewright.engine.observe.counters import storage_id
from moewright.engine.optim.flat_buffers import OwnedRange, build_local_shards, split_by_module
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.rules.fsdp import FsdpGroups, fsdp_groups
from moewright.rules.shards import gradient_group
from moewright.spec.layout import Layout, Offload
from moewright.spec.ledger import Component, MemoryRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """This rank's rows of one parameter and their optimizer state, flat; the ranks of `copies` hold
    the same."""

    slot: NamedParameter
    parameter: nn.Parameter  # a DTensor
    replica_group: Group
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    owned: tuple[OwnedRange, ...]

    def gradient(self) -> torch.Tensor:
        """Summed over the group; a parameter that no micro-batch used has a zero gradient."""
        grad = self.parameter.grad
        return torch.zeros_like(self.master) if grad is None else _local_tensor(grad).view(-1)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpParams:
    """All parameters of this rank that fully_shard cuts, by the unit that moves them, and the
    module at the root."""

    root: FSDPModule
    units: tuple[tuple[ShardedParameter, ...], ...]
    device: torch.device
    on_host: bool  # cut weights, gradients and moments live in host memory

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        return tuple(each for unit in self.units for each in unit)

    def begin_step(self) -> None:
        """Forget the gradients of the last step; an evaluation may have left the root gathered."""
        self.root.reshard()
        for each in self.parameters:
            each.parameter.grad = None

    def reduce_gradients(self) -> list[torch.Tensor]:
        """The gradients of `parameters`, summed over the ranks that hold the same parts: a call a
        unit and group."""
        found = []
        for unit in self.units:
            gradients = [each.gradient() for each in unit]
            for copies in {each.replica_group.name: each.replica_group for each in unit}.values():
                parts = [
                    grad
                    for each, grad in zip(unit, gradients, strict=True)
                    if each.replica_group is copies
                ]
                if copies.size > 1 and any(len(part) for part in parts):
                    summed = all_reduce(torch.cat(parts).to(self.device), copies)
                    for part, total in zip(
                        parts, summed.split([len(part) for part in parts]), strict=True
                    ):
                        part.copy_(total)
            found += gradients
        return found

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a gathered weight."""
        weights = (each.slot.owner.weight for each in self.parameters)
        return any(
            not isinstance(w, DTensor) and storage_id(w) == storage_id(tensor) for w in weights
        )

    def memory_rows(self) -> list[MemoryRow]:
        """Bytes of the cut tensors; a part's room that holds no row is OTHER."""
        rows: list[MemoryRow] = []
        for each in self.parameters:
            owned = [(each.slot.module, each.master.numel())]
            room = _local_tensor(each.parameter).untyped_storage().nbytes()
            rows += split_by_module(self._component(Component.MASTER), each.master, owned, room)
            for moment in (each.exp_avg, each.exp_avg_sq):
                rows += split_by_module(
                    self._component(Component.MOMENTS), moment, owned, moment.nbytes
                )
        grads = [
            (each.slot.module, _local_tensor(grad))
            for each in self.parameters
            if (grad := each.parameter.grad) is not None
        ]
        storages = {storage_id(grad): grad.untyped_storage().nbytes() for _, grad in grads}
        if grads:
            spans = [(module, grad.numel()) for module, grad in grads]
            rows += split_by_module(
                self._component(Component.GRADIENTS), grads[0][1], spans, sum(storages.values())
            )
        return rows

    def _component(self, component: Component) -> Component:
        return Component.HOST if self.on_host else component


class _FsdpAllGather(AllGather):
    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        flight = start_all_gather(output_tensor, input_tensor, self._group)
        if async_op:
            return flight.work
        flight.wait()
        return None


class _FsdpReduceScatter(ReduceScatter):
    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        flight = start_reduce_scatter(output_tensor, input_tensor, self._group)
        if async_op:
            return flight.work
        flight.wait()
        return None


def apply_fsdp(
    run: Runtime,
    model: nn.Module,
    slots: Sequence[NamedParameter],
    initial: Callable[[NamedParameter], torch.Tensor],
) -> FsdpParams:
    """Cut the parameters at `slots` (rules.fully); all others of the model are left alone."""
    layout = run.mesh.layout
    for slot in slots:
        slot.owner.weight = nn.Parameter(initial(slot).to(run.device, torch.float32))
    places = {slot.parameter: slot for slot in slots}
    policy = MixedPrecisionPolicy(
        param_dtype=run.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    on_host = Offload.OPTIMIZER in layout.offload
    offload = CPUOffloadPolicy(pin_memory=run.device.type == "cuda") if on_host else OffloadPolicy()
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    units, meshes = [], dict[str, DeviceMesh]()
    for module in (*experts, *layers, model):
        mine = [places.pop(parameter) for parameter in module.parameters() if parameter in places]
        if not mine and module is not model:
            continue
        # A root without parameters of its own moves nothing, but sees the units below it through a
        # step.
        group = run.mesh.group(_weight_spread(layout, (mine or slots)[0]).shard_group)
        if group.name not in meshes:
            meshes[group.name] = _build_device_mesh(group, run.device)
        own = {slot.parameter for slot in mine}
        fully_shard(
            module,
            mesh=meshes[group.name],
            reshard_after_forward=module is not model,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params={parameter for parameter in module.parameters() if parameter not in own},
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_FsdpAllGather(group))
        module.set_custom_reduce_scatter(_FsdpReduceScatter(group))
        units.append(tuple(_build_sharded_parameter(run, slot, group) for slot in mine))
    assert isinstance(model, FSDPModule)
    return FsdpParams(root=model, units=tuple(units), device=run.device, on_host=on_host)


def _build_device_mesh(group: Group, device: torch.device) -> DeviceMesh:
    """torch's view of a group. It computes with rank numbers, which a dry run must not take for
    tensors of the job."""
    assert group.handle is not None  # something is cut over it
    with _disable_current_modes():
        return DeviceMesh.from_group(group.handle, device.type)


def _weight_spread(layout: Layout, slot: NamedParameter) -> FsdpGroups:
    return fsdp_groups(layout, gradient_group(slot.placement.sharding, layout))


def _build_sharded_parameter(run: Runtime, slot: NamedParameter, group: Group) -> ShardedParameter:
    local = _local_tensor(slot.parameter)
    moment_dtype = torch_dtype(run.workload.optimizer.moment_dtype)
    rows, width = (
        slot.parameter.shape[0],
        slot.parameter[0].numel() if slot.parameter.dim() > 1 else 1,
    )
    first = min(rows, group.index * -(-rows // group.size)) * width
    return ShardedParameter(
        slot=slot,
        parameter=slot.parameter,
        replica_group=run.mesh.group(_weight_spread(run.mesh.layout, slot).replica_group),
        master=local.view(-1),
        exp_avg=torch.zeros(local.numel(), dtype=moment_dtype, device=local.device),
        exp_avg_sq=torch.zeros(local.numel(), dtype=moment_dtype, device=local.device),
        owned=(OwnedRange(slot=slot, first=first, last=first + local.numel(), start=0),),
    )


@torch.no_grad()
def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local: torch.Tensor = tensor.to_local()
    return local.detach()
