"""The all-to-all dispatcher with a capacity padded to: every expert gets as many rows from every
source, whatever was chosen. No rank tells another how many come and the host waits for nothing;
rows that nobody sent weigh nothing.
"""

from __future__ import annotations

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAll, Route
from moewright.engine.dispatch.interface import Routed, Rows
from moewright.engine.kernels.fused.interface import Kernels
from moewright.engine.model.autograd import Select, count_rows


class PaddedAllToAll(AllToAll):
    """Dispatch of `room` rows from each source to each expert."""

    def __init__(
        self, group: Group, slices: Group, experts: int, kernels: Kernels, *, room: int
    ) -> None:
        super().__init__(group, slices, experts, kernels, known=None, drops=True)
        self._room = room

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """Lay slots out by expert, in `room` rows each; no more than that may be of one expert."""
        size, room, device = self._group.size, self._room, experts_Tk.device
        local, parts = self._experts // size, self._slices.size
        counts = count_rows(experts_Tk, self._experts + 1)
        slots = self._laid_out(experts_Tk, counts)
        each, here = local * room, size * local * room
        places = regroup = ungroup = None
        if parts > 1:
            places = _by_expert(parts * size, local, room, device)
        elif size > 1 and local > 1:
            regroup = _by_expert(size, local, room, device)
            ungroup = _by_expert(local, size, room, device)
        route = Route(
            slots=slots,
            send=(each,) * size,
            receive=(each,) * size,
            regroup=regroup,
            ungroup=ungroup,
            ends=(torch.arange(1, local + 1, device=device) * (parts * size * room)).to(
                torch.int32
            ),
            sent=counts[:-1],
            places=places,
            widest=here,
        )
        rows = slots.spread(x_TH)
        weights = torch.cat((weights_Tk.flatten(), weights_Tk.new_zeros(1)))
        return Routed(rows=rows, weights=Select.apply(weights, slots.places)), route

    def _laid_out(self, experts_Tk: torch.Tensor, counts: torch.Tensor) -> Rows:
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
        return Rows(
            tokens=tokens,
            rows=row_of.view(experts_Tk.shape),
            places=places,
            full=False,
            kernels=self._kernels,
        )


def _by_expert(outer: int, inner: int, room: int, device: torch.device) -> torch.Tensor:
    """Order that brings rows [outer, inner, room] to [inner, outer, room]."""
    rows = torch.arange(outer * inner * room, device=device).view(outer, inner, room)
    return rows.transpose(0, 1).flatten()
