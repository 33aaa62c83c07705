"""The all-to-all dispatcher that pads every expert's rows to a capacity.

Every expert gets the same number of rows from every source rank, whatever the router chose. So
ranks need not exchange counts, and the host need not wait; padding rows have weight 0.
"""

from __future__ import annotations

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAllDispatcher, AllToAllRoute
from moewright.engine.dispatch.interface import RoutedRows, RowMap
from moewright.engine.dispatch.rows import SelectRows, count_ids
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

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, AllToAllRoute]:
        """Lay slots out by expert, `capacity` rows each; no expert may have more slots."""
        ep, etp = self._ep_group.size, self._etp_group.size
        local = self._local_experts
        capacity = self._capacity
        device = experts_Tk.device
        counts = count_ids(experts_Tk, self._experts + 1)
        row_map = self._build_padded_map(experts_Tk, counts)
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
            sent_counts=counts[:-1],
            unpadded_rows=unpadded_rows,
            padded_length=ep * local * capacity,
        )
        rows = row_map.permute(x_TH)
        weights = torch.cat((weights_Tk.flatten(), weights_Tk.new_zeros(1)))
        return RoutedRows(rows=rows, weights=SelectRows.apply(weights, row_map.slot_of_row)), route

    def _build_padded_map(self, experts_Tk: torch.Tensor, counts: torch.Tensor) -> RowMap:
        """Map slots to padded rows.

        A padding row has slot number T * k, one past the last slot, and holds the first token.
        """
        flat = experts_Tk.flatten()
        slots = flat.numel()
        rows = self._experts * self._capacity
        order = flat.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        sorted_ids = flat[order]
        place_in_expert = torch.arange(slots, device=flat.device) - starts[sorted_ids]
        row = sorted_ids * self._capacity + place_in_expert
        row = row.masked_fill(sorted_ids == self._experts, rows)
        row_of_slot = torch.empty_like(order)
        row_of_slot[order] = row
        slot_of_row = torch.full((rows + 1,), slots, dtype=torch.int64, device=flat.device)
        slot_of_row = slot_of_row.scatter_(0, row, order)[:-1].clone()
        token_of_row = slot_of_row // experts_Tk.shape[1]
        return RowMap(
            token_of_row=token_of_row.masked_fill_(slot_of_row == slots, 0),
            row_of_slot=row_of_slot.view(experts_Tk.shape),
            slot_of_row=slot_of_row,
            is_complete=False,
            kernels=self._kernels,
        )


def _swap_outer_axes(outer: int, inner: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return the order that brings rows [outer, inner, rows] to [inner, outer, rows]."""
    numbers = torch.arange(outer * inner * rows, device=device).view(outer, inner, rows)
    return numbers.transpose(0, 1).flatten()
