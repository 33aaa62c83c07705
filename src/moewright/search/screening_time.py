"""Seconds of the pieces of a group's layouts, and which dispatcher and exchange of context make
them least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moewright.cost.activations import Away, activations_away
from moewright.cost.collective_time import Links
from moewright.cost.elementwise import DEDUP
from moewright.cost.estimate import size_of
from moewright.cost.layer_time import exchange
from moewright.cost.op_time import Rates
from moewright.cost.step_time import (
    LayerKind,
    Pricer,
    kind_of,
    kinds_of,
    price_work,
    work_of,
)
from moewright.cost.symbols import Sizes
from moewright.search.pipeline_arrays import Array, Pieces
from moewright.search.screening_memory import Layers
from moewright.search.space import Space, Work, context_exchanges, dispatchers
from moewright.spec.layout import CpComm, Dispatcher, Layout, Overlap

_BELOW = (
    1 - 1e-9
)  # what a bound is short of its formula, so that rounding never makes it exceed a price


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pipelines whose layers take the same seconds: what the number of micro-batches changes is
    alike, and the host waits for every transfer (no virtual stages) in all or none. `seats` [Q] are
    theirs.
    """

    like: int
    synced: bool
    seats: Array
    pp: int


class Prices:
    """Prices the layouts of one space; what groups have in common is priced once."""

    def __init__(self, space: Space, pieces: Pieces, works: Sequence[Work]) -> None:
        self.space, self.pieces, self.works = space, pieces, works
        self.rates = Rates(space.hardware)
        self.links = Links(space.hardware, self.rates.constants)
        # Works that replay alike and differ in what they send to the host share a price.
        alike = [(work.recompute, work.graphs) for work in works]
        self.replays = tuple(works[alike.index(each)] for each in dict.fromkeys(alike))
        self.replay_of_work = np.array([list(dict.fromkeys(alike)).index(each) for each in alike])
        self._modules = np.array([activations_away(work.offload) for work in works])
        kinds = [kind_of(space.model, layer) for layer in range(space.model.layers)]
        self.whole = (
            *(kinds.count(kind) for kind in pieces.kinds),
            space.model.mtp_layers,
            1,
            1,
        )  # [pieces]
        self._known: dict[tuple[object, ...], Pricer] = {}
        self._context: dict[tuple[int, int, int, int], CpComm] = {}

    def size(self, layout: Layout) -> Sizes:
        space = self.space
        return size_of(space.model, space.workload, space.hardware, layout, self.rates.constants)

    def pricer(self, layout: Layout) -> Pricer:
        """The prices of layouts with these degrees, micro-batch and dispatcher."""
        size = self.size(layout)
        # An eager stack sums the gradients of a whole layer in one row, which comes once a step
        # otherwise.
        if not size.fused:
            return Pricer(self.links, size, price_work(self.rates, self.links, size, work_of(size)))
        key = (
            layout.tp,
            layout.cp,
            layout.mbs,
            layout.dispatcher in DEDUP,
            Overlap.TP in layout.overlap,
        )
        if key not in self._known:
            self._known[key] = Pricer(
                self.links, size, price_work(self.rates, self.links, size, work_of(size))
            )
        return self._known[key].with_experts(self.rates, size)

    def of_group(self, cut: Layout, layers: Layers) -> GroupPrices:
        """Of a cut whose layers keep and send away so much."""
        sent = {
            kind: Away(bytes=layers.away[piece], modules=self._modules * (layers.away[piece] > 0))
            for piece, kind in enumerate(self.pieces.kinds)
        }
        # An MTP depth sends nothing.
        nothing = np.zeros(len(self.works))
        there = {kind: Away(bytes=nothing, modules=nothing) for kind in kinds_of(self.space.model)}
        return GroupPrices(self, cut, {**there, **sent})

    def settled(self, cut: Layout, prices: GroupPrices, pace: Pace) -> Layout:
        """The layout with the dispatcher and the exchange of context under which its layers take
        least, and with what tensor parallelism can overlap. They change no memory but a
        dispatcher's own, nor each other's order, whatever is recomputed; the exchange of context
        has nothing to do with experts.
        """
        settled = self._with_tensor_overlap(cut)
        context = cut.tp, cut.cp, cut.mbs, pace.like
        if context not in self._context:
            ways = context_exchanges(self.space, cut)
            tries = [replace(settled, cp_comm=way) for way in ways]
            self._context[context] = (
                ways[0] if len(ways) == 1 else prices.fastest(tries, pace).cp_comm
            )
        settled = replace(settled, cp_comm=self._context[context])
        ways_out = dispatchers(self.space, cut)
        if len(ways_out) > 1 and prices.exchanges_less:
            return replace(settled, dispatcher=ways_out[-1])
        tries = [replace(settled, dispatcher=each) for each in ways_out]
        return tries[0] if len(tries) == 1 else prices.fastest(tries, pace)

    def _with_tensor_overlap(self, cut: Layout) -> Layout:
        """Overlap of tensor parallelism hides a share of its time and costs nothing that is
        priced."""
        hides = self.links.constants["tp_overlap_hidden"] > 0
        if "overlap" in self.space.fixed or not (
            cut.sp and hides and self.space.permits(overlap=(Overlap.TP,))
        ):
            return cut
        return replace(cut, overlap=tuple(sorted({*cut.overlap, Overlap.TP})))


class GroupPrices:
    """Prices of the layouts of one cut, made when first needed. `sent` [works] is what a layer
    sends to the host."""

    def __init__(self, prices: Prices, cut: Layout, sent: Mapping[LayerKind, Away]) -> None:
        self._prices, self._cut, self._sent = prices, cut, sent
        self._first_sent = {
            kind: Away(bytes=float(each.bytes[0]), modules=float(each.modules[0]))
            for kind, each in sent.items()
        }
        self._known: dict[tuple[Dispatcher, int], Pricer] = {}

    def seconds(self, pace: Pace, layout: Layout, works: Array) -> Array:
        """[pieces, works] seconds of one micro-batch, of these works of the space."""
        prices, ones = self._prices, np.ones(len(works))
        sent = {
            kind: Away(bytes=each.bytes[works], modules=each.modules[works])
            for kind, each in self._sent.items()
        }
        pricer = self._of(layout, pace)
        layers = pricer.totals(
            layout, prices.replays, prices.replay_of_work[works], sent, synced=pace.synced
        )
        return np.stack([each * ones for each in self._pieces(pricer, layers)])

    def floor_s(self, layout: Layout, paces: Sequence[Pace]) -> float:
        """No more than the seconds that the micro-batches of a step take on any pipeline of these
        paces, whatever is kept and however the states are held: the slowest rank of a pipeline
        takes at least the mean of its ranks.
        """
        space = self._prices.space
        passes = (
            space.workload.global_batch
            * layout.tp
            * layout.cp
            / (layout.mbs * space.hardware.count)
        )
        return _BELOW * passes * min(self._least_s(layout, pace) for pace in paces)

    def fastest(self, tries: Sequence[Layout], pace: Pace) -> Layout:
        """The first of the layouts whose layers take least without recompute."""
        seconds = [self._least_s(one, pace) for one in tries]
        return tries[seconds.index(min(seconds))]

    @cached_property
    def exchanges_less(self) -> bool:
        """Whether the rows themselves travel faster without duplicates; sorting and waiting always
        are."""
        prices = self._prices
        plain, *_, dedup = dispatchers(prices.space, self._cut)
        theirs, ours = (
            exchange(prices.links, prices.size(replace(self._cut, dispatcher=each)), moe=True)
            for each in (plain, dedup)
        )
        return ours.ep_forward <= theirs.ep_forward and ours.ep_backward <= theirs.ep_backward

    def _least_s(self, layout: Layout, pace: Pace) -> float:
        """Seconds of one micro-batch through the whole model, under the first work."""
        pricer, work = self._of(layout, pace), self._prices.works[0]
        layers = pricer.total_s(layout, work, self._first_sent, synced=pace.synced)
        seconds = self._pieces(pricer, layers)
        return float(
            sum(count * each for count, each in zip(self._prices.whole, seconds, strict=True))
        )

    def _pieces(
        self, pricer: Pricer, layers: Mapping[LayerKind, Array | float]
    ) -> list[Array | float]:
        model = self._prices.space.model
        mtp, embedding, head = pricer.outside_s()
        depth = mtp + layers[kind_of(model, model.layers + 1)] if model.mtp_layers else 0.0
        return [*(layers[kind] for kind in self._prices.pieces.kinds), depth, embedding, head]

    def _of(self, base: Layout, pace: Pace) -> Pricer:
        key = base.dispatcher, pace.like
        if key not in self._known:
            self._known[key] = self._prices.pricer(replace(base, pp=pace.pp))
        return self._known[key]
