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
    wanted_rows,
)
from moewright.engine.kernels.fused.interface import Kernels
from moewright.engine.model.autograd import count_rows
from moewright.rules.routing import InTurn


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One crossing over `group`. `copies` are the rows sent, one a token and place; `send` and
    `receive` count them."""

    group: Group
    copies: Rows
    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """`slots`: the rows of the local experts among the slots of the copies that the last leg
    brought, or of those that ETP ranks gathered, each part padded to `widest` copies; `ends` and
    `sent` as in the seam.
    """

    legs: tuple[Leg, ...]
    slots: Rows
    widest: int
    ends: torch.Tensor
    sent: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Copies that each leg sends to and gets from each rank of its group, that each ETP rank got,
    and rows here."""

    legs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    parts: tuple[int, ...]
    rows: int


class Dedup:
    """Dispatch over the groups of `ways`: one of all ranks that share the experts, or that of this
    place in every node and then that of this node. The experts may be cut over the ranks of
    `slices`.
    """

    def __init__(
        self,
        ways: Sequence[Group],
        slices: Group,
        experts: int,
        kernels: Kernels,
        *,
        known: Known | None,
    ) -> None:
        self._ways = tuple(ways)
        self._slices = slices
        self._experts = experts
        self._kernels = kernels
        self._known = known
        self._ranks = prod(way.size for way in ways)

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """One copy a token and place; tell each rank how many come, and which experts each of them
        wants."""
        local = self._experts // self._ranks
        sizes, ends, sent = self._agreed(experts_Tk)
        ids, behind, legs = experts_Tk, self._experts, []
        for way, (send, receive) in zip(self._ways, sizes.legs, strict=True):
            behind //= way.size  # experts of one place
            first_Tk = first_of_each(ids // behind, way.size)
            copies = sorted_rows(first_Tk, sum(send), self._kernels)
            wanted = ids[copies.tokens] - first_Tk.flatten()[copies.places][:, None] * behind
            wanted = wanted.masked_fill((wanted < 0) | (wanted >= behind), behind).to(torch.int32)
            ids = all_to_all(wanted, way, send=send, receive=receive)
            legs.append(Leg(group=way, copies=copies, send=send, receive=receive))
        widest = max(sizes.parts)
        if self._slices.size > 1:
            ids = gather(padded(ids, widest, local), self._slices)
        slots = sorted_rows(ids, sizes.rows, self._kernels)
        route = Route(legs=tuple(legs), slots=slots, widest=widest, ends=ends, sent=sent)
        return _spread(Routed(rows=x_TH, weights=weights_Tk), legs[0].copies), route

    def _agreed(self, experts_Tk: torch.Tensor) -> tuple[_Sizes, torch.Tensor, torch.Tensor]:
        """Sizes that the ranks told each other, `ends` and `sent`. The host waits once, however
        many legs there are."""
        ranks, local = self._ranks, self._experts // self._ranks
        counts = count_rows(experts_Tk, self._experts + 1)[:-1]
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
        held = gather(came, self._slices).view(-1, len(came), local + 1)
        per_expert = held[:, :, :local].sum((0, 1))
        if self._known:
            sizes = self._known_sizes(self._known(*experts_Tk.shape))
        else:
            told += [
                table[:, local],
                came[:, local],
                held[:, :, local].sum(1),
                per_expert.sum()[None],
            ]
            *legs, parts, (rows,) = on_host(*told)
            sizes = _Sizes(
                legs=tuple(zip(legs[::2], legs[1::2], strict=True)), parts=parts, rows=rows
            )
        return sizes, per_expert.cumsum(0).to(torch.int32), torch.cat(sent)

    def _known_sizes(self, sent: InTurn) -> _Sizes:
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
        return _Sizes(legs=tuple(legs), parts=(coming,) * slices, rows=rows)

    def dispatch(self, routed: Routed, route: Route, meanwhile: Meanwhile | None) -> Routed:
        """Copies and weights to the ranks of their experts, `meanwhile` beside the first
        crossing."""
        for number, leg in enumerate(route.legs):
            if number:
                routed, meanwhile = _spread(routed, leg.copies), None
            both = routed.rows, routed.weights
            rows, weights = all_to_all_beside(
                both, leg.group, send=leg.send, receive=leg.receive, meanwhile=meanwhile
            )
            routed = Routed(rows=rows, weights=weights)
        if self._slices.size > 1:
            rows, weights = (
                Gather.apply(padded(x, route.widest), self._slices) for x in (rows, weights)
            )
        return Routed(rows=rows, weights=weights)

    def postprocess(self, routed: Routed, route: Route) -> Routed:
        """A row for each expert here that a copy wants, by expert."""
        return wanted_rows(routed, route.slots)

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """The weighted sum of the experts here for each copy."""
        return route.slots.summed(rows)

    def combine(
        self, rows: torch.Tensor, route: Route, meanwhile: Meanwhile | None
    ) -> torch.Tensor:
        """Partial sums back to the ranks of their tokens, the parts of cut experts summed and those
        of one node; `meanwhile` beside the last crossing.
        """
        if self._slices.size > 1:
            rows = ScatterSum.apply(rows, self._slices)[: sum(route.legs[-1].receive)]
        for number, leg in reversed(tuple(enumerate(route.legs))):
            beside = None if number else meanwhile
            (rows,) = all_to_all_beside(
                (rows,), leg.group, send=leg.receive, receive=leg.send, meanwhile=beside
            )
            if number:
                rows = leg.copies.summed(rows)
        return rows

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Sum what the places of the first crossing sent for each token."""
        return route.legs[0].copies.summed(rows)


def _spread(routed: Routed, copies: Rows) -> Routed:
    """A copy takes all weights of its token along; the receiver uses those of its own experts."""
    return Routed(rows=copies.spread(routed.rows), weights=copies.spread(routed.weights))


def _swap(table: torch.Tensor, group: Group) -> torch.Tensor:
    """Row i to rank i, and from each the row that is for this one."""
    return all_to_all(table, group, send=[1] * group.size, receive=[1] * group.size)


def _reached(place_Tk: torch.Tensor, places: int) -> torch.Tensor:
    """How many tokens have one of their experts at each place."""
    return count_rows(first_of_each(place_Tk, places), places + 1)[:-1]


def first_of_each(rank_Tk: torch.Tensor, none: int) -> torch.Tensor:
    """Each token's ranks, every one once and the repeats as `none`."""
    top_k = rank_Tk.shape[1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=rank_Tk.device).tril(-1)
    same = rank_Tk[:, :, None] == rank_Tk[:, None, :]
    return rank_Tk.masked_fill((same & earlier).any(2), none)
