"""The de-duplicating all-to-all dispatcher (docs/formulas.md 3).

A token crosses to a rank once, with the list of its experts there, and one weighted partial sum
comes back. It pays where a token has several experts on a rank. Over two hops a token crosses once
to each node that has experts for it, to the rank with the sender's index in the node, and from that
rank to the ranks of the node; partial sums are made within the node, then between nodes.
Ranks that hold parts of the same experts gather each other's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from moewright.engine.comm.autograd_collectives import (
    AllGatherRows,
    ReduceScatterRows,
    all_to_all,
    all_to_all_in_turn,
)
from moewright.engine.comm.collectives import Group, all_gather_rows
from moewright.engine.dispatch.interface import (
    ForcedCounts,
    RoutedRows,
    RowExchange,
    RowMap,
    build_row_map,
    copy_to_host,
    pad_rows,
    permute_to_local_experts,
)
from moewright.engine.dispatch.rows import count_ids
from moewright.engine.kernels.fused.interface import KernelSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One exchange over `group`, between nodes or between ranks.

    `copies` maps tokens to the rows sent, one per token and destination; `send` and `receive` count
    these rows for and from each destination.
    """

    group: Group
    copies: RowMap
    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupRoute:
    """The route of one batch of tokens.

    `row_map` has the rows of the local experts among the slots of the copies that the last hop
    brought, or of those that ETP ranks gathered, each part padded to `padded_length` copies;
    `expert_ends` and `sent_counts` as in TokenDispatcher.
    """

    hops: tuple[Hop, ...]
    row_map: RowMap
    padded_length: int
    expert_ends: torch.Tensor
    sent_counts: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _DedupSizes:
    """The sizes that ranks agree on.

    `hops` has, for each hop, the copies sent to and received from each rank of its group;
    `received_copies` counts the copies that each ETP rank received, `local_rows` the rows of this
    rank's experts.
    """

    hops: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    received_copies: tuple[int, ...]
    local_rows: int


class DedupDispatcher:
    """A dispatcher over one group of all ranks that share the experts, or over two hops.

    Over two hops `groups` are first the ranks of this rank's index in every node, then the ranks of
    this node. The experts may be sharded over the ranks of `etp_group`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        etp_group: Group,
        experts: int,
        kernels: KernelSet,
        *,
        forced_counts: ForcedCounts | None,
    ) -> None:
        self._groups = tuple(groups)
        self._etp_group = etp_group
        self._experts = experts
        self._kernels = kernels
        self._forced_counts = forced_counts
        self._ranks = prod(group.size for group in groups)
        self._local_experts = experts // self._ranks

    def map_rows(self, experts_Tk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return nothing: ids of experts travel in parts whose sizes the host reads."""
        return ()

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, DedupRoute]:
        """Copy each token once per destination.

        Each rank is told how many copies come, and which experts each of them has.
        """
        sizes, expert_ends, sent_counts = self._exchange_sizes(experts_Tk)
        ids = experts_Tk
        experts_behind = self._experts  # those behind one destination of the hop
        hops = []
        for group, (send, receive) in zip(self._groups, sizes.hops, strict=True):
            experts_behind //= group.size
            # Once for each destination, however many experts of a token are behind it.
            destinations_Tk = mask_repeats(ids // experts_behind, group.size)
            copies = build_row_map(destinations_Tk, sum(send), self._kernels)
            first_expert = destinations_Tk.flatten()[copies.slot_of_row][:, None] * experts_behind
            sent_ids = ids[copies.token_of_row] - first_expert
            is_elsewhere = (sent_ids < 0) | (sent_ids >= experts_behind)
            # In 32 bits, for all ids of a token travel with each of its copies.
            sent_ids = sent_ids.masked_fill(is_elsewhere, experts_behind).to(torch.int32)
            ids = all_to_all(sent_ids, group, send=send, receive=receive)
            hops.append(Hop(group=group, copies=copies, send=send, receive=receive))
        padded_length = max(sizes.received_copies)
        if self._etp_group.size > 1:
            # An id past the last expert: padding has no row.
            padded_ids = pad_rows(ids, padded_length, self._local_experts)
            ids = all_gather_rows(padded_ids, self._etp_group)
        route = DedupRoute(
            hops=tuple(hops),
            row_map=build_row_map(ids, sizes.local_rows, self._kernels),
            padded_length=padded_length,
            expert_ends=expert_ends,
            sent_counts=sent_counts,
        )
        return _copy_rows(RoutedRows(rows=x_TH, weights=weights_Tk), hops[0].copies), route

    def _exchange_sizes(
        self, experts_Tk: torch.Tensor
    ) -> tuple[_DedupSizes, torch.Tensor, torch.Tensor]:
        """Return the sizes that the ranks told each other, `expert_ends` and `sent_counts`.

        The host waits once, however many hops there are.
        """
        ranks, local = self._ranks, self._local_experts
        counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        copies = _count_reaching_tokens(experts_Tk // local, ranks)
        # Rows to each expert of a rank, then copies to that rank.
        table = torch.cat((counts.view(ranks, local), copies[:, None]), 1)
        sent_counts = [counts, copies]
        sizes_on_device = []
        for group in self._groups[:-1]:
            leaving = _count_reaching_tokens(
                experts_Tk // (self._experts // group.size), group.size
            )
            received = _exchange_rows(
                torch.cat((table.view(group.size, -1), leaving[:, None]), 1), group
            )
            # What arrives at this rank, by its destination rank in the node.
            table = received[:, :-1].sum(0).view(-1, local + 1)
            sent_counts.append(leaving)
            sizes_on_device += [leaving, received[:, -1]]
        received = _exchange_rows(table, self._groups[-1])
        gathered = all_gather_rows(received, self._etp_group).view(-1, len(received), local + 1)
        per_expert = gathered[:, :, :local].sum((0, 1))
        if self._forced_counts:
            sizes = self._forced_sizes(self._forced_counts)
        else:
            sizes_on_device += [
                table[:, local],
                received[:, local],
                gathered[:, :, local].sum(1),
                per_expert.sum()[None],
            ]
            *hop_sizes, received_copies, (local_rows,) = copy_to_host(*sizes_on_device)
            sizes = _DedupSizes(
                hops=tuple(zip(hop_sizes[::2], hop_sizes[1::2], strict=True)),
                received_copies=received_copies,
                local_rows=local_rows,
            )
        return sizes, per_expert.cumsum(0).to(torch.int32), torch.cat(sent_counts)

    def _forced_sizes(self, sent: ForcedCounts) -> _DedupSizes:
        near = self._groups[-1]
        node = 0
        if len(self._groups) > 1:
            node = self._groups[0].index
        nodes = self._ranks // near.size
        rank = node * near.size + near.index
        sources = sent[self._etp_group.index]
        of_node = slice(node * near.size, (node + 1) * near.size)
        # What came to each rank of this node goes on to its ranks.
        forwarded = [
            [source.copies[of_node] for source in sources[place :: near.size]]
            for place in range(near.size)
        ]
        near_send = tuple(map(sum, zip(*forwarded[near.index], strict=True)))
        near_receive = tuple(sum(copies[near.index] for copies in came) for came in forwarded)
        hops = [(near_send, near_receive)]
        if nodes > 1:
            same_place = sources[near.index :: near.size]
            hops.insert(0, (sources[rank].nodes, tuple(peer.nodes[node] for peer in same_place)))
        block = slice(rank * self._local_experts, (rank + 1) * self._local_experts)
        return _DedupSizes(
            hops=tuple(hops),
            received_copies=tuple(sum(source.copies[rank] for source in group) for group in sent),
            local_rows=sum(sum(source.rows[block]) for group in sent for source in group),
        )

    def dispatch(self, routed: RoutedRows, route: DedupRoute, exchange: RowExchange) -> RoutedRows:
        """Send copies and weights to the ranks of their experts, overlapping the first hop."""
        for number, hop in enumerate(route.hops):
            if number:
                routed = _copy_rows(routed, hop.copies)
            exchange_hop = all_to_all_in_turn if number else exchange
            rows, weights = exchange_hop(
                (routed.rows, routed.weights), hop.group, send=hop.send, receive=hop.receive
            )
            routed = RoutedRows(rows=rows, weights=weights)
        if self._etp_group.size > 1:
            rows, weights = (
                AllGatherRows.apply(pad_rows(x, route.padded_length), self._etp_group)
                for x in (rows, weights)
            )
        return RoutedRows(rows=rows, weights=weights)

    def postprocess(self, routed: RoutedRows, route: DedupRoute) -> RoutedRows:
        """Make a row for each local expert that a copy has, by expert."""
        return permute_to_local_experts(routed, route.row_map)

    def combine_preprocess(self, rows: torch.Tensor, route: DedupRoute) -> torch.Tensor:
        """Sum the weighted outputs of the local experts for each copy."""
        return route.row_map.unpermute(rows)

    def combine(self, rows: torch.Tensor, route: DedupRoute, exchange: RowExchange) -> torch.Tensor:
        """Send partial sums back to the ranks of their tokens, overlapping the last hop.

        The parts of sharded experts are summed on the way, and those of one node.
        """
        if self._etp_group.size > 1:
            received = sum(route.hops[-1].receive)
            # Without the padding up to the longest part of the ETP ranks.
            rows = ReduceScatterRows.apply(rows, self._etp_group)[:received]
        for number, hop in reversed(tuple(enumerate(route.hops))):
            exchange_hop = all_to_all_in_turn if number else exchange
            (rows,) = exchange_hop((rows,), hop.group, send=hop.receive, receive=hop.send)
            if number:
                rows = hop.copies.unpermute(rows)
        return rows

    def combine_postprocess(self, rows: torch.Tensor, route: DedupRoute) -> torch.Tensor:
        """Sum what the destinations of the first hop sent back for each token."""
        return route.hops[0].copies.unpermute(rows)


def _copy_rows(routed: RoutedRows, copies: RowMap) -> RoutedRows:
    """Copy rows, each with all weights of its token; the receiver uses those of its own experts."""
    return RoutedRows(rows=copies.permute(routed.rows), weights=copies.permute(routed.weights))


def _exchange_rows(table: torch.Tensor, group: Group) -> torch.Tensor:
    """Send row i to rank i, and return the rows for this rank by source."""
    return all_to_all(table, group, send=[1] * group.size, receive=[1] * group.size)


def _count_reaching_tokens(destinations_Tk: torch.Tensor, destinations: int) -> torch.Tensor:
    """Count, for each destination, the tokens that have at least one expert there."""
    return count_ids(mask_repeats(destinations_Tk, destinations), destinations + 1)[:-1]


def mask_repeats(rank_Tk: torch.Tensor, none: int) -> torch.Tensor:
    """Return each token's ranks with every repeat replaced by `none`."""
    top_k = rank_Tk.shape[1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=rank_Tk.device).tril(-1)
    same = rank_Tk[:, :, None] == rank_Tk[:, None, :]
    return rank_Tk.masked_fill((same & earlier).any(2), none)
