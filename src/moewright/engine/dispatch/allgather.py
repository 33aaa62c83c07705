"""The all-gather dispatcher: every rank sees all tokens of its expert group.

It computes those that chose its experts. It is cheap only where k is close to the experts
or the group is small (docs/formulas.md 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.comm.autograd_collectives import AllGatherRows, ReduceScatterRows
from moewright.engine.comm.collectives import Group, all_gather_rows
from moewright.engine.dispatch.interface import (
    ForcedCounts,
    RoutedRows,
    RowExchange,
    RowMap,
    build_row_map,
    copy_to_host,
    permute_to_local_experts,
)
from moewright.engine.dispatch.rows import count_ids
from moewright.engine.kernels.fused.interface import KernelSet


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherRoute:
    """The route of one batch of tokens.

    `row_map` has the rows of the local experts among the slots of all ranks' tokens; `expert_ends`
    and `sent_counts` as in TokenDispatcher.
    """

    row_map: RowMap
    expert_ends: torch.Tensor
    sent_counts: torch.Tensor


class AllGatherDispatcher:
    """A dispatcher over the ranks that hold all experts, ETP shards included.

    The partial outputs of shards are summed like those of ranks.
    """

    def __init__(
        self,
        group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        local_experts: range,
        forced_counts: ForcedCounts | None,
    ) -> None:
        self._group = group
        self._experts = experts
        self._local_experts = local_experts
        self._kernels = kernels
        self._forced_counts = forced_counts

    def map_rows(self, experts_Tk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return nothing: how many rows a rank makes is read by its host."""
        return ()

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, AllGatherRoute]:
        """Gather the choices of all ranks and find the rows of the local experts."""
        local = len(self._local_experts)
        ids = all_gather_rows(experts_Tk, self._group) - self._local_experts.start
        # Experts of other ranks become one id past the last, as dropped slots: neither has a row
        # here.
        ids = ids.masked_fill((ids < 0) | (ids >= local), local)
        counts = count_ids(ids, local + 1)[:-1]
        if self._forced_counts:
            block = slice(self._local_experts.start, self._local_experts.stop)
            rows = sum(sum(source.rows[block]) for group in self._forced_counts for source in group)
        else:
            ((rows,),) = copy_to_host(counts.sum()[None])
        route = AllGatherRoute(
            row_map=build_row_map(ids, rows, self._kernels),
            expert_ends=counts.cumsum(0).to(torch.int32),
            sent_counts=count_ids(experts_Tk, self._experts + 1)[:-1],
        )
        return RoutedRows(rows=x_TH, weights=weights_Tk), route

    def dispatch(
        self, routed: RoutedRows, route: AllGatherRoute, exchange: RowExchange
    ) -> RoutedRows:
        """Gather all ranks' tokens and weights, which no overlap covers (compatibility.py)."""
        return RoutedRows(
            rows=AllGatherRows.apply(routed.rows, self._group),
            weights=AllGatherRows.apply(routed.weights, self._group),
        )

    def postprocess(self, routed: RoutedRows, route: AllGatherRoute) -> RoutedRows:
        """Make the rows of the local experts."""
        return permute_to_local_experts(routed, route.row_map)

    def combine_preprocess(self, rows: torch.Tensor, route: AllGatherRoute) -> torch.Tensor:
        """Sum what the local experts add to each token of all ranks."""
        return route.row_map.unpermute(rows)

    def combine(
        self, rows: torch.Tensor, route: AllGatherRoute, exchange: RowExchange
    ) -> torch.Tensor:
        """Sum over ranks; each gets its own tokens."""
        return ReduceScatterRows.apply(rows, self._group)

    def combine_postprocess(self, rows: torch.Tensor, route: AllGatherRoute) -> torch.Tensor:
        return rows
