"""The all-to-all dispatcher: every (token, expert) pair is one row sent to the expert's rank
(docs/formulas.md 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.comm.collectives import (
    Gather,
    Group,
    ScatterSum,
    all_to_all,
    all_to_all_beside,
    gather,
)
from moewright.engine.dispatch.interface import (
    Known,
    Meanwhile,
    Routed,
    Rows,
    on_host,
    padded,
    sorted_rows,
)
from moewright.engine.kernels.fused.interface import Kernels
from moewright.engine.model.autograd import Place, Reorder, Select, count_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """`slots` are the rows sent; `send` and `receive` count rows a rank of the expert group;
    `regroup` sorts received rows by local expert, None when they already are; `ends` and `sent` as
    in the seam.

    Where experts are cut over ETP, its ranks gather each other's received rows, each padded to
    `widest` rows, and `places` [R] are the rows that are none of the padding, sorted by local
    expert.
    """

    slots: Rows
    send: tuple[int, ...]
    receive: tuple[int, ...]
    regroup: torch.Tensor | None
    ungroup: torch.Tensor | None
    ends: torch.Tensor
    sent: torch.Tensor
    places: torch.Tensor | None
    widest: int


class AllToAll:
    """Dispatch over an expert-parallel group; alone in its group it only sorts. Dropless, uneven
    splits.

    Where experts are cut over an expert-tensor-parallel group, its ranks gather the rows that each
    received, and the sums of their partial outputs go back to where the rows came from.
    """

    def __init__(
        self,
        group: Group,
        slices: Group,
        experts: int,
        kernels: Kernels,
        *,
        known: Known | None,
        drops: bool,
    ) -> None:
        """`drops`: slots may have been dropped."""
        self._group = group
        self._slices = slices
        self._experts = experts
        self._kernels = kernels
        self._known = known
        self._drops = drops

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """Sort (token, slot) pairs by expert and agree with the groups on how many rows go
        where."""
        counts = count_rows(experts_Tk, self._experts + 1)[:-1]
        size, local = self._group.size, self._experts // self._group.size
        received = all_to_all(
            counts, self._group, send=[local] * size, receive=[local] * size
        ).view(size, local)
        held = gather(received, self._slices).view(-1, size, local)
        send, receive, parts = (
            self._known_sizes(self._known(*experts_Tk.shape).rows)
            if self._known
            else on_host(counts.view(size, local).sum(1), received.sum(1), held.sum((1, 2)))
        )
        slots = sorted_rows(experts_Tk, sum(send), self._kernels)
        widest, rows_here = max(parts), sum(parts)
        regroup = ungroup = places = None
        if self._slices.size > 1:
            places = _places(held, widest, rows_here)
        elif size > 1 and local > 1:
            expert = torch.arange(local, device=held.device).repeat(size)
            expert_of_row = expert.repeat_interleave(received.flatten(), output_size=rows_here)
            regroup = torch.argsort(expert_of_row, stable=True)
            ungroup = torch.empty_like(regroup)
            ungroup[regroup] = torch.arange(regroup.numel(), device=held.device)
        route = Route(
            slots=slots,
            send=send,
            receive=receive,
            regroup=regroup,
            ungroup=ungroup,
            ends=held.sum((0, 1)).cumsum(0).to(torch.int32),
            sent=counts,
            places=places,
            widest=widest,
        )
        rows = slots.spread(x_TH)
        if self._drops:
            weights = Select.apply(weights_Tk.flatten(), slots.places)
        else:
            weights = Reorder.apply(weights_Tk.flatten(), slots.places, slots.rows.flatten())
        return Routed(rows=rows, weights=weights), route

    def _known_sizes(self, rows: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        size, local = self._group.size, self._experts // self._group.size
        to = tuple(sum(rows[rank * local : (rank + 1) * local]) for rank in range(size))
        here = to[self._group.index]
        return to, (here,) * size, (here * size,) * self._slices.size

    def dispatch(self, routed: Routed, route: Route, meanwhile: Meanwhile | None) -> Routed:
        """Rows and weights to the ranks of their experts."""
        both = routed.rows, routed.weights
        rows, weights = all_to_all_beside(
            both, self._group, send=route.send, receive=route.receive, meanwhile=meanwhile
        )
        if route.places is not None:
            rows, weights = (
                Gather.apply(padded(x, route.widest), self._slices) for x in (rows, weights)
            )
        return Routed(rows=rows, weights=weights)

    def postprocess(self, routed: Routed, route: Route) -> Routed:
        """Received rows come by source rank; order them by local expert."""
        if route.places is not None:
            return Routed(
                rows=Select.apply(routed.rows, route.places),
                weights=Select.apply(routed.weights, route.places),
            )
        if route.regroup is None:
            return routed
        return Routed(
            rows=Reorder.apply(routed.rows, route.regroup, route.ungroup),
            weights=Reorder.apply(routed.weights, route.regroup, route.ungroup),
        )

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Back to the order of the source ranks."""
        if route.places is not None:
            return Place.apply(rows, route.places, route.widest * self._slices.size)
        return rows if route.regroup is None else Reorder.apply(rows, route.ungroup, route.regroup)

    def combine(
        self, rows: torch.Tensor, route: Route, meanwhile: Meanwhile | None
    ) -> torch.Tensor:
        """Rows back to the ranks of their tokens, the parts of cut experts summed."""
        if route.places is not None:
            rows = ScatterSum.apply(rows, self._slices)[: sum(route.receive)]
        (back,) = all_to_all_beside(
            (rows,), self._group, send=route.receive, receive=route.send, meanwhile=meanwhile
        )
        return back

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Sum the rows of each token: [T*k,H] -> [T,H]."""
        return route.slots.summed(rows)


def _places(held: torch.Tensor, widest: int, rows_here: int) -> torch.Tensor:
    """Rows of the gathered parts that are no padding, by local expert; `held` [parts, sources,
    E_local] counts rows."""
    parts, sources, local = held.shape
    padding = widest - held.sum((1, 2))
    lengths = torch.cat((held.flatten(1), padding[:, None]), 1)
    experts = torch.cat(
        (torch.arange(local, device=held.device).repeat(sources), held.new_full((1,), local))
    )
    expert_of_row = experts.repeat(parts).repeat_interleave(
        lengths.flatten(), output_size=parts * widest
    )
    return torch.argsort(expert_of_row, stable=True)[:rows_here].clone()
