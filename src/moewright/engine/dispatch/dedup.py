"""The de-duplicating all-to-all: a token crosses to a rank once, with the list of its experts
there, and one weighted partial sum comes back (docs/formulas.md 3). It pays where a token has
several experts on a rank. Over nodes it crosses twice: once to each node that it has experts on, to
the rank of its own place there, and from that to ranks of the node; sums are made within the node
and then between nodes. Ranks that hold parts of the same experts gather each other's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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
    permute_to_local_experts,
)
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.model.autograd import count_ids
from moewright.rules.routing import RoundRobinCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One crossing over `group`. `copies` are the rows sent, one a token and place; `send` and
    `receive` count them."""

    group: Group
    copies: RowMap
    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupRoute:
    """`slots`: the rows of the local experts among the slots of the copies that the last leg
    brought, or of those that ETP ranks gathered, each part padded to `widest` copies; `ends` and
    `sent` as in the seam.
    """

    hops: tuple[Hop, ...]
    row_map: RowMap
    padded_length: int
    expert_ends: torch.Tensor
    sent_counts: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _DedupSizes:
    """Copies that each leg sends to and gets from each rank of its group, that each ETP rank got,
    and rows here."""

    hops: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    received_copies: tuple[int, ...]
    local_rows: int


class DedupDispatcher:
    """Dispatch over the groups of `ways`: one of all ranks that share the experts, or that of this
    place in every node and then that of this node. The experts may be cut over the ranks of
    `slices`.
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
        self._ways = tuple(groups)
        self._slices = etp_group
        self._experts = experts
        self._kernels = kernels
        self._known = forced_counts
        self._ranks = prod(way.size for way in groups)

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, DedupRoute]:
        """One copy a token and place; tell each rank how many come, and which experts each of them
        wants."""
        local = self._experts // self._ranks
        sizes, ends, sent = self._agreed(experts_Tk)
        ids, behind, legs = experts_Tk, self._experts, []
        for way, (send, receive) in zip(self._ways, sizes.hops, strict=True):
            behind //= way.size  # experts of one place
            first_Tk = mask_repeats(ids // behind, way.size)
            copies = build_row_map(first_Tk, sum(send), self._kernels)
            wanted = (
                ids[copies.token_of_row] - first_Tk.flatten()[copies.slot_of_row][:, None] * behind
            )
            wanted = wanted.masked_fill((wanted < 0) | (wanted >= behind), behind).to(torch.int32)
            ids = all_to_all(wanted, way, send=send, receive=receive)
            legs.append(Hop(group=way, copies=copies, send=send, receive=receive))
        widest = max(sizes.received_copies)
        if self._slices.size > 1:
            ids = all_gather_rows(pad_rows(ids, widest, local), self._slices)
        slots = build_row_map(ids, sizes.local_rows, self._kernels)
        route = DedupRoute(
            hops=tuple(legs),
            row_map=slots,
            padded_length=widest,
            expert_ends=ends,
            sent_counts=sent,
        )
        return _spread(RoutedRows(rows=x_TH, weights=weights_Tk), legs[0].copies), route

    def _agreed(self, experts_Tk: torch.Tensor) -> tuple[_DedupSizes, torch.Tensor, torch.Tensor]:
        """Sizes that the ranks told each other, `ends` and `sent`. The host waits once, however
        many legs there are."""
        ranks, local = self._ranks, self._experts // self._ranks
        counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        copies = _reached(experts_Tk // local, ranks)
        table, sent, told = (
            torch.cat((counts.view(ranks, local), copies[:, None]), 1),
            [counts, copies],
            [],
        )
        for way in self._ways[:-1]:
            leaving = _reached(experts_Tk // (self._experts // way.size), way.size)
            came = _swap(torch.cat((table.view(way.size, -1), leaving[:, None]), 1), way)
            table = (
                came[:, :-1].sum(0).view(-1, local + 1)
            )  # of what comes to this place, by rank of the node
            sent.append(leaving)
            told += [leaving, came[:, -1]]
        came = _swap(table, self._ways[-1])
        held = all_gather_rows(came, self._slices).view(-1, len(came), local + 1)
        per_expert = held[:, :, :local].sum((0, 1))
        if self._known:
            sizes = self._forced_sizes(self._known(*experts_Tk.shape))
        else:
            told += [
                table[:, local],
                came[:, local],
                held[:, :, local].sum(1),
                per_expert.sum()[None],
            ]
            *legs, parts, (rows,) = copy_to_host(*told)
            sizes = _DedupSizes(
                hops=tuple(zip(legs[::2], legs[1::2], strict=True)),
                received_copies=parts,
                local_rows=rows,
            )
        return sizes, per_expert.cumsum(0).to(torch.int32), torch.cat(sent)

    def _forced_sizes(self, sent: RoundRobinCounts) -> _DedupSizes:
        near, slices = self._ways[-1], self._slices.size
        node = self._ways[0].index if len(self._ways) > 1 else 0
        nodes, local = self._ranks // near.size, self._experts // self._ranks
        here = node * near.size + near.index
        inside = tuple(
            nodes * copies for copies in sent.copies[node * near.size : (node + 1) * near.size]
        )
        legs = [(inside, (inside[near.index],) * near.size)]
        if nodes > 1:
            legs.insert(0, (sent.nodes, (sent.nodes[node],) * nodes))
        coming = inside[near.index] * near.size
        rows = slices * self._ranks * sum(sent.rows[here * local : (here + 1) * local])
        return _DedupSizes(hops=tuple(legs), received_copies=(coming,) * slices, local_rows=rows)

    def dispatch(
        self, routed: RoutedRows, route: DedupRoute, meanwhile: OverlappedWork | None
    ) -> RoutedRows:
        """Copies and weights to the ranks of their experts, `meanwhile` beside the first
        crossing."""
        for number, leg in enumerate(route.hops):
            if number:
                routed, meanwhile = _spread(routed, leg.copies), None
            both = routed.rows, routed.weights
            rows, weights = all_to_all_overlapped(
                both, leg.group, send=leg.send, receive=leg.receive, overlapped_work=meanwhile
            )
            routed = RoutedRows(rows=rows, weights=weights)
        if self._slices.size > 1:
            rows, weights = (
                AllGatherRows.apply(pad_rows(x, route.padded_length), self._slices)
                for x in (rows, weights)
            )
        return RoutedRows(rows=rows, weights=weights)

    def postprocess(self, routed: RoutedRows, route: DedupRoute) -> RoutedRows:
        """A row for each expert here that a copy wants, by expert."""
        return permute_to_local_experts(routed, route.row_map)

    def combine_preprocess(self, rows: torch.Tensor, route: DedupRoute) -> torch.Tensor:
        """The weighted sum of the experts here for each copy."""
        return route.row_map.unpermute(rows)

    def combine(
        self, rows: torch.Tensor, route: DedupRoute, meanwhile: OverlappedWork | None
    ) -> torch.Tensor:
        """Partial sums back to the ranks of their tokens, the parts of cut experts summed and those
        of one node; `meanwhile` beside the last crossing.
        """
        if self._slices.size > 1:
            rows = ReduceScatterRows.apply(rows, self._slices)[: sum(route.hops[-1].receive)]
        for number, leg in reversed(tuple(enumerate(route.hops))):
            beside = None if number else meanwhile
            (rows,) = all_to_all_overlapped(
                (rows,), leg.group, send=leg.receive, receive=leg.send, overlapped_work=beside
            )
            if number:
                rows = leg.copies.unpermute(rows)
        return rows

    def combine_postprocess(self, rows: torch.Tensor, route: DedupRoute) -> torch.Tensor:
        """Sum what the places of the first crossing sent for each token."""
        return route.hops[0].copies.unpermute(rows)


def _spread(routed: RoutedRows, copies: RowMap) -> RoutedRows:
    """A copy takes all weights of its token along; the receiver uses those of its own experts."""
    return RoutedRows(rows=copies.permute(routed.rows), weights=copies.permute(routed.weights))


def _swap(table: torch.Tensor, group: Group) -> torch.Tensor:
    """Row i to rank i, and from each the row that is for this one."""
    return all_to_all(table, group, send=[1] * group.size, receive=[1] * group.size)


def _reached(place_Tk: torch.Tensor, places: int) -> torch.Tensor:
    """How many tokens have one of their experts at each place."""
    return count_ids(mask_repeats(place_Tk, places), places + 1)[:-1]


def mask_repeats(rank_Tk: torch.Tensor, none: int) -> torch.Tensor:
    """Each token's ranks, every one once and the repeats as `none`."""
    top_k = rank_Tk.shape[1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=rank_Tk.device).tril(-1)
    same = rank_Tk[:, :, None] == rank_Tk[:, None, :]
    return rank_Tk.masked_fill((same & earlier).any(2), none)
