"""The all-gather dispatcher: every rank sees all tokens of its expert group and works on those its
experts were chosen for. Cheap only where k is close to the experts or the group is small
(docs/formulas.md 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.comm.collectives import (
    AllGatherRows,
    Group,
    ReduceScatterRows,
    all_gather_rows,
)
from moewright.engine.dispatch.interface import (
    ForcedCounts,
    OverlappedWork,
    RoutedRows,
    RowMap,
    build_row_map,
    copy_to_host,
    permute_to_local_experts,
)
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.model.autograd import count_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherRoute:
    """`slots`: the rows of the local experts among the slots of all ranks' tokens; `ends` and
    `sent` as in the seam."""

    row_map: RowMap
    expert_ends: torch.Tensor
    sent_counts: torch.Tensor


class AllGatherDispatcher:
    """Dispatch over the ranks that hold all experts, ETP slices included: their partial outputs are
    summed alike."""

    def __init__(
        self,
        group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        local_experts: range,
        forced_counts: ForcedCounts | None,
    ) -> None:
        """`here` are the experts held here."""
        self._group = group
        self._experts = experts
        self._here = local_experts
        self._kernels = kernels
        self._known = forced_counts

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, AllGatherRoute]:
        """Gather the choices of all ranks and find the rows of the experts here."""
        here, ids = len(self._here), all_gather_rows(experts_Tk, self._group) - self._here.start
        ids = ids.masked_fill((ids < 0) | (ids >= here), here)
        counts = count_ids(ids, here + 1)[:-1]
        if self._known:
            sent_rows = self._known(*experts_Tk.shape).rows
            rows = self._group.size * sum(sent_rows[expert] for expert in self._here)
        else:
            ((rows,),) = copy_to_host(counts.sum()[None])
        slots = build_row_map(ids, rows, self._kernels)
        sent = count_ids(experts_Tk, self._experts + 1)[:-1]
        route = AllGatherRoute(
            row_map=slots, expert_ends=counts.cumsum(0).to(torch.int32), sent_counts=sent
        )
        return RoutedRows(rows=x_TH, weights=weights_Tk), route

    def dispatch(
        self, routed: RoutedRows, route: AllGatherRoute, meanwhile: OverlappedWork | None
    ) -> RoutedRows:
        """All ranks' tokens and weights. Nothing goes on beside a gather (rules.exclusions)."""
        return RoutedRows(
            rows=AllGatherRows.apply(routed.rows, self._group),
            weights=AllGatherRows.apply(routed.weights, self._group),
        )

    def postprocess(self, routed: RoutedRows, route: AllGatherRoute) -> RoutedRows:
        """The rows of the local experts."""
        return permute_to_local_experts(routed, route.row_map)

    def combine_preprocess(self, rows: torch.Tensor, route: AllGatherRoute) -> torch.Tensor:
        """What the experts here add to each token of all ranks."""
        return route.row_map.unpermute(rows)

    def combine(
        self, rows: torch.Tensor, route: AllGatherRoute, meanwhile: OverlappedWork | None
    ) -> torch.Tensor:
        """The sum over ranks, each its own tokens."""
        return ReduceScatterRows.apply(rows, self._group)

    def combine_postprocess(self, rows: torch.Tensor, route: AllGatherRoute) -> torch.Tensor:
        return rows
