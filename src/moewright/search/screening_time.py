"""Seconds of the pieces of a group's layouts, and which dispatcher and exchange of context make
them least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moewright.cost.activations import OffloadedActivations, count_offloaded_modules
from moewright.cost.collective_time import CollectiveModel
from moewright.cost.elementwise import DEDUP_DISPATCHERS
from moewright.cost.estimate import expected_symbols
from moewright.cost.layer_time import price_collectives
from moewright.cost.op_time import DeviceRates
from moewright.cost.step_time import (
    LayerKind,
    Pricer,
    layer_kind,
    layer_kinds,
    model_ops,
    price_model_ops,
)
from moewright.cost.symbols import Symbols
from moewright.search.pipeline_arrays import Array, LayerKinds
from moewright.search.screening_memory import LayerBytes
from moewright.search.space import (
    ActivationPolicy,
    SearchSpace,
    cp_comm_choices,
    dispatcher_choices,
)
from moewright.spec.layout import CpComm, DispatcherKind, Layout, Overlap

_BELOW = (
    1 - 1e-9
)  # what a bound is short of its formula, so that rounding never makes it exceed a price


@dataclass(frozen=True, kw_only=True)
class TimingClass:
    """Pipelines whose layers take the same seconds: what the number of micro-batches changes is
    alike, and the host waits for every transfer (no virtual stages) in all or none. `seats` [Q] are
    theirs.
    """

    like: int
    synced: bool
    ranks: Array
    pp: int


class ScreeningTimes:
    """Prices the layouts of one space; what groups have in common is priced once."""

    def __init__(
        self, space: SearchSpace, pieces: LayerKinds, works: Sequence[ActivationPolicy]
    ) -> None:
        self.space, self.pieces, self.works = space, pieces, works
        self.rates = DeviceRates(space.hardware)
        self.links = CollectiveModel(space.hardware, self.rates.constants)
        # Works that replay alike and differ in what they send to the host share a price.
        alike = [(work.recompute, work.graphs) for work in works]
        self.replays = tuple(works[alike.index(each)] for each in dict.fromkeys(alike))
        self.replay_of_work = np.array([list(dict.fromkeys(alike)).index(each) for each in alike])
        self._modules = np.array([count_offloaded_modules(work.offload) for work in works])
        kinds = [layer_kind(space.model, layer) for layer in range(space.model.layers)]
        self.whole = (
            *(kinds.count(kind) for kind in pieces.kinds),
            space.model.mtp_layers,
            1,
            1,
        )  # [pieces]
        self._known: dict[tuple[object, ...], Pricer] = {}
        self._context: dict[tuple[int, int, int, int], CpComm] = {}

    def size(self, layout: Layout) -> Symbols:
        space = self.space
        return expected_symbols(
            space.model, space.workload, space.hardware, layout, self.rates.constants
        )

    def pricer(self, layout: Layout) -> Pricer:
        """The prices of layouts with these degrees, micro-batch and dispatcher."""
        size = self.size(layout)
        # An eager stack sums the gradients of a whole layer in one row, which comes once a step
        # otherwise.
        if not size.is_fused:
            return Pricer(
                self.links, size, price_model_ops(self.rates, self.links, size, model_ops(size))
            )
        key = (
            layout.tp,
            layout.cp,
            layout.mbs,
            layout.dispatcher in DEDUP_DISPATCHERS,
            Overlap.TP in layout.overlap,
        )
        if key not in self._known:
            self._known[key] = Pricer(
                self.links, size, price_model_ops(self.rates, self.links, size, model_ops(size))
            )
        return self._known[key].with_experts(self.rates, size)

    def price_group(self, cut: Layout, layers: LayerBytes) -> GroupTimes:
        """Of a cut whose layers keep and send away so much."""
        sent = {
            kind: OffloadedActivations(
                bytes=layers.offloaded[piece], modules=self._modules * (layers.offloaded[piece] > 0)
            )
            for piece, kind in enumerate(self.pieces.kinds)
        }
        # An MTP depth sends nothing.
        nothing = np.zeros(len(self.works))
        there = {
            kind: OffloadedActivations(bytes=nothing, modules=nothing)
            for kind in layer_kinds(self.space.model)
        }
        return GroupTimes(self, cut, {**there, **sent})

    def choose_exchanges(self, cut: Layout, prices: GroupTimes, pace: TimingClass) -> Layout:
        """The layout with the dispatcher and the exchange of context under which its layers take
        least, and with what tensor parallelism can overlap. They change no memory but a
        dispatcher's own, nor each other's order, whatever is recomputed; the exchange of context
        has nothing to do with experts.
        """
        settled = self._with_tensor_overlap(cut)
        context = cut.tp, cut.cp, cut.mbs, pace.like
        if context not in self._context:
            ways = cp_comm_choices(self.space, cut)
            tries = [replace(settled, cp_comm=way) for way in ways]
            self._context[context] = (
                ways[0] if len(ways) == 1 else prices.fastest(tries, pace).cp_comm
            )
        settled = replace(settled, cp_comm=self._context[context])
        ways_out = dispatcher_choices(self.space, cut)
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


class GroupTimes:
    """Prices of the layouts of one cut, made when first needed. `sent` [works] is what a layer
    sends to the host."""

    def __init__(
        self, prices: ScreeningTimes, cut: Layout, sent: Mapping[LayerKind, OffloadedActivations]
    ) -> None:
        self._prices, self._cut, self._sent = prices, cut, sent
        self._first_sent = {
            kind: OffloadedActivations(bytes=float(each.bytes[0]), modules=float(each.modules[0]))
            for kind, each in sent.items()
        }
        self._known: dict[tuple[DispatcherKind, int], Pricer] = {}

    def seconds(self, pace: TimingClass, layout: Layout, works: Array) -> Array:
        """[pieces, works] seconds of one micro-batch, of these works of the space."""
        prices, ones = self._prices, np.ones(len(works))
        sent = {
            kind: OffloadedActivations(bytes=each.bytes[works], modules=each.modules[works])
            for kind, each in self._sent.items()
        }
        pricer = self._of(layout, pace)
        layers = pricer.layer_totals_s(
            layout, prices.replays, prices.replay_of_work[works], sent, synced=pace.synced
        )
        return np.stack([each * ones for each in self._pieces(pricer, layers)])

    def floor_s(self, layout: Layout, paces: Sequence[TimingClass]) -> float:
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

    def fastest(self, tries: Sequence[Layout], pace: TimingClass) -> Layout:
        """The first of the layouts whose layers take least without recompute."""
        seconds = [self._least_s(one, pace) for one in tries]
        return tries[seconds.index(min(seconds))]

    @cached_property
    def exchanges_less(self) -> bool:
        """Whether the rows themselves travel faster without duplicates; sorting and waiting always
        are."""
        prices = self._prices
        plain, *_, dedup = dispatcher_choices(prices.space, self._cut)
        theirs, ours = (
            price_collectives(
                prices.links, prices.size(replace(self._cut, dispatcher=each)), moe=True
            )
            for each in (plain, dedup)
        )
        return (
            ours.ep_forward_s <= theirs.ep_forward_s and ours.ep_backward_s <= theirs.ep_backward_s
        )

    def _least_s(self, layout: Layout, pace: TimingClass) -> float:
        """Seconds of one micro-batch through the whole model, under the first work."""
        pricer, work = self._of(layout, pace), self._prices.works[0]
        layers = pricer.layer_total_s(layout, work, self._first_sent, synced=pace.synced)
        seconds = self._pieces(pricer, layers)
        return float(
            sum(count * each for count, each in zip(self._prices.whole, seconds, strict=True))
        )

    def _pieces(
        self, pricer: Pricer, layers: Mapping[LayerKind, Array | float]
    ) -> list[Array | float]:
        model = self._prices.space.model
        mtp, embedding, head = pricer.outside_layers_s()
        depth = mtp + layers[layer_kind(model, model.layers + 1)] if model.mtp_layers else 0.0
        return [*(layers[kind] for kind in self._prices.pieces.kinds), depth, embedding, head]

    def _of(self, base: Layout, pace: TimingClass) -> Pricer:
        key = base.dispatcher, pace.like
        if key not in self._known:
            self._known[key] = self._prices.pricer(replace(base, pp=pace.pp))
        return self._known[key]
