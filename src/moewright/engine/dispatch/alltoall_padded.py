"""The all-to-all dispatcher that pads every expert's rows to a capacity.

Every expert gets the same number of rows from every source rank, whatever the router chose. So
ranks need not exchange counts, and the host need not wait; padding rows have weight 0.

The all-to-all dispatcher that pads what a rank sends to another to a budget of rows. No row is
dropped for good: what is over the budget is left out and noted, and the step is run again with as
many rows as there are (engine.run.step). So every shape is the same in every step, and the host
waits for no counts; padding rows have weight 0. Rows of an expert lie in the order in which
AllToAllDispatcher has them, the padding of all sources behind those of the last local expert.
"""

from __future__ import annotations

import torch

from moewright.engine.comm.autograd_collectives import all_to_all
from moewright.engine.comm.collectives import Group, all_gather_rows
from moewright.engine.dispatch.alltoall import AllToAllDispatcher, AllToAllRoute, MappedRows
from moewright.engine.dispatch.interface import ForcedCounts, RoutedRows, build_padded_map
from moewright.engine.dispatch.rows import RowBudget, SelectRows, count_ids
from moewright.engine.kernels.fused.interface import KernelSet


class PaddedAllToAllDispatcher(AllToAllDispatcher):
    """A dispatcher of `capacity` rows from each source to each expert."""

    def __init__(
        self,
        ep_group: Group,
        etp_group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        capacity: int,
    ) -> None:
        super().__init__(ep_group, etp_group, experts, kernels, forced_counts=None, may_drop=True)
        self._capacity = capacity

    def map_rows(self, experts_Tk: torch.Tensor) -> MappedRows:
        """Lay slots out by expert, `capacity` rows each; no expert may have more slots."""
        counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        row_map = build_padded_map(
            experts_Tk,
            ranks=self._experts,
            ids_a_rank=1,
            rows_a_rank=self._capacity,
            kernels=self._kernels,
        )
        return MappedRows(
            counts=counts,
            # Every rank receives `capacity` rows an expert, whatever was chosen: these two are read
            # by nobody.
            received=counts,
            gathered=counts,
            token_of_row=row_map.token_of_row,
            row_of_slot=row_map.row_of_slot,
            slot_of_row=row_map.slot_of_row,
        )

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, AllToAllRoute]:
        """Make the rows that `map_rows` lays out; `mapped` where it has run already."""
        ep, etp = self._ep_group.size, self._etp_group.size
        local = self._local_experts
        capacity = self._capacity
        device = experts_Tk.device
        mapped_rows = MappedRows(*mapped) if mapped else self.map_rows(experts_Tk)
        row_map = self._restore_map(mapped_rows, is_complete=False)
        unpadded_rows = expert_order = source_order = None
        if etp > 1:
            unpadded_rows = _swap_outer_axes(etp * ep, local, capacity, device)
        elif ep > 1 and local > 1:
            expert_order = _swap_outer_axes(ep, local, capacity, device)
            source_order = _swap_outer_axes(local, ep, capacity, device)
        expert_numbers = torch.arange(1, local + 1, device=device)
        route = AllToAllRoute(
            row_map=row_map,
            send=(local * capacity,) * ep,
            receive=(local * capacity,) * ep,
            expert_order=expert_order,
            source_order=source_order,
            expert_ends=(expert_numbers * (etp * ep * capacity)).to(torch.int32),
            sent_counts=mapped_rows.counts,
            unpadded_rows=unpadded_rows,
            padded_length=ep * local * capacity,
        )
        rows = row_map.permute(x_TH)
        # A padding row has slot number T * k: the weight 0 that is appended here.
        weights = torch.cat((weights_Tk.flatten(), weights_Tk.new_zeros(1)))
        return RoutedRows(rows=rows, weights=SelectRows.apply(weights, row_map.slot_of_row)), route


def _swap_outer_axes(outer: int, inner: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return the order that brings rows [outer, inner, rows] to [inner, outer, rows]."""
    numbers = torch.arange(outer * inner * rows, device=device).view(outer, inner, rows)
    return numbers.transpose(0, 1).flatten()


class BudgetedAllToAllDispatcher(AllToAllDispatcher):
    """A dispatcher of `peer_rows` rows to each rank, while its budget is enforced."""

    def __init__(
        self,
        ep_group: Group,
        etp_group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        forced_counts: ForcedCounts | None,
        peer_rows: int,
        budget: RowBudget,
    ) -> None:
        super().__init__(
            ep_group, etp_group, experts, kernels, forced_counts=forced_counts, may_drop=False
        )
        self._peer_rows = peer_rows
        self._budget = budget

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, AllToAllRoute]:
        """Lay slots out by rank, `peer_rows` rows each; note how many have no room.

        Nothing is `mapped` before: a step over its budget maps its rows in another way.
        """
        if not self._budget.is_enforced:
            return super().preprocess(x_TH, experts_Tk, weights_Tk, mapped)
        ep = self._ep_group.size
        local = self._local_experts
        budget_rows = self._peer_rows
        counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        ends = counts.view(ep, local).cumsum(1)
        self._budget.note((ends[:, -1] - budget_rows).clamp(min=0).sum())
        # Slots are sorted by expert, so what is over the budget of a rank is cut from its last
        # experts.
        kept_ends = ends.clamp(max=budget_rows)
        kept = kept_ends.diff(dim=1, prepend=kept_ends.new_zeros(ep, 1)).flatten()
        splits = [local] * ep
        received = all_to_all(kept, self._ep_group, send=splits, receive=splits).view(ep, local)
        gathered = all_gather_rows(received, self._etp_group).view(-1, ep, local)
        padding = budget_rows - gathered.sum(2, keepdim=True)
        expert_order = source_order = unpadded_rows = None
        if self._etp_group.size > 1:
            unpadded_rows = _sort_padding_last(gathered, padding, budget_rows)
        elif ep > 1 and local > 1:
            expert_order = _sort_padding_last(gathered, padding, budget_rows)
            source_order = torch.empty_like(expert_order)
            source_order[expert_order] = torch.arange(len(expert_order), device=received.device)
        rows_by_expert = gathered.sum((0, 1))
        # The grouped product must cover every row: the last expert multiplies the padding too.
        rows_by_expert[-1] += padding.sum()
        row_map = build_padded_map(
            experts_Tk, ranks=ep, ids_a_rank=local, rows_a_rank=budget_rows, kernels=self._kernels
        )
        route = AllToAllRoute(
            row_map=row_map,
            send=(budget_rows,) * ep,
            receive=(budget_rows,) * ep,
            expert_order=expert_order,
            source_order=source_order,
            expert_ends=rows_by_expert.cumsum(0).to(torch.int32),
            sent_counts=counts,
            unpadded_rows=unpadded_rows,
            padded_length=ep * budget_rows,
        )
        # A padding row has slot number T * k: the weight 0 that is appended here.
        weights = torch.cat((weights_Tk.flatten(), weights_Tk.new_zeros(1)))
        return (
            RoutedRows(
                rows=row_map.permute(x_TH), weights=SelectRows.apply(weights, row_map.slot_of_row)
            ),
            route,
        )


def _sort_padding_last(
    gathered: torch.Tensor, padding: torch.Tensor, rows_a_source: int
) -> torch.Tensor:
    """Return the order of gathered rows by local expert, with all padding after them.

    `gathered` [ETP ranks, sources, E_local] counts rows, `padding` [ETP ranks, sources, 1] those
    that fill each source's part.
    """
    etp, sources, local = gathered.shape
    lengths = torch.cat((gathered, padding), 2)
    experts = torch.arange(local + 1, device=gathered.device).repeat(etp * sources)
    expert_of_row = experts.repeat_interleave(
        lengths.flatten(), output_size=etp * sources * rows_a_source
    )
    return torch.argsort(expert_of_row, stable=True)
