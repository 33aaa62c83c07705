"""The all-to-all dispatcher that pads every expert's rows to a capacity.

Every expert gets the same number of rows from every source rank, whatever the router chose. So
ranks need not exchange counts, and the host need not wait; padding rows have weight 0.
"""

from __future__ import annotations

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAllDispatcher, AllToAllRoute, MappedRows
from moewright.engine.dispatch.interface import RoutedRows, build_padded_map
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
