"""The Mixture-of-Experts layer: router, one selection, dispatch, experts, combine.

One selection feeds dispatch, auxiliary losses and statistics, so they cannot disagree.
Shapes: T tokens of this rank, E experts in all, k experts a token, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from moewright.engine.collectives import Group, all_reduce
from moewright.engine.dispatch.alltoall import AllToAll
from moewright.engine.keep import Decided, replayed
from moewright.engine.model.layers import Experts, Mlp, Weight
from moewright.engine.model.linears import RouterLinear
from moewright.engine.runtime import Runtime
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import RouterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The experts of every token: ids [T,k] int64, weights [T,k] fp32, scores [T,E] fp32, counts [E] int64."""

    experts: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor


def select(logits_TE: torch.Tensor, spec: RouterSpec, experts: torch.Tensor | None = None) -> Selected:
    """Top-k of the softmax over all experts (docs/formulas.md 4); renormalised: the softmax over the selected.

    `experts` [T,k] are those already chosen, in a replay.
    """
    scores = torch.softmax(logits_TE, -1)
    if experts is None:
        weights, experts = torch.topk(scores, spec.top_k, dim=-1)
    else:
        weights = scores.gather(-1, experts)
    if spec.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if spec.scaling_factor != 1.0:
        weights = weights * spec.scaling_factor
    counts = torch.bincount(experts.flatten(), minlength=logits_TE.shape[1])
    return Selected(experts=experts, weights=weights, scores=scores, counts=counts)


def load_share(selected: Selected, sharers: Group) -> torch.Tensor:
    """The share [E] fp32 of a micro-batch's routed rows that each expert got; the `sharers` hold equal parts of it."""
    counts = all_reduce(selected.counts.clone(), sharers)
    return counts.float() / (selected.experts.numel() * sharers.size)


def balance_loss(selected: Selected, share: torch.Tensor, sharers: Group) -> torch.Tensor:
    """This rank's part of E * sum_i f_i P_i: f the share of routed rows, P the mean score (docs/formulas.md 4)."""
    experts = selected.scores.shape[1]
    return experts * (share * selected.scores.mean(0)).sum() / sharers.size


def z_loss(logits_TE: torch.Tensor, sharers: Group) -> torch.Tensor:
    """This rank's part of the mean squared log-sum-exp of the router logits (docs/formulas.md 4)."""
    return torch.logsumexp(logits_TE, -1).square().mean() / sharers.size


class Moe(torch.nn.Module):
    """[T,H] -> [T,H], with the auxiliary loss (coefficients applied) and the expert counts [E] of this rank."""

    def __init__(self, run: Runtime) -> None:
        super().__init__()
        spec = run.model.moe
        if spec is None:
            raise ValueError("a MoE layer needs model.moe")
        self._run, self._spec = run, spec
        self.router = Router(run, spec.experts)
        self.experts = Experts(run, spec.experts, spec.ffn_size)
        self.shared = Mlp(run, spec.shared_ffn_size, Module.SHARED_EXPERTS) if spec.shared_ffn_size else None
        self._dispatcher = AllToAll(run.mesh.group("ep"), run.mesh.group("etp"), spec.experts)

    def forward(self, x_TH: torch.Tensor, decided: Decided | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`decided`: of the replayed block that this is part of, None outside of one."""
        if self._run.replays(Recompute.MOE):
            with self._run.books.within(Module.ROUTER):
                return replayed(self._run.books, partial(self._block, Decided()), x_TH)
        return self._block(decided, x_TH)

    def _block(self, decided: Decided | None, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        books = self._run.books
        with books.within(Module.ROUTER):
            logits = self.router(x_TH)
            selected = select(logits, self._spec.router, decided.experts if decided else None)
            if decided is not None and decided.experts is None:
                decided.experts = self._run.keeper.hold(selected.experts)
            aux = self._losses(logits, selected, decided)
        with books.within(Module.EXPERTS):
            out = self._routed(x_TH, selected)
        if self.shared is not None:
            out = out + self.shared(x_TH)
        return out, aux, selected.counts

    def _losses(self, logits: torch.Tensor, selected: Selected, decided: Decided | None) -> torch.Tensor:
        loss, sharers = self._run.workload.loss, self._run.mesh.group("tp_cp")
        aux = logits.new_zeros(())
        if loss.aux_coeff:
            share = decided.share if decided else None
            if share is None:
                share = load_share(selected, sharers)
                if decided is not None:
                    decided.share = self._run.keeper.hold(share)
            aux = aux + loss.aux_coeff * balance_loss(selected, share, sharers)
        if loss.z_coeff:
            aux = aux + loss.z_coeff * z_loss(logits, sharers)
        return aux

    def _routed(self, x_TH: torch.Tensor, selected: Selected) -> torch.Tensor:
        way = self._dispatcher
        routed, route = way.preprocess(x_TH, selected.experts, selected.weights)
        routed = way.postprocess(way.dispatch(routed, route), route)
        rows = self.experts(routed.rows, routed.weights, route.ends)
        return way.combine_postprocess(way.combine(way.combine_preprocess(rows, route), route), route)


class Router(Weight):
    """Router logits [T,E] in fp32."""

    ledger_module = Module.ROUTER

    def __init__(self, run: Runtime, experts: int) -> None:
        super().__init__(run, experts, run.model.hidden_size)
        self._run = run

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return RouterLinear.apply(x_TH, self.weight, self._run.books)
