"""The all-to-all dispatcher: every (token, expert) pair is one row sent to the expert's rank
(docs/formulas.md 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.comm.collectives import (
    AllGatherRows,
    Group,
    ReduceScatterRows,
    all_gather_rows,
    all_to_all,
    all_to_all_overlapped,
)
from moewright.engine.dispatch.interface import (
    ForcedCounts,
    OverlappedWork,
    RoutedRows,
    RowMap,
    build_row_map,
    copy_to_host,
    pad_rows,
)
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.model.autograd import ReorderRows, ScatterRows, SelectRows, count_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllRoute:
    """`slots` are the rows sent; `send` and `receive` count rows a rank of the expert group;
    `regroup` sorts received rows by local expert, None when they already are; `ends` and `sent` as
    in the seam.

    Where experts are cut over ETP, its ranks gather each other's received rows, each padded to
    `widest` rows, and `places` [R] are the rows that are none of the padding, sorted by local
    expert.
    """

    row_map: RowMap
    send: tuple[int, ...]
    receive: tuple[int, ...]
    expert_order: torch.Tensor | None
    source_order: torch.Tensor | None
    expert_ends: torch.Tensor
    sent_counts: torch.Tensor
    unpadded_rows: torch.Tensor | None
    padded_length: int


class AllToAllDispatcher:
    """Dispatch over an expert-parallel group; alone in its group it only sorts. Dropless, uneven
    splits.

    Where experts are cut over an expert-tensor-parallel group, its ranks gather the rows that each
    received, and the sums of their partial outputs go back to where the rows came from.
    """

    def __init__(
        self,
        group: Group,
        etp_group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        forced_counts: ForcedCounts | None,
        may_drop: bool,
    ) -> None:
        """`drops`: slots may have been dropped."""
        self._group = group
        self._slices = etp_group
        self._experts = experts
        self._kernels = kernels
        self._known = forced_counts
        self._drops = may_drop

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, AllToAllRoute]:
        """Sort (token, slot) pairs by expert and agree with the groups on how many rows go
        where."""
        counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        size, local = self._group.size, self._experts // self._group.size
        received = all_to_all(
            counts, self._group, send=[local] * size, receive=[local] * size
        ).view(size, local)
        held = all_gather_rows(received, self._slices).view(-1, size, local)
        send, receive, parts = (
            self._forced_sizes(self._known(*experts_Tk.shape).rows)
            if self._known
            else copy_to_host(counts.view(size, local).sum(1), received.sum(1), held.sum((1, 2)))
        )
        slots = build_row_map(experts_Tk, sum(send), self._kernels)
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
        route = AllToAllRoute(
            row_map=slots,
            send=send,
            receive=receive,
            expert_order=regroup,
            source_order=ungroup,
            expert_ends=held.sum((0, 1)).cumsum(0).to(torch.int32),
            sent_counts=counts,
            unpadded_rows=places,
            padded_length=widest,
        )
        rows = slots.permute(x_TH)
        if self._drops:
            weights = SelectRows.apply(weights_Tk.flatten(), slots.slot_of_row)
        else:
            weights = ReorderRows.apply(
                weights_Tk.flatten(), slots.slot_of_row, slots.row_of_slot.flatten()
            )
        return RoutedRows(rows=rows, weights=weights), route

    def _forced_sizes(self, rows: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        size, local = self._group.size, self._experts // self._group.size
        to = tuple(sum(rows[rank * local : (rank + 1) * local]) for rank in range(size))
        here = to[self._group.index]
        return to, (here,) * size, (here * size,) * self._slices.size

    def dispatch(
        self, routed: RoutedRows, route: AllToAllRoute, meanwhile: OverlappedWork | None
    ) -> RoutedRows:
        """Rows and weights to the ranks of their experts."""
        both = routed.rows, routed.weights
        rows, weights = all_to_all_overlapped(
            both, self._group, send=route.send, receive=route.receive, overlapped_work=meanwhile
        )
        if route.unpadded_rows is not None:
            rows, weights = (
                AllGatherRows.apply(pad_rows(x, route.padded_length), self._slices)
                for x in (rows, weights)
            )
        return RoutedRows(rows=rows, weights=weights)

    def postprocess(self, routed: RoutedRows, route: AllToAllRoute) -> RoutedRows:
        """Received rows come by source rank; order them by local expert."""
        if route.unpadded_rows is not None:
            return RoutedRows(
                rows=SelectRows.apply(routed.rows, route.unpadded_rows),
                weights=SelectRows.apply(routed.weights, route.unpadded_rows),
            )
        if route.expert_order is None:
            return routed
        return RoutedRows(
            rows=ReorderRows.apply(routed.rows, route.expert_order, route.source_order),
            weights=ReorderRows.apply(routed.weights, route.expert_order, route.source_order),
        )

    def combine_preprocess(self, rows: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Back to the order of the source ranks."""
        if route.unpadded_rows is not None:
            return ScatterRows.apply(
                rows, route.unpadded_rows, route.padded_length * self._slices.size
            )
        return (
            rows
            if route.expert_order is None
            else ReorderRows.apply(rows, route.source_order, route.expert_order)
        )

    def combine(
        self, rows: torch.Tensor, route: AllToAllRoute, meanwhile: OverlappedWork | None
    ) -> torch.Tensor:
        """Rows back to the ranks of their tokens, the parts of cut experts summed."""
        if route.unpadded_rows is not None:
            rows = ReduceScatterRows.apply(rows, self._slices)[: sum(route.receive)]
        (back,) = all_to_all_overlapped(
            (rows,), self._group, send=route.receive, receive=route.send, overlapped_work=meanwhile
        )
        return back

    def combine_postprocess(self, rows: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Sum the rows of each token: [T*k,H] -> [T,H]."""
        return route.row_map.unpermute(rows)


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
