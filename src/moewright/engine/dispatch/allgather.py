"""The all-gather dispatcher: every rank sees all tokens of its expert group and works on those its experts were chosen
for. Cheap only where k is close to the experts or the group is small (docs/formulas.md 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.collectives import Gather, Group, ScatterSum, gather
from moewright.engine.dispatch.seam import Routed, Rows, on_host, sorted_rows
from moewright.engine.model.functions import Select, Spread, SumSlots, count_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """`slots` are the rows of the local experts among the slots of all ranks' tokens; `ends` [E_local] int32."""

    slots: Rows
    ends: torch.Tensor


class AllGather:
    """Dispatch over the ranks that hold all experts, ETP slices included: their partial outputs are summed alike."""

    def __init__(self, group: Group, experts: range) -> None:
        """`experts` are those held here."""
        self._group = group
        self._here = experts

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """Gather the choices of all ranks and find the rows of the experts here."""
        here, ids = len(self._here), gather(experts_Tk, self._group) - self._here.start
        ids = ids.masked_fill((ids < 0) | (ids >= here), here)
        counts = count_rows(ids, here + 1)[:-1]
        (rows,) = on_host(counts.sum()[None])
        slots = sorted_rows(ids, rows[0])
        return Routed(rows=x_TH, weights=weights_Tk), Route(slots=slots, ends=counts.cumsum(0).to(torch.int32))

    def dispatch(self, routed: Routed, route: Route) -> Routed:
        """All ranks' tokens and weights."""
        return Routed(rows=Gather.apply(routed.rows, self._group), weights=Gather.apply(routed.weights, self._group))

    def postprocess(self, routed: Routed, route: Route) -> Routed:
        """The rows of the local experts."""
        slots = route.slots
        rows = Spread.apply(routed.rows, slots.tokens, slots.rows)
        return Routed(rows=rows, weights=Select.apply(routed.weights.flatten(), slots.places))

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """What the experts here add to each token of all ranks."""
        return SumSlots.apply(rows, route.slots.tokens, route.slots.rows)

    def combine(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """The sum over ranks, each its own tokens."""
        return ScatterSum.apply(rows, self._group)

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        return rows
