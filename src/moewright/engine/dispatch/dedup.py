"""The de-duplicating all-to-all: a token crosses to a rank once, with the list of its experts there, and one weighted
partial sum comes back (docs/formulas.md 3). It pays where a token has several experts on a rank. Ranks that hold parts
of the same experts gather each other's copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moewright.engine.collectives import Gather, Group, ScatterSum, all_to_all, all_to_all_beside, gather
from moewright.engine.dispatch.seam import Known, Meanwhile, Routed, Rows, on_host, padded, sorted_rows, wanted_rows
from moewright.engine.model.functions import Spread, SumSlots, count_rows
from moewright.rules.routing import InTurn


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """`copies` are the rows sent, one a token and rank; `slots` the rows of the local experts among the slots of the
    received copies, or of those that ETP ranks gathered, each part padded to `widest` copies; `send` and `receive`
    count copies a rank; `ends` and `sent` as in the seam.
    """

    copies: Rows
    slots: Rows
    send: tuple[int, ...]
    receive: tuple[int, ...]
    widest: int
    ends: torch.Tensor
    sent: torch.Tensor


class Dedup:
    """Dispatch over an expert-parallel group, whose experts may be cut over the ranks of `slices`."""

    def __init__(self, group: Group, slices: Group, experts: int, *, known: Known | None) -> None:
        self._group = group
        self._slices = slices
        self._experts = experts
        self._known = known

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[Routed, Route]:
        """One copy a token and rank; tell each rank how many come, and which experts each of them wants."""
        group, size, local = self._group, self._group.size, self._experts // self._group.size
        counts = count_rows(experts_Tk, self._experts + 1)[:-1].view(size, local)
        rank_Tk = experts_Tk // local
        first_Tk = first_of_each(rank_Tk, size)
        sent = count_rows(first_Tk, size + 1)[:-1]
        told = all_to_all(torch.cat((counts, sent[:, None]), 1), group, send=[1] * size, receive=[1] * size)
        held = gather(told, self._slices).view(-1, size, local + 1)
        per_expert = held[:, :, :local].sum((0, 1))
        send, receive, parts, rows = (
            self._known_sizes(self._known(*experts_Tk.shape))
            if self._known
            else on_host(sent, told[:, local], held[:, :, local].sum(1), per_expert.sum()[None])
        )
        copies = sorted_rows(first_Tk, sum(send))
        rank_of_copy = first_Tk.flatten()[copies.places]
        wanted = experts_Tk[copies.tokens] - rank_of_copy[:, None] * local
        wanted = wanted.masked_fill((wanted < 0) | (wanted >= local), local).to(torch.int32)
        wanted, widest = all_to_all(wanted, group, send=send, receive=receive), max(parts)
        if self._slices.size > 1:
            wanted = gather(padded(wanted, widest, local), self._slices)
        route = Route(
            copies=copies,
            slots=sorted_rows(wanted, rows[0]),
            send=send,
            receive=receive,
            widest=widest,
            ends=per_expert.cumsum(0).to(torch.int32),
            sent=torch.cat((counts.flatten(), sent)),
        )
        # A copy takes all weights of its token along; the receiver uses those of its own experts.
        return (
            Routed(
                rows=Spread.apply(x_TH, copies.tokens, copies.rows, copies.full),
                weights=Spread.apply(weights_Tk, copies.tokens, copies.rows, copies.full),
            ),
            route,
        )

    def _known_sizes(self, sent: InTurn) -> tuple[tuple[int, ...], ...]:
        size, local, here = self._group.size, self._experts // self._group.size, self._group.index
        coming, slices = (sent.copies[here],) * size, self._slices.size
        rows = slices * size * sum(sent.rows[here * local : (here + 1) * local])
        return sent.copies, coming, (sum(coming),) * slices, (rows,)

    def dispatch(self, routed: Routed, route: Route, meanwhile: Meanwhile | None) -> Routed:
        """Copies and weights to the ranks of their experts."""
        both = routed.rows, routed.weights
        rows, weights = all_to_all_beside(
            both, self._group, send=route.send, receive=route.receive, meanwhile=meanwhile
        )
        if self._slices.size > 1:
            rows, weights = (Gather.apply(padded(x, route.widest), self._slices) for x in (rows, weights))
        return Routed(rows=rows, weights=weights)

    def postprocess(self, routed: Routed, route: Route) -> Routed:
        """A row for each expert here that a copy wants, by expert."""
        return wanted_rows(routed, route.slots)

    def combine_preprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """The weighted sum of the experts here for each copy."""
        return SumSlots.apply(rows, route.slots.tokens, route.slots.rows, route.slots.full)

    def combine(self, rows: torch.Tensor, route: Route, meanwhile: Meanwhile | None) -> torch.Tensor:
        """Partial sums back to the ranks of their tokens, the parts of cut experts summed."""
        if self._slices.size > 1:
            rows = ScatterSum.apply(rows, self._slices)[: sum(route.receive)]
        (back,) = all_to_all_beside((rows,), self._group, send=route.receive, receive=route.send, meanwhile=meanwhile)
        return back

    def combine_postprocess(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Sum what the ranks sent for each token."""
        return SumSlots.apply(rows, route.copies.tokens, route.copies.rows, route.copies.full)


def first_of_each(rank_Tk: torch.Tensor, none: int) -> torch.Tensor:
    """Each token's ranks, every one once and the repeats as `none`."""
    top_k = rank_Tk.shape[1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=rank_Tk.device).tril(-1)
    same = rank_Tk[:, :, None] == rank_Tk[:, None, :]
    return rank_Tk.masked_fill((same & earlier).any(2), none)
