"""The Mixture-of-Experts layer: router, one selection, dispatch, experts, combine.

One selection feeds dispatch, auxiliary losses and statistics, so they cannot disagree.
Shapes: T tokens of this rank, E experts in all, k experts a token, H hidden.
"""

from __future__ import annotations

from functools import partial

import torch

from moewright.engine.dispatch import seam
from moewright.engine.dispatch.allgather import AllGather
from moewright.engine.dispatch.alltoall import AllToAll
from moewright.engine.dispatch.dedup import Dedup
from moewright.engine.keep import Decided, replayed
from moewright.engine.model.layers import Experts, Mlp, Weight
from moewright.engine.model.linears import GateLinear
from moewright.engine.model.router import Router, Selected
from moewright.engine.runtime import Runtime
from moewright.rules.routing import InTurn, capacity_rows, drops_by_probability, experts_of, in_turn
from moewright.spec.layout import Dispatcher, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import MoeSpec
from moewright.spec.workload import RouterForce


class SharedExperts(Mlp):
    """The experts that every token passes, as one MLP, scaled by a gate of its own where the model has one."""

    def __init__(self, run: Runtime, spec: MoeSpec) -> None:
        super().__init__(run, spec.shared_ffn_size, Module.SHARED_EXPERTS)
        if spec.shared_gate:
            self.gate = Weight(run, 1, run.model.hidden_size)
        self._gated = spec.shared_gate

    def _block(self, x_tH: torch.Tensor) -> tuple[torch.Tensor]:
        (out_tH,) = super()._block(x_tH)
        if not self._gated:
            return (out_tH,)
        return (out_tH * torch.sigmoid(GateLinear.apply(x_tH, self.gate.weight, self._run.books)),)


class Moe(torch.nn.Module):
    """[T,H] -> [T,H], with the auxiliary losses (as a Router returns them) and what this rank sent (see the seam)."""

    def __init__(self, run: Runtime, number: int) -> None:
        super().__init__()
        spec = run.model.moe
        if spec is None:
            raise ValueError("a MoE layer needs model.moe")
        self._run, self._spec = run, spec
        self.router = Router(run, spec.experts, number)
        self.experts = Experts(run, spec.experts, spec.ffn_size)
        self.shared = SharedExperts(run, spec) if spec.shared_ffn_size else None
        self._dispatcher = _dispatcher(run, spec)

    def forward(
        self, x_TH: torch.Tensor, decided: Decided | None, first: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`decided`: of the replayed block that this is part of, None outside of one. `first` as in Sequences."""
        if self._run.replays(Recompute.MOE):
            with self._run.books.within(Module.ROUTER):
                return replayed(self._run.books, partial(self._block, Decided(), first), x_TH)
        return self._block(decided, first, x_TH)

    def _block(
        self, decided: Decided | None, first: int | None, x_TH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        books = self._run.books
        with books.within(Module.ROUTER):
            selected, aux = self.router(x_TH, decided, first)
        with books.within(Module.EXPERTS):
            out, sent = self._routed(x_TH, self._kept(selected), selected.weights.float())
        if self.shared is not None:
            out = out + self.shared(x_TH)
        return out, aux, sent

    @torch.no_grad()
    def _kept(self, selected: Selected) -> torch.Tensor:
        """The ids [T,k], E where capacity leaves no room. Dropped weights are not made up for by the others."""
        layout, (tokens, top_k) = self._run.mesh.layout, selected.experts.shape
        if not layout.capacity:
            return selected.experts
        rows = capacity_rows(tokens, top_k, self._spec.experts, layout.capacity)
        return selected.within(rows, self._run.workload.router.drop_policy)

    def _routed(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        way = self._dispatcher
        routed, route = way.preprocess(x_TH, experts_Tk, weights_Tk)
        routed = way.postprocess(way.dispatch(routed, route), route)
        rows = self.experts(routed.rows, routed.weights, route.ends)
        return way.combine_postprocess(way.combine(way.combine_preprocess(rows, route), route), route), route.sent


def _dispatcher(run: Runtime, spec: MoeSpec) -> seam.Dispatcher:
    layout, mesh, experts = run.mesh.layout, run.mesh, spec.experts
    known = _known(run, spec)
    if layout.dispatcher is Dispatcher.ALL_GATHER:
        here = experts_of(run.model, layout, mesh.coordinate("ep"))
        return AllGather(mesh.group("etp_ep"), experts, here=here, known=known)
    if layout.dispatcher is Dispatcher.DEDUP:
        return Dedup(mesh.group("ep"), mesh.group("etp"), experts, known=known)
    return AllToAll(mesh.group("ep"), mesh.group("etp"), experts, known=known, drops=layout.capacity > 0)


def _known(run: Runtime, spec: MoeSpec) -> seam.Known | None:
    """What is sent where experts are taken in turn, unless it hangs on which rows a capacity drops."""
    layout, training = run.mesh.layout, run.workload.router
    if training.force is not RouterForce.BALANCED or drops_by_probability(layout, training):
        return None

    def known(tokens: int, top_k: int) -> InTurn:
        most = capacity_rows(tokens, top_k, spec.experts, layout.capacity)
        return in_turn(tokens, top_k, spec.experts, most=most, ranks=layout.ep)

    return known
