"""The Mixture-of-Experts layer: router, one selection, dispatch, experts, combine.

One selection feeds dispatch, auxiliary losses and statistics, so they cannot disagree.
Shapes: T tokens of this rank, E experts in all, k experts a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from moewright.engine.comm.autograd_collectives import (
    all_to_all_beside,
    all_to_all_in_turn,
    all_to_all_overlapped,
)
from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.allgather import AllGatherDispatcher
from moewright.engine.dispatch.alltoall import AllToAllDispatcher
from moewright.engine.dispatch.alltoall_padded import (
    BudgetedAllToAllDispatcher,
    PaddedAllToAllDispatcher,
)
from moewright.engine.dispatch.dedup import DedupDispatcher
from moewright.engine.dispatch.deepep import DeepEpDispatcher
from moewright.engine.dispatch.interface import (
    ForcedCounts,
    RoutedRows,
    RowExchange,
    TokenDispatcher,
)
from moewright.engine.dispatch.rows import count_ids
from moewright.engine.kernels.products import WIDE_PRODUCTS
from moewright.engine.memory.saved_tensors import RoutingDecisions, run_checkpointed
from moewright.engine.model.adapters import add_replicated_adapter
from moewright.engine.model.attention import MicroBatchContext
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.layers import Mlp, Weight
from moewright.engine.model.parallel_linear import ReplicatedLinear
from moewright.engine.model.router import ExpertChoice, Router
from moewright.engine.runtime import Runtime
from moewright.rules.expert_placement import rank_slots, slot_experts
from moewright.rules.grid import group_ranks
from moewright.rules.job import capacity_rows, rows_for_peer
from moewright.rules.routing import count_in_turn, knows_sent_rows
from moewright.spec.choices import Payload
from moewright.spec.layout import CapacityFill, Overlap, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import MoeSpec


class SharedExperts(Mlp):
    """The experts that every token passes, as one MLP, scaled by a gate where the model has one."""

    def __init__(self, runtime: Runtime, spec: MoeSpec) -> None:
        super().__init__(runtime, spec.shared_ffn_size, Module.SHARED_EXPERTS)
        if spec.shared_gate:
            self.gate = Weight(runtime, 1, runtime.model.hidden_size)
        self._is_gated = spec.shared_gate

    def _run_second(self, x_tH: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        out_tH = super()._run_second(x_tH, active)
        if not self._is_gated:
            return out_tH
        gate = ReplicatedLinear.apply(x_tH, self.gate.weight, self._runtime.counters, WIDE_PRODUCTS)
        return out_tH * torch.sigmoid(gate)

    def split(self, x_tH: torch.Tensor) -> SplitSharedExperts:
        """Split the work in two parts, so that each can overlap with communication."""
        run_first = partial(self._run_first, x_tH)
        run_second = partial(self._run_second, x_tH)
        return SplitSharedExperts(self._runtime, run_first, run_second)


class SplitSharedExperts:
    """Shared experts that run in two calls, `run_first` and `run_second`.

    After both, `output` hands over the result.
    """

    def __init__(
        self,
        runtime: Runtime,
        first: Callable[[], torch.Tensor],
        second: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._counters = runtime.counters
        self._first = first
        self._second = second
        self._results: list[torch.Tensor] = []

    def run_first(self) -> None:
        """Run up to the activation."""
        with self._counters.scopes.enter(Module.SHARED_EXPERTS):
            self._results.append(self._first())

    def run_second(self) -> None:
        """Run from the activation on."""
        with self._counters.scopes.enter(Module.SHARED_EXPERTS):
            self._results.append(self._second(self._results.pop()))

    def output(self) -> torch.Tensor:
        """Hand over the output, once."""
        return self._results.pop()


class SlotAssigner:
    """An assigner that deals each expert's rows to the slots that hold the expert, by turns.

    `slots` gives the expert of every slot of all ranks (rules.expert_placement).
    """

    def __init__(self, runtime: Runtime, slots: Sequence[int], experts: int) -> None:
        slots_by_expert = [
            [slot for slot, slot_expert in enumerate(slots) if slot_expert == expert]
            for expert in range(experts)
        ]
        max_slots = max(map(len, slots_by_expert))
        no_slot = len(slots)
        # What is filled up is never read: turns stay below the number of an expert's slots.
        padded = [own + own[:1] * (max_slots - len(own)) for own in slots_by_expert]
        # A row of slots per expert, then one for id E: a dropped row has no slot.
        table = torch.tensor([*padded, [no_slot] * max_slots])
        self._slots_by_expert = table.to(runtime.device)
        counts = [*map(len, slots_by_expert), 1]
        self._slot_counts = torch.tensor(counts, device=runtime.device)
        self._expert_of_slot = torch.tensor(slots, device=runtime.device)
        self._experts = experts
        self._ep_rank = runtime.mesh.coordinate("ep")

    def assign(self, experts_Tk: torch.Tensor) -> torch.Tensor:
        """Return the slot of each chosen expert."""
        if self._slots_by_expert.shape[1] == 1:
            return self._slots_by_expert[experts_Tk, 0]
        flat = experts_Tk.flatten()
        counts = count_ids(flat, self._experts + 1)
        # Stable, so that rows of an expert are dealt in the order of the tokens.
        order = flat.argsort(stable=True)
        starts = (counts.cumsum(0) - counts)[flat[order]]
        # The index of each row among the rows of its expert.
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - starts
        # Each rank starts at another slot, so that the ranks' remainders do not add up in one.
        turn = (place + self._ep_rank) % self._slot_counts[flat]
        return self._slots_by_expert[flat, turn].view_as(experts_Tk)

    def sum_by_expert(self, sent_counts: torch.Tensor) -> torch.Tensor:
        """Sum the rows sent to the slots of each expert; the copy counts after them stay.

        `sent_counts` as in TokenDispatcher, with slots for experts.
        """
        slots = len(self._expert_of_slot)
        rows, copies = sent_counts.split((slots, len(sent_counts) - slots))
        by_expert = rows.new_zeros(self._experts).scatter_add_(0, self._expert_of_slot, rows)
        return torch.cat((by_expert, copies))


class LatentProjection(torch.nn.Module):
    """The projections into the space that the routed experts work in, and back.

    [T,H] -> [T,L] -> [T,H]; each rank projects its own tokens.
    """

    ledger_module = Module.EXPERTS

    def __init__(self, runtime: Runtime, spec: MoeSpec) -> None:
        super().__init__()
        self._runtime = runtime
        self.down = Weight(runtime, spec.latent_size, runtime.model.hidden_size)
        self.up = Weight(runtime, runtime.model.hidden_size, spec.latent_size)

    def project_down(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Project into the latent space."""
        return self._project(x_TH, self.down)

    def project_up(self, x_TL: torch.Tensor) -> torch.Tensor:
        """Project back into the hidden space."""
        return self._project(x_TL, self.up)

    def _project(self, x: torch.Tensor, linear: Weight) -> torch.Tensor:
        runtime = self._runtime
        y = ReplicatedLinear.apply(x, linear.weight, runtime.counters, linear.products)
        return add_replicated_adapter(runtime, linear, y, x)


class MoeLayer(torch.nn.Module):
    """The MoE layer: [T,H] -> [T,H].

    It also returns the auxiliary losses (as a Router returns them) and what this rank sent (see
    TokenDispatcher).
    """

    def __init__(self, runtime: Runtime, layer_number: int) -> None:
        super().__init__()
        spec = runtime.model.moe
        if spec is None:
            raise ValueError("a MoE layer needs model.moe")
        layout = runtime.mesh.layout
        self._runtime = runtime
        self._spec = spec
        self.router = Router(runtime, spec.experts, layer_number)
        self.number = layer_number
        slots = slot_experts(runtime.job, layer_number)
        self._assigner = self._build_assigner(slots)
        self.latent = LatentProjection(runtime, spec) if spec.latent_size else None
        self.experts = RoutedExperts(runtime, spec.experts, spec.ffn_size, slots)
        self.shared = SharedExperts(runtime, spec) if spec.shared_ffn_size else None
        self._dispatcher = _build_dispatcher(runtime, spec, len(slots))
        self._overlaps_shared = Overlap.SHARED in layout.overlap
        self._overlaps_passes = Overlap.EP in layout.overlap

    def forward(
        self,
        x_TH: torch.Tensor,
        decisions: RoutingDecisions | None,
        context: MicroBatchContext | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the layer; return its output, the auxiliary losses and the sent counts.

        `decisions` belong to the checkpointed block around this layer; None where there is none.
        `context` None: an evaluation of which all tokens count.
        """
        if self._runtime.recomputes(Recompute.MOE):
            with self._runtime.counters.scopes.enter(Module.ROUTER):
                block = partial(self._block, RoutingDecisions(), context)
                return run_checkpointed(self._runtime.counters, block, x_TH)
        return self._block(decisions, context, x_TH)

    def _block(
        self,
        decisions: RoutingDecisions | None,
        context: MicroBatchContext | None,
        x_TH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        choice, aux_losses = self.route(decisions, context, x_TH)
        out, sent_counts = self.run_experts(x_TH, choice)
        return out, aux_losses, sent_counts

    def route(
        self,
        decisions: RoutingDecisions | None,
        context: MicroBatchContext | None,
        x_TH: torch.Tensor,
    ) -> tuple[ExpertChoice, torch.Tensor]:
        """Choose the experts of every token; return the auxiliary losses too."""
        with self._runtime.counters.scopes.enter(Module.ROUTER):
            first_sequence = context.first_sequence if context else None
            counted = context.counted if context else None
            ids = context.ids if context else None
            selection, aux_losses = self.router(x_TH, decisions, first_sequence, counted, ids)
            return selection, aux_losses

    def place_experts(self, slots: tuple[int, ...]) -> None:
        """Take other experts into the slots of all ranks, by their numbers; weights stay."""
        self._assigner = self._build_assigner(slots)
        self.experts.place(slots)

    def _build_assigner(self, slots: tuple[int, ...]) -> SlotAssigner | None:
        if slots == tuple(range(self._spec.experts)):
            return None
        return SlotAssigner(self._runtime, slots, self._spec.experts)

    def map_rows(self, choice: ExpertChoice) -> tuple[torch.Tensor, ...]:
        """Return what is known of the rows to send before the host reads how many there are."""
        with self._runtime.counters.scopes.enter(Module.EXPERTS):
            return self._dispatcher.map_rows(self._choose_slots(choice))

    def _choose_slots(self, choice: ExpertChoice) -> torch.Tensor:
        """Return the slot of each chosen expert [T,k], one past the last where it is dropped."""
        experts_Tk = self._drop_over_capacity(choice)
        if self._assigner is None:
            return experts_Tk
        return self._assigner.assign(experts_Tk)

    def run_experts(
        self, x_TH: torch.Tensor, choice: ExpertChoice, mapped: tuple[torch.Tensor, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the experts of every token, and those that all pass; return the sent counts too.

        `mapped` is what `map_rows` returned of the choice, where that has run already.
        """
        split_shared = None
        with self._runtime.counters.scopes.enter(Module.EXPERTS):
            # Where rows are mapped already, the map has the slots, and nobody reads the ids again.
            slots_Tk = choice.experts if mapped else self._choose_slots(choice)
            if self.shared is not None and self._overlaps_shared:
                split_shared = self.shared.split(x_TH)
            weights_Tk = choice.weights.float()
            preprocess = partial(self._preprocess, mapped, x_TH, slots_Tk, weights_Tk)
            out, sent_counts = self._run_routed(preprocess, split_shared)
        if split_shared is not None:
            out = out + split_shared.output()
        elif self.shared is not None:
            out = out + self.shared(x_TH)
        if self._assigner is not None:
            sent_counts = self._assigner.sum_by_expert(sent_counts)
        return out, sent_counts

    @torch.no_grad()
    def _drop_over_capacity(self, choice: ExpertChoice) -> torch.Tensor:
        """Return the ids [T,k], with E where an expert's capacity leaves no room.

        The weights of a token's other experts are not scaled up for a dropped one.
        """
        layout = self._runtime.mesh.layout
        if not layout.capacity:
            return choice.experts
        tokens, top_k = choice.experts.shape
        rows = capacity_rows(tokens, top_k, self._spec.experts, layout.capacity)
        return choice.drop_over_capacity(rows, self._runtime.workload.router.drop_policy)

    def _preprocess(
        self,
        mapped: tuple[torch.Tensor, ...],
        x_TH: torch.Tensor,
        slots_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> tuple[RoutedRows, Any]:
        rows = x_TH if self.latent is None else self.latent.project_down(x_TH)
        return self._dispatcher.preprocess(rows, slots_Tk, weights_Tk, mapped)

    def _run_routed(
        self,
        preprocess: Callable[[], tuple[RoutedRows, Any]],
        shared: SplitSharedExperts | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the routed experts; `shared` runs while rows go to them, and while they return.

        With overlap=ep another micro-batch runs meanwhile.
        """
        dispatcher = self._dispatcher
        routed, route = preprocess()
        routed = dispatcher.dispatch(
            routed, route, self._choose_exchange(shared.run_first if shared else None)
        )
        routed = dispatcher.postprocess(routed, route)
        rows = self.experts(routed.rows, routed.weights, route.expert_ends)
        rows = dispatcher.combine_preprocess(rows, route)
        rows = dispatcher.combine(
            rows, route, self._choose_exchange(shared.run_second if shared else None)
        )
        out = dispatcher.combine_postprocess(rows, route)
        # Once a token, because the outputs of its experts are summed before.
        if self.latent is not None:
            out = self.latent.project_up(out)
        return out, route.sent_counts

    def _choose_exchange(self, shared_work: Callable[[], None] | None) -> RowExchange:
        """Return the exchange of rows that the layout's overlap asks for."""
        if self._overlaps_passes:
            return self._exchange_beside
        if shared_work is not None:
            return partial(all_to_all_overlapped, overlapped_work=shared_work)
        return all_to_all_in_turn

    def _exchange_beside(
        self,
        tensors: Sequence[torch.Tensor],
        group: Group,
        *,
        send: Sequence[int],
        receive: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:
        """Exchange rows while the other pass of a pair runs, and weight gradients that wait."""
        runtime = self._runtime

        # The rows travel meanwhile: first its own weight gradients, then the other pass.
        def run_backward_work() -> None:
            runtime.weight_grads.run_collected()
            runtime.turns.pass_turn()

        # The mesh makes row groups of several ranks only.
        if group.size > 1:
            group = runtime.mesh.row_group(group.name)
        return all_to_all_beside(
            tensors,
            group,
            send=send,
            receive=receive,
            forward_work=runtime.turns.pass_turn,
            backward_work=run_backward_work,
        )


def _build_dispatcher(runtime: Runtime, spec: MoeSpec, slots: int) -> TokenDispatcher:
    """Build the dispatcher of a layer whose ranks have `slots` slots for experts together."""
    mesh = runtime.mesh
    layout = mesh.layout
    kernels = runtime.kernels
    forced_counts = _forced_counts(runtime)
    facts = layout.dispatcher.facts
    if facts.payload is Payload.TOKENS:
        local_experts = range(slots)[rank_slots(range(slots), layout.ep, mesh.coordinate("ep"))]
        return AllGatherDispatcher(
            mesh.group("etp_ep"),
            slots,
            kernels,
            local_experts=local_experts,
            forced_counts=forced_counts,
        )
    if runtime.dispatch_library is not None:
        return DeepEpDispatcher(runtime.dispatch_library, slots, kernels)
    etp_group = mesh.group("etp")
    if facts.payload is Payload.COPIES:
        names = ("ep_far", "ep_near") if layout.ep_node else ("ep",)
        groups = [mesh.group(name) for name in names]
        return DedupDispatcher(groups, etp_group, slots, kernels, forced_counts=forced_counts)
    ep_group = mesh.group("ep")
    if layout.capacity_fill is CapacityFill.PADDED:
        tokens = runtime.job.micro_batch_tokens
        capacity = capacity_rows(tokens, spec.router.top_k, slots, layout.capacity)
        return PaddedAllToAllDispatcher(ep_group, etp_group, slots, kernels, capacity=capacity)
    if runtime.row_budget is not None:
        tokens = runtime.job.micro_batch_tokens
        return BudgetedAllToAllDispatcher(
            ep_group,
            etp_group,
            slots,
            kernels,
            forced_counts=forced_counts,
            peer_rows=rows_for_peer(tokens, spec.router.top_k, layout),
            budget=runtime.row_budget,
        )
    return AllToAllDispatcher(
        ep_group,
        etp_group,
        slots,
        kernels,
        forced_counts=forced_counts,
        may_drop=layout.capacity > 0,
    )


def _forced_counts(runtime: Runtime) -> ForcedCounts | None:
    """Return what every rank sends where forced routing fixes it, None where it does not."""
    if not knows_sent_rows(runtime.job):
        return None
    layout = runtime.mesh.layout
    return tuple(
        tuple(count_in_turn(runtime.job, source) for source in group_ranks(layout, "ep", peer))
        for peer in group_ranks(layout, "etp", runtime.mesh.rank)
    )
