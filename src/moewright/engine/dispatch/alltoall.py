"""The all-to-all dispatcher (docs/formulas.md 3).

Every (token, expert) pair is one row sent to the expert's rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moewright.engine.comm.autograd_collectives import AllGatherRows, ReduceScatterRows, all_to_all
from moewright.engine.comm.collectives import Group, all_gather_rows
from moewright.engine.dispatch.interface import (
    ForcedCounts,
    RoutedRows,
    RowExchange,
    RowMap,
    build_row_map,
    copy_to_host,
    pad_rows,
)
from moewright.engine.dispatch.rows import ReorderRows, ScatterRows, SelectRows, count_ids
from moewright.engine.kernels.fused.interface import KernelSet


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllRoute:
    """The route of one batch of tokens.

    `row_map` has the rows sent; `send` and `receive` count the rows for and from each rank of the
    expert group; `expert_order` sorts received rows by local expert and `source_order` sorts them
    back, both None when the rows are sorted as they come; `expert_ends` and `sent_counts` as in
    TokenDispatcher.

    Where experts are sharded over ETP, its ranks gather each other's received rows, each padded to
    `padded_length` rows, and `unpadded_rows` [R] are the gathered rows that are not padding, sorted
    by local expert.
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


class MappedRows(NamedTuple):
    """What a dispatcher knows of the rows to send before the host reads how many there are.

    `counts` [E] are those of this rank, `received` [ep, E_local] those that it gets, `gathered`
    [etp, ep, E_local] those of its ETP group; the others as in RowMap.
    """

    counts: torch.Tensor
    received: torch.Tensor
    gathered: torch.Tensor
    token_of_row: torch.Tensor
    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor


class AllToAllDispatcher:
    """A dropless dispatcher over an expert-parallel group, with uneven splits.

    Alone in its group it only sorts. Where experts are sharded over an expert-tensor-parallel
    group, its ranks gather the rows that each received, and the sums of their partial outputs go
    back to where the rows came from.
    """

    def __init__(
        self,
        ep_group: Group,
        etp_group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        forced_counts: ForcedCounts | None,
        may_drop: bool,
    ) -> None:
        """Prepare for `experts` experts; `may_drop`: slots may have been dropped."""
        self._ep_group = ep_group
        self._etp_group = etp_group
        self._experts = experts
        self._local_experts = experts // ep_group.size
        self._kernels = kernels
        self._forced_counts = forced_counts
        self._may_drop = may_drop

    def map_rows(self, experts_Tk: torch.Tensor) -> MappedRows:
        """Sort (token, slot) pairs by expert, none of which was dropped, and exchange counts.

        The host reads nothing, so that a graph may do it.
        """
        row_map = build_row_map(experts_Tk, experts_Tk.numel(), self._kernels)
        return MappedRows(
            *self._exchange_counts(experts_Tk),
            token_of_row=row_map.token_of_row,
            row_of_slot=row_map.row_of_slot,
            slot_of_row=row_map.slot_of_row,
        )

    def _exchange_counts(
        self, experts_Tk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `counts`, `received` and `gathered` of MappedRows."""
        ep = self._ep_group.size
        local = self._local_experts
        # Dropped slots have id E: they are counted in a place of their own, which is cut off.
        counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        splits = [local] * ep
        received = all_to_all(counts, self._ep_group, send=splits, receive=splits).view(ep, local)
        gathered = all_gather_rows(received, self._etp_group).view(-1, ep, local)
        return counts, received, gathered

    def _restore_map(self, mapped: MappedRows, *, is_complete: bool) -> RowMap:
        return RowMap(
            token_of_row=mapped.token_of_row,
            row_of_slot=mapped.row_of_slot,
            slot_of_row=mapped.slot_of_row,
            is_complete=is_complete,
            kernels=self._kernels,
        )

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, AllToAllRoute]:
        """Sort (token, slot) pairs by expert; agree with the groups on how many rows go where.

        `mapped` is what `map_rows` returned of the choice, where that has run already.
        """
        ep = self._ep_group.size
        local = self._local_experts
        mapped_rows = MappedRows(*mapped) if mapped else None
        counts, received, gathered = (
            mapped_rows[:3] if mapped_rows else self._exchange_counts(experts_Tk)
        )
        # The host must know the sizes of what it sends and allocates: its one wait in a layer.
        if self._forced_counts:
            sizes = self._forced_sizes(self._forced_counts)
        else:
            sizes = copy_to_host(
                counts.view(ep, local).sum(1), received.sum(1), gathered.sum((1, 2))
            )
        send, receive, etp_rows = sizes
        if mapped_rows is None:
            row_map = build_row_map(experts_Tk, sum(send), self._kernels)
        else:
            row_map = self._restore_map(mapped_rows, is_complete=True)
        padded_length = max(etp_rows)
        # One source, or one expert: the rows come sorted by expert already.
        expert_order = source_order = unpadded_rows = None
        if self._etp_group.size > 1:
            unpadded_rows = _find_unpadded_rows(gathered, padded_length, sum(etp_rows))
        elif ep > 1 and local > 1:
            expert_order = _sort_by_expert(received, sum(etp_rows))
            source_order = torch.empty_like(expert_order)
            source_order[expert_order] = torch.arange(
                expert_order.numel(), device=expert_order.device
            )
        route = AllToAllRoute(
            row_map=row_map,
            send=send,
            receive=receive,
            expert_order=expert_order,
            source_order=source_order,
            # torch's grouped product takes its offsets as int32.
            expert_ends=gathered.sum((0, 1)).cumsum(0).to(torch.int32),
            sent_counts=counts,
            unpadded_rows=unpadded_rows,
            padded_length=padded_length,
        )
        rows = row_map.permute(x_TH)
        # Where every slot has a row the order is a permutation, whose backward is a gather by the
        # inverse; with dropped slots it is a scatter into zeros.
        if self._may_drop:
            weights = SelectRows.apply(weights_Tk.flatten(), row_map.slot_of_row)
        else:
            weights = ReorderRows.apply(
                weights_Tk.flatten(), row_map.slot_of_row, row_map.row_of_slot.flatten()
            )
        return RoutedRows(rows=rows, weights=weights), route

    def _forced_sizes(self, sent: ForcedCounts) -> tuple[tuple[int, ...], ...]:
        """Return the row counts under forced routing.

        They are the rows sent to each EP rank, received from each, and received by each ETP rank.
        """
        ep_rank = self._ep_group.index
        local = self._local_experts
        own = sent[self._etp_group.index]
        send = tuple(
            sum(own[ep_rank].rows[rank * local : (rank + 1) * local]) for rank in range(len(own))
        )
        block = slice(ep_rank * local, (ep_rank + 1) * local)
        received = [tuple(sum(source.rows[block]) for source in sources) for sources in sent]
        return send, received[self._etp_group.index], tuple(map(sum, received))

    def dispatch(
        self, routed: RoutedRows, route: AllToAllRoute, exchange: RowExchange
    ) -> RoutedRows:
        """Send rows and weights to the ranks of their experts."""
        rows, weights = exchange(
            (routed.rows, routed.weights),
            self._ep_group,
            send=route.send,
            receive=route.receive,
        )
        if route.unpadded_rows is not None:
            # An all-gather has equal parts, and the ranks of an ETP group received as many rows as
            # their EP groups sent them: each is padded to the longest.
            rows, weights = (
                AllGatherRows.apply(pad_rows(x, route.padded_length), self._etp_group)
                for x in (rows, weights)
            )
        return RoutedRows(rows=rows, weights=weights)

    def postprocess(self, routed: RoutedRows, route: AllToAllRoute) -> RoutedRows:
        """Order the received rows, which come by source rank, by local expert."""
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
        """Bring the rows back to the order of the source ranks."""
        if route.unpadded_rows is not None:
            gathered_length = route.padded_length * self._etp_group.size
            return ScatterRows.apply(rows, route.unpadded_rows, gathered_length)
        if route.expert_order is None:
            return rows
        return ReorderRows.apply(rows, route.source_order, route.expert_order)

    def combine(
        self, rows: torch.Tensor, route: AllToAllRoute, exchange: RowExchange
    ) -> torch.Tensor:
        """Send rows back to the ranks of their tokens, the parts of sharded experts summed."""
        if route.unpadded_rows is not None:
            # Without the padding up to the longest part of the ETP ranks.
            rows = ReduceScatterRows.apply(rows, self._etp_group)[: sum(route.receive)]
        (returned,) = exchange(
            (rows,),
            self._ep_group,
            send=route.receive,
            receive=route.send,
        )
        return returned

    def combine_postprocess(self, rows: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Sum the rows of each token: [T*k,H] -> [T,H]."""
        return route.row_map.unpermute(rows)


def _sort_by_expert(received: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the order of received rows by local expert; `received` [sources, E_local] counts."""
    sources, local = received.shape
    experts = torch.arange(local, device=received.device).repeat(sources)
    expert_of_row = experts.repeat_interleave(received.flatten(), output_size=rows)
    # Stable: the rows of an expert stay in the order of their sources, so that the sums over them
    # are the same in every run.
    return torch.argsort(expert_of_row, stable=True)


def _find_unpadded_rows(gathered: torch.Tensor, padded_length: int, rows: int) -> torch.Tensor:
    """Return the indices of the gathered rows that are not padding, sorted by local expert.

    `gathered` [ETP ranks, sources, E_local] counts rows.
    """
    etp, sources, local = gathered.shape
    padding = padded_length - gathered.sum((1, 2))
    lengths = torch.cat((gathered.flatten(1), padding[:, None]), 1)
    experts = torch.cat(
        (
            torch.arange(local, device=gathered.device).repeat(sources),
            gathered.new_full((1,), local),
        )
    )
    expert_of_row = experts.repeat(etp).repeat_interleave(
        lengths.flatten(), output_size=etp * padded_length
    )
    # Padding has the highest id and lies last. The clone lets go of its part of the storage, which
    # the route would keep until backward.
    return torch.argsort(expert_of_row, stable=True)[:rows].clone()
