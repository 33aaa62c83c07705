"""The all-to-all dispatcher with a capacity padded to: every expert gets as many rows from every
source, whatever was chosen. No rank tells another how many come and the host waits for nothing;
rows that nobody sent weigh nothing.
"""

from __future__ import annotations

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAllDispatcher, AllToAllRoute
from moewright.engine.dispatch.interface import RoutedRows, RowMap
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.model.autograd import SelectRows, count_ids


class PaddedAllToAllDispatcher(AllToAllDispatcher):
    """Dispatch of `room` rows from each source to each expert."""

    def __init__(
        self, group: Group, etp_group: Group, experts: int, kernels: KernelSet, *, capacity: int
    ) -> None:
        super().__init__(group, etp_group, experts, kernels, forced_counts=None, may_drop=True)
        self._room = capacity

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, AllToAllRoute]:
        """Lay slots out by expert, in `room` rows each; no more than that may be of one expert."""
        size, room, device = self._group.size, self._room, experts_Tk.device
        local, parts = self._experts // size, self._slices.size
        counts = count_ids(experts_Tk, self._experts + 1)
        slots = self._laid_out(experts_Tk, counts)
        each, here = local * room, size * local * room
        places = regroup = ungroup = None
        if parts > 1:
            places = _by_expert(parts * size, local, room, device)
        elif size > 1 and local > 1:
            regroup = _by_expert(size, local, room, device)
            ungroup = _by_expert(local, size, room, device)
        route = AllToAllRoute(
            row_map=slots,
            send=(each,) * size,
            receive=(each,) * size,
            expert_order=regroup,
            source_order=ungroup,
            expert_ends=(torch.arange(1, local + 1, device=device) * (parts * size * room)).to(
                torch.int32
            ),
            sent_counts=counts[:-1],
            unpadded_rows=places,
            padded_length=here,
        )
        rows = slots.permute(x_TH)
        weights = torch.cat((weights_Tk.flatten(), weights_Tk.new_zeros(1)))
        return RoutedRows(rows=rows, weights=SelectRows.apply(weights, slots.slot_of_row)), route

    def _laid_out(self, experts_Tk: torch.Tensor, counts: torch.Tensor) -> RowMap:
        """A row without a slot takes the place after the last one, and holds the first token."""
        flat, experts, room = experts_Tk.flatten(), self._experts, self._room
        slots, rows = flat.numel(), experts * room
        order = flat.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        sorted_ids = flat[order]
        row = sorted_ids * room + torch.arange(slots, device=flat.device) - starts[sorted_ids]
        row = row.masked_fill(sorted_ids == experts, rows)
        row_of = torch.empty_like(order)
        row_of[order] = row
        places = torch.full((rows + 1,), slots, dtype=torch.int64, device=flat.device).scatter_(
            0, row, order
        )
        places = places[:-1].clone()
        tokens = (places // experts_Tk.shape[1]).masked_fill_(places == slots, 0)
        return RowMap(
            token_of_row=tokens,
            row_of_slot=row_of.view(experts_Tk.shape),
            slot_of_row=places,
            is_complete=False,
            kernels=self._kernels,
        )


def _by_expert(outer: int, inner: int, room: int, device: torch.device) -> torch.Tensor:
    """Order that brings rows [outer, inner, room] to [inner, outer, room]."""
    rows = torch.arange(outer * inner * room, device=device).view(outer, inner, room)
    return rows.transpose(0, 1).flatten()
