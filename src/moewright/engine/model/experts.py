"""The routed experts of a layer: this rank's own experts and replicas of other ranks' experts.

Shapes: R routed rows, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from moewright.engine.kernels.delayed_scaling import DelayedScaling
from moewright.engine.kernels.products import Products
from moewright.engine.model.activations import ScaleRows, build_activation
from moewright.engine.model.adapters import add_grouped_adapter
from moewright.engine.model.biases import AddExpertBias
from moewright.engine.model.layers import Vector, Weight, list_parameters
from moewright.engine.model.parallel_linear import GroupedLinear
from moewright.engine.model.replicas import ExpertReplicas
from moewright.engine.runtime import Runtime
from moewright.rules.expert_placement import plan_replica_exchange, rank_experts
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module


class RoutedExperts(nn.Module):
    """The routed experts that this rank holds, whole or as ETP shards.

    Rows [R,H] sorted by slot, weights [R] -> weighted outputs [R,H], to be summed over ETP. `slots`
    gives the expert of every slot of all ranks. Replicas, in the last slots of this rank, are not
    parameters: they equal the parameters of another rank.
    """

    ledger_module = Module.EXPERTS

    def __init__(self, runtime: Runtime, experts: int, width: int, slots: tuple[int, ...]) -> None:
        super().__init__()
        ep_group = runtime.mesh.group("ep")
        ep, ep_rank = ep_group.size, ep_group.index
        hidden = runtime.model.expert_width
        self._runtime = runtime
        self._own_experts = experts // ep
        own = tuple(rank_experts(slots, ep, ep_rank)[: self._own_experts])
        row_indices = own if slots != tuple(range(experts)) else ()
        stacked = (experts, *runtime.model.fc1_stack)
        sharding = (("ep", 0), ("etp", len(stacked)))
        first = Weight(runtime, *stacked, width, hidden, sharding=sharding, row_indices=row_indices)
        self._first_name = runtime.model.fc1_name
        self.add_module(self._first_name, first)
        self.down = Weight(
            runtime,
            experts,
            hidden,
            width,
            sharding=(("ep", 0), ("etp", 2)),
            row_indices=row_indices,
        )
        self._activate = build_activation(runtime.model, runtime.kernels)
        moe = runtime.model.moe
        self._scales_input = moe is not None and moe.router.scales_input
        if moe is not None and moe.expert_bias:
            first.bias = Vector(
                runtime, *stacked, width, sharding=sharding, row_indices=row_indices
            )
            # Outputs are summed over ETP: each rank adds its part of the bias.
            bias_sharding = (("ep", 0), ("etp", 1))
            self.down.bias = Vector(
                runtime, experts, hidden, sharding=bias_sharding, row_indices=row_indices
            )
        self.replicas: ExpertReplicas | None = None
        spare = (len(slots) - experts) // ep
        if spare:
            exchange = plan_replica_exchange(slots, ep, ep_rank, spare)
            replicated = rank_experts(slots, ep, ep_rank)[self._own_experts :]
            self.replicas = ExpertReplicas(runtime, self.parts, exchange, tuple(replicated))

    def forward(
        self, rows_RH: torch.Tensor, weights_R: torch.Tensor, ends_E: torch.Tensor
    ) -> torch.Tensor:
        if self.replicas is None:
            return self._run_experts(rows_RH, weights_R, ends_E, None)
        own_ends = ends_E[: self._own_experts]
        # Replicas have products of their own, so the host must know where their rows begin.
        own_rows = int(own_ends[-1])
        # Both keep a part of the same storage, which goes to the host once.
        keeps_rows = self._runtime.offloads(Offload.EXPERT_FC1) and not self._scales_input
        with self._runtime.saved_tensors.offload(rows_RH, enabled=keeps_rows):
            own_out = self._run_experts(rows_RH[:own_rows], weights_R[:own_rows], own_ends, None)
            replica_out = self._run_experts(
                rows_RH[own_rows:],
                weights_R[own_rows:],
                ends_E[self._own_experts :] - own_rows,
                self.replicas,
            )
        return torch.cat((own_out, replica_out))

    @property
    def parts(self) -> tuple[Weight, ...]:
        """The weights and biases of the experts, each with a row for each of them."""
        weights = (self._first, self.down)
        return (*weights, *(part.bias for part in weights if part.bias is not None))

    def place(self, slots: tuple[int, ...]) -> None:
        """Let the rows of the weights be those of other experts: of all ranks, by slot."""
        group = self._runtime.mesh.group("ep")
        own = tuple(rank_experts(slots, group.size, group.index))
        for part in self.parts:
            part.placement = replace(part.placement, row_indices=own)

    @property
    def _first(self) -> Weight:
        weight = self.get_submodule(self._first_name)
        assert isinstance(weight, Weight)
        return weight

    def _run_experts(
        self,
        rows_RH: torch.Tensor,
        weights_R: torch.Tensor,
        ends_E: torch.Tensor,
        replicas: ExpertReplicas | None,
    ) -> torch.Tensor:
        """Run the rank's own experts, or its replicas."""
        take_weight = _own_weight if replicas is None else replicas.weight_of
        take_products = _own_products if replicas is None else replicas.products_of
        runtime = self._runtime
        manager = runtime.saved_tensors
        activate: Callable[..., torch.Tensor] = self._activate
        activation_weights: tuple[torch.Tensor, ...] = (weights_R,)
        if self._scales_input:
            rows_RH = ScaleRows.apply(rows_RH, weights_R)
            activate = self._activate_unweighted
            activation_weights = ()
        first = self._first
        first_products = take_products(first)
        down_products = take_products(self.down)
        with (
            manager.offload(rows_RH, enabled=runtime.offloads(Offload.EXPERT_FC1)),
            manager.keep_converted(rows_RH, first_products, ends_E),
        ):
            # Gate and up lie one after the other, so that one product computes both.
            weight = take_weight(first).flatten(1, -2)
            hidden = self._multiply(rows_RH, weight, ends_E, first_products)
            hidden = add_grouped_adapter(runtime, first, hidden, rows_RH, ends_E)
            if first.bias is not None:
                bias = take_weight(first.bias).flatten(1)
                hidden = AddExpertBias.apply(hidden, bias, None, ends_E, 0)
        with manager.offload(hidden, enabled=runtime.offloads(Offload.MOE_ACT)):
            active = activate(hidden, *activation_weights)
            with (
                manager.discard_and_recompute(
                    active,
                    activate,
                    hidden,
                    *activation_weights,
                    enabled=runtime.recomputes(Recompute.MOE_ACT),
                ),
                manager.keep_converted(active, down_products, ends_E),
            ):
                out = self._multiply(active, take_weight(self.down), ends_E, down_products)
                out = add_grouped_adapter(runtime, self.down, out, active, ends_E)
        if self.down.bias is None:
            return out
        first_column = self.down.bias.placement.offsets[1]
        bias = take_weight(self.down.bias)
        return AddExpertBias.apply(out, bias, weights_R, ends_E, first_column)

    def assign_replica_scales(self, scaling: DelayedScaling, names: Mapping[Weight, str]) -> None:
        """Take the delayed scales of this rank's replicas, by the names of their weights."""
        if self.replicas is not None:
            self.replicas.products = [
                scaling.products_of_replicas(names[part]) for part in self.replicas.parts
            ]

    def _activate_unweighted(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._activate(hidden, None)

    def _multiply(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        ends_E: torch.Tensor,
        products: Products,
    ) -> torch.Tensor:
        runtime = self._runtime
        return GroupedLinear.apply(
            rows, weight, ends_E, runtime.counters, products, runtime.weight_grads
        )


def assign_scales(model: nn.Module, scaling: DelayedScaling) -> None:
    """Give every weight of a model the products with its own delayed scales."""
    names: dict[Weight, str] = {}
    for parameter in list_parameters(model):
        owner = parameter.owner
        names[owner] = parameter.name
        owner.products = scaling.products_of(parameter.name)
    for experts in model.modules():
        if isinstance(experts, RoutedExperts):
            experts.assign_replica_scales(scaling, names)


def _own_weight(part: Weight) -> torch.Tensor:
    return part.weight


def _own_products(part: Weight) -> Products:
    return part.products
