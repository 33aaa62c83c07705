"""The all-gather dispatcher: every rank sees all tokens of its expert group and works on those its
experts were chosen for. Cheap only where k is close to the experts or the group is small
(docs/formulas.md 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.comm.collectives import Gather, Group, ScatterSum, gather
from moewright.engine.dispatch.interface import (
    Known,
    Meanwhile,
    Routed,
    Rows,
    on_host,
    sorted_rows,
    wanted_rows,
)
from moewright.engine.kernels.fused.interface import Kernels
from moewright.engine.model.autograd import count_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """`slots`: the rows of the local experts among the slots of all ranks' tokens; `ends` and
    `sent` as in the seam."""

    slots: Rows
    ends: torch.Tensor
    sent: torch.Tensor


class AllGather:
    """Dispatch over the ranks that hold all experts, ETP slices included: their partial outputs are
    summed alike."""

    def __init__(
        self, group: Group, experts: int, kernels: Kernels, *, here: range, known: Known | None
    ) -> None:
        """`here` are the experts held here."""
        self._group = group
        self._experts = experts
        self._here = here
        self._kernels = kernels
        self._known = known

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """Gather the choices of all ranks and find the rows of the experts here."""
        here, ids = len(self._here), gather(experts_Tk, self._group) - self._here.start
        ids = ids.masked_fill((ids < 0) | (ids >= here), here)
        counts = count_rows(ids, here + 1)[:-1]
        if self._known:
            sent_rows = self._known(*experts_Tk.shape).rows
            rows = self._group.size * sum(sent_rows[expert] for expert in self._here)
        else:
            ((rows,),) = on_host(counts.sum()[None])
        slots = sorted_rows(ids, rows, self._kernels)
        sent = count_rows(experts_Tk, self._experts + 1)[:-1]
        route = Route(slots=slots, ends=counts.cumsum(0).to(torch.int32), sent=sent)
        return Routed(rows=x_TH, weights=weights_Tk), route

    def dispatch(self, routed: Routed, route: Route, meanwhile: Meanwhile | None) -> Routed:
        """All ranks' tokens and weights. Nothing goes on beside a gather (rules.exclusions)."""
        return Routed(
            rows=Gather.apply(routed.rows, self._group),
            weights=Gather.apply(routed.weights, self._group),
        )

    def postprocess(self, routed: Routed, route: Route) -> Routed:
        """The rows of the local experts."""
        return wanted_rows(routed, route.slots)

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """What the experts here add to each token of all ranks."""
        return route.slots.summed(rows)

    def combine(
        self, rows: torch.Tensor, route: Route, meanwhile: Meanwhile | None
    ) -> torch.Tensor:
        """The sum over ranks, each its own tokens."""
        return ScatterSum.apply(rows, self._group)

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        return rows
