"""The routed experts of a layer, those of this rank and replicas of others.

Shapes: R routed rows, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moewright.engine.model.activations import build_activation
from moewright.engine.model.biases import AddExpertBias
from moewright.engine.model.layers import Vector, Weight
from moewright.engine.model.parallel_linear import GroupedLinear
from moewright.engine.model.replicas import ExpertReplicas
from moewright.engine.runtime import Runtime
from moewright.rules.expert_placement import plan_replica_exchange, rank_experts
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module


class RoutedExperts(nn.Module):
    """The routed experts, or the part of each, that this rank holds: rows [R,H] sorted by slot,
    weights [R] -> weighted outputs [R,H], to be summed over ETP. `slots` has the expert of every
    slot of all ranks. Replicas, in the last slots here, are no parameters: they are as the
    parameters of another rank.
    """

    ledger_module = Module.EXPERTS

    def __init__(self, run: Runtime, experts: int, width: int, slots: tuple[int, ...]) -> None:
        super().__init__()
        self._run, ep = run, run.mesh.group("ep")
        spare = (len(slots) - experts) // ep.size
        self._own = experts // ep.size
        contiguous = slots == tuple(range(experts))
        held = () if contiguous else tuple(rank_experts(slots, ep.size, ep.index)[: self._own])
        hidden = run.model.expert_width
        self.gate_up = Weight(
            run, experts, 2, width, hidden, sharding=(("ep", 0), ("etp", 2)), row_indices=held
        )
        self.down = Weight(
            run, experts, hidden, width, sharding=(("ep", 0), ("etp", 2)), row_indices=held
        )
        self._activate = build_activation(run.model, run.kernels)
        if run.model.moe is not None and run.model.moe.expert_bias:
            self.gate_up.bias = Vector(
                run, experts, 2, width, sharding=(("ep", 0), ("etp", 2)), row_indices=held
            )
            # Outputs are summed over ETP: each rank adds its part of the bias.
            self.down.bias = Vector(
                run, experts, hidden, sharding=(("ep", 0), ("etp", 1)), row_indices=held
            )
        self.replicas: ExpertReplicas | None = None
        if spare:
            weights = (self.gate_up, self.down)
            parts = (*weights, *(part.bias for part in weights if part.bias is not None))
            self.replicas = ExpertReplicas(
                run, parts, plan_replica_exchange(slots, ep.size, ep.index, spare), spare
            )

    def forward(
        self, rows_RH: torch.Tensor, weights_R: torch.Tensor, ends_E: torch.Tensor
    ) -> torch.Tensor:
        if self.replicas is None:
            return self._made(rows_RH, weights_R, ends_E, _weight)
        last = int(
            ends_E[self._own - 1]
        )  # the host waits: rows of replicas are products of their own
        made = (
            self._made(rows_RH[:last], weights_R[:last], ends_E[: self._own], _weight),
            self._made(
                rows_RH[last:],
                weights_R[last:],
                ends_E[self._own :] - last,
                self.replicas.weight_of,
            ),
        )
        return torch.cat(made)

    def _made(
        self,
        rows_RH: torch.Tensor,
        weights_R: torch.Tensor,
        ends_E: torch.Tensor,
        take: Callable[[Weight], torch.Tensor],
    ) -> torch.Tensor:
        run, keeper, bias = self._run, self._run.saved_tensors, self.down.bias
        with keeper.offload(rows_RH, enabled=run.offloads(Offload.EXPERT_FC1)):
            hidden = GroupedLinear.apply(
                rows_RH, take(self.gate_up).flatten(1, 2), ends_E, run.counters
            )
            if self.gate_up.bias is not None:
                hidden = AddExpertBias.apply(
                    hidden, take(self.gate_up.bias).flatten(1, 2), None, ends_E, 0
                )
        with keeper.offload(hidden, enabled=run.offloads(Offload.MOE_ACT)):
            active = self._activate(hidden, weights_R)
            with keeper.discard_and_recompute(
                active, self._activate, hidden, weights_R, enabled=run.recomputes(Recompute.MOE_ACT)
            ):
                out = GroupedLinear.apply(active, take(self.down), ends_E, run.counters)
        if bias is None:
            return out
        return AddExpertBias.apply(out, take(bias), weights_R, ends_E, bias.placement.offsets[1])


def _weight(part: Weight) -> torch.Tensor:
    return part.weight
