"""The Mixture-of-Experts layer: router, one selection, dispatch, experts, combine.

One selection feeds dispatch, auxiliary losses and statistics, so they cannot disagree.
Shapes: T tokens of this rank, E experts in all, k experts a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from moewright.engine.dispatch import interface
from moewright.engine.dispatch.allgather import AllGatherDispatcher
from moewright.engine.dispatch.alltoall import AllToAllDispatcher
from moewright.engine.dispatch.alltoall_padded import PaddedAllToAllDispatcher
from moewright.engine.dispatch.dedup import DedupDispatcher
from moewright.engine.dispatch.deepep import DeepEpDispatcher
from moewright.engine.memory.saved_tensors import RoutingDecisions, run_checkpointed
from moewright.engine.model.autograd import count_ids
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.layers import Mlp, Weight
from moewright.engine.model.parallel_linear import ReplicatedLinear
from moewright.engine.model.router import ExpertSelection, Router
from moewright.engine.runtime import Runtime
from moewright.rules.capacity import capacity_rows
from moewright.rules.expert_placement import rank_slots, slot_experts
from moewright.rules.micro_batches import micro_batch_tokens
from moewright.rules.routing import (
    RoundRobinCounts,
    dispatch_nodes,
    drops_by_probability,
    round_robin_counts,
)
from moewright.spec.layout import CapacityFill, DispatcherKind, ExpertPlacement, Overlap, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import MoeSpec
from moewright.spec.workload import RouterForce


class SharedExperts(Mlp):
    """The experts that every token passes, as one MLP, scaled by a gate of its own where the model
    has one."""

    def __init__(self, run: Runtime, spec: MoeSpec) -> None:
        super().__init__(run, spec.shared_ffn_size, Module.SHARED_EXPERTS)
        if spec.shared_gate:
            self.gate = Weight(run, 1, run.model.hidden_size)
        self._gated = spec.shared_gate

    def _second(self, x_tH: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        out_tH = super()._second(x_tH, active)
        if not self._gated:
            return out_tH
        return out_tH * torch.sigmoid(
            ReplicatedLinear.apply(x_tH, self.gate.weight, self._run.counters)
        )

    def split(self, x_tH: torch.Tensor) -> SplitSharedExperts:
        """The same in two parts, each to be run when there is time for it."""
        return SplitSharedExperts(
            self._run, partial(self._first, x_tH), partial(self._second, x_tH)
        )


class SplitSharedExperts:
    """What shared experts make of their input, by two calls: `first`, `second`; then `out` has
    it."""

    def __init__(
        self,
        run: Runtime,
        first: Callable[[], torch.Tensor],
        second: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._books, self._first, self._second = run.counters, first, second
        self._made: list[torch.Tensor] = []

    def run_first(self) -> None:
        with self._books.attribute_to(Module.SHARED_EXPERTS):
            self._made.append(self._first())

    def run_second(self) -> None:
        with self._books.attribute_to(Module.SHARED_EXPERTS):
            self._made.append(self._second(self._made.pop()))

    def output(self) -> torch.Tensor:
        return self._made.pop()


class SlotAssigner:
    """Where experts are, and where rows go: an expert in several slots has its rows dealt to them
    (rules.placement)."""

    def __init__(self, run: Runtime, slots: Sequence[int], experts: int) -> None:
        places = [
            [slot for slot, one in enumerate(slots) if one == expert] for expert in range(experts)
        ]
        most = max(map(len, places))
        # By expert, and of E, which stands for none.
        self._places = torch.tensor(
            [of + of[:1] * (most - len(of)) for of in places] + [[len(slots)] * most]
        )
        self._places = self._places.to(run.device)
        self._count = torch.tensor([*map(len, places), 1], device=run.device)
        self._expert = torch.tensor(slots, device=run.device)
        self._experts, self._first = experts, run.mesh.coordinate("ep")

    def assign(self, experts_Tk: torch.Tensor) -> torch.Tensor:
        """The slot of each chosen expert."""
        if self._places.shape[1] == 1:
            return self._places[experts_Tk, 0]
        flat = experts_Tk.flatten()
        counts, order = count_ids(flat, self._experts + 1), flat.argsort(stable=True)
        starts = (counts.cumsum(0) - counts)[flat[order]]
        turn = torch.empty_like(order)
        turn[order] = (
            torch.arange(len(order), device=order.device) - starts
        )  # of its expert's rows the how-manieth
        return self._places[flat, (turn + self._first) % self._count[flat]].view_as(experts_Tk)

    def sum_by_expert(self, sent: torch.Tensor) -> torch.Tensor:
        """Rows sent to each slot, and what follows them, with rows to each expert instead."""
        rows, copies = sent.split((len(self._expert), len(sent) - len(self._expert)))
        return torch.cat(
            (rows.new_zeros(self._experts).scatter_add_(0, self._expert, rows), copies)
        )


class LatentProjection(torch.nn.Module):
    """The projections into the space that the routed experts work in, and back: [T,H] -> [T,L] ->
    [T,H], each rank its own tokens.
    """

    ledger_module = Module.EXPERTS

    def __init__(self, run: Runtime, spec: MoeSpec) -> None:
        super().__init__()
        self._books = run.counters
        self.down = Weight(run, spec.latent_size, run.model.hidden_size)
        self.up = Weight(run, run.model.hidden_size, spec.latent_size)

    def project_down(self, x_TH: torch.Tensor) -> torch.Tensor:
        return ReplicatedLinear.apply(x_TH, self.down.weight, self._books)

    def project_up(self, x_TL: torch.Tensor) -> torch.Tensor:
        return ReplicatedLinear.apply(x_TL, self.up.weight, self._books)


class MoeLayer(torch.nn.Module):
    """[T,H] -> [T,H], with the auxiliary losses (as a Router returns them) and what this rank sent
    (see the seam)."""

    def __init__(self, run: Runtime, number: int) -> None:
        super().__init__()
        spec = run.model.moe
        if spec is None:
            raise ValueError("a MoE layer needs model.moe")
        self._run, self._spec = run, spec
        self.router = Router(run, spec.experts, number)
        slots = slot_experts(run.model, run.workload, run.mesh.layout, number)
        self._slots = (
            None if slots == tuple(range(spec.experts)) else SlotAssigner(run, slots, spec.experts)
        )
        self.latent = LatentProjection(run, spec) if spec.latent_size else None
        self.experts = RoutedExperts(run, spec.experts, spec.ffn_size, slots)
        self.shared = SharedExperts(run, spec) if spec.shared_ffn_size else None
        self._dispatcher = _dispatcher(run, spec, len(slots))
        self._beside = (
            Overlap.SHARED in run.mesh.layout.overlap
        )  # shared experts run while rows travel

    def forward(
        self, x_TH: torch.Tensor, decided: RoutingDecisions | None, first: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`decided`: of the replayed block that this is part of, None outside of one. `first` as in
        Sequences."""
        if self._run.recomputes(Recompute.MOE):
            with self._run.counters.attribute_to(Module.ROUTER):
                return run_checkpointed(
                    self._run.counters, partial(self._block, RoutingDecisions(), first), x_TH
                )
        return self._block(decided, first, x_TH)

    def _block(
        self, decided: RoutingDecisions | None, first: int | None, x_TH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        books = self._run.counters
        with books.attribute_to(Module.ROUTER):
            selected, aux = self.router(x_TH, decided, first)
        with books.attribute_to(Module.EXPERTS):
            experts_Tk = self._kept(selected)
            slots_Tk = experts_Tk if self._slots is None else self._slots.assign(experts_Tk)
            halves = self.shared.split(x_TH) if self.shared is not None and self._beside else None
            out, sent = self._routed(x_TH, slots_Tk, selected.weights.float(), halves)
        if halves is not None:
            out = out + halves.output()
        elif self.shared is not None:
            out = out + self.shared(x_TH)
        return out, aux, sent if self._slots is None else self._slots.sum_by_expert(sent)

    @torch.no_grad()
    def _kept(self, selected: ExpertSelection) -> torch.Tensor:
        """The ids [T,k], E where capacity leaves no room. Dropped weights are not made up for by
        the others."""
        layout, (tokens, top_k) = self._run.mesh.layout, selected.experts.shape
        if not layout.capacity:
            return selected.experts
        rows = capacity_rows(tokens, top_k, self._spec.experts, layout.capacity)
        return selected.drop_over_capacity(rows, self._run.workload.router.drop_policy)

    def _routed(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        beside: SplitSharedExperts | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`beside` runs while rows go to their experts, and while they return."""
        there, back = (beside.run_first, beside.run_second) if beside else (None, None)
        way, latent = self._dispatcher, self.latent
        rows = x_TH if latent is None else latent.project_down(x_TH)
        routed, route = way.preprocess(rows, experts_Tk, weights_Tk)
        routed = way.postprocess(way.dispatch(routed, route, there), route)
        rows = self.experts(routed.rows, routed.weights, route.ends)
        rows = way.combine(way.combine_preprocess(rows, route), route, back)
        out = way.combine_postprocess(rows, route)
        return (out if latent is None else latent.project_up(out)), route.sent


def _dispatcher(run: Runtime, spec: MoeSpec, experts: int) -> interface.TokenDispatcher:
    """That of a layer with so many slots for experts."""
    layout, mesh = run.mesh.layout, run.mesh
    known = _known(run, spec)
    if layout.dispatcher is DispatcherKind.ALL_GATHER:
        here = range(experts)[rank_slots(range(experts), layout.ep, mesh.coordinate("ep"))]
        return AllGatherDispatcher(
            mesh.group("etp_ep"), experts, run.kernels, local_experts=here, forced_counts=known
        )
    if run.dispatch_library is not None:
        return DeepEpDispatcher(run.dispatch_library, experts, run.kernels)
    if layout.dispatcher is DispatcherKind.DEDUP:
        ways = ("ep_far", "ep_near") if layout.ep_node else ("ep",)
        return DedupDispatcher(
            [mesh.group(way) for way in ways],
            mesh.group("etp"),
            experts,
            run.kernels,
            forced_counts=known,
        )
    if layout.capacity_fill is CapacityFill.PADDED:
        room = capacity_rows(
            micro_batch_tokens(run.workload, layout), spec.router.top_k, experts, layout.capacity
        )
        return PaddedAllToAllDispatcher(
            mesh.group("ep"), mesh.group("etp"), experts, run.kernels, capacity=room
        )
    return AllToAllDispatcher(
        mesh.group("ep"),
        mesh.group("etp"),
        experts,
        run.kernels,
        forced_counts=known,
        may_drop=layout.capacity > 0,
    )


def _known(run: Runtime, spec: MoeSpec) -> interface.ForcedCounts | None:
    """What is sent where experts are taken in turn and lie so, unless it hangs on which rows a
    capacity drops."""
    layout, training = run.mesh.layout, run.workload.router
    placed = layout.expert_placement is not ExpertPlacement.CONTIGUOUS
    if (
        training.force is not RouterForce.BALANCED
        or placed
        or drops_by_probability(layout, training)
    ):
        return None

    def known(tokens: int, top_k: int) -> RoundRobinCounts:
        most = capacity_rows(tokens, top_k, spec.experts, layout.capacity)
        return round_robin_counts(
            tokens, top_k, spec.experts, most=most, ranks=layout.ep, nodes=dispatch_nodes(layout)
        )

    return known
