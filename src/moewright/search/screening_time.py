"""Seconds of the parts of a group's layouts, and the fastest dispatcher and exchange of context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moewright.cost.activations import ActivationPolicies, OffloadedActivations
from moewright.cost.collective_time import CollectiveModel
from moewright.cost.elementwise import DEDUP_DISPATCHERS
from moewright.cost.estimate import expected_symbols
from moewright.cost.layer_time import price_collectives
from moewright.cost.memory import ModelMemory
from moewright.cost.op_time import DeviceRates
from moewright.cost.stage_parts import Array, LayerKind, StageParts
from moewright.cost.step_time import Pricer, model_ops, price_model_ops
from moewright.cost.symbols import Symbols
from moewright.search.space import SearchSpace, cp_comm_choices, dispatcher_choices
from moewright.spec.layout import CpComm, DispatcherKind, Layout, Overlap

# What a bound is short of its formula, so that rounding never makes it exceed a price.
_BELOW = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class TimingClass:
    """Pipelines whose layers take the same seconds.

    What the number of micro-batches changes is alike, and the host waits for every transfer (no
    virtual stages) in all or none. `ranks` [ranks] tells which are theirs; `pp` and `vpp` are those
    of one of them.
    """

    like: tuple[int, int]
    synced: bool
    ranks: Array
    pp: int
    vpp: int


class ScreeningTimes:
    """Prices the layouts of one space; what groups have in common is priced once."""

    def __init__(self, space: SearchSpace, parts: StageParts, policies: ActivationPolicies) -> None:
        self.space, self.parts, self.policies = space, parts, policies
        self.rates = DeviceRates(space.hardware)
        self.collectives = CollectiveModel(space.hardware, self.rates.constants)
        # Policies that recompute alike and differ in what they send to the host share a price.
        alike = [(policy.recompute, policy.graphs) for policy in policies.members]
        distinct = list(dict.fromkeys(alike))
        self.replays = tuple(policies.members[alike.index(replay)] for replay in distinct)
        self.replay_of_policy = np.array([distinct.index(replay) for replay in alike])
        self.model_counts = self._count_model()
        self._known: dict[tuple[object, ...], Pricer] = {}
        self._context: dict[tuple[object, ...], CpComm] = {}

    def _count_model(self) -> Array:
        """Count the parts of the whole model [parts], whatever recompute makes of them."""
        layers = self.parts.columns[0]
        counts = np.bincount(layers[layers >= 0], minlength=self.parts.count).astype(float)
        counts[[self.parts.embedding, self.parts.head]] = 1
        return counts

    def symbols(self, layout: Layout) -> Symbols:
        """Return the symbols of a layout of the space."""
        space = self.space
        return expected_symbols(
            space.model, space.workload, space.hardware, layout, self.rates.constants
        )

    def pricer(self, layout: Layout) -> Pricer:
        """Return the prices of layouts with these degrees, micro-batch and dispatcher."""
        sym = self.symbols(layout)
        # An eager stack sums the gradients of a whole layer in one row, which comes once a step
        # otherwise.
        if not sym.is_fused:
            return self._price(sym)
        key = (
            layout.tp,
            layout.cp,
            layout.mbs,
            layout.dispatcher in DEDUP_DISPATCHERS,
            Overlap.TP in layout.overlap,
        )
        if key not in self._known:
            self._known[key] = self._price(sym)
        return self._known[key].with_experts(self.rates, sym)

    def _price(self, sym: Symbols) -> Pricer:
        priced = price_model_ops(self.rates, self.collectives, sym, model_ops(sym))
        return Pricer(self.collectives, sym, priced)

    def price_group(self, cut: Layout, memory: ModelMemory) -> GroupTimes:
        """Return the prices of a cut whose layers keep and send to the host what `memory` says."""
        by_experts = {
            part.kind.is_moe: layer.offloaded
            for part, layer in reversed(list(zip(self.parts.layers, memory.layers, strict=True)))
        }
        sent = {
            kind: OffloadedActivations(
                bytes=by_experts[kind.is_moe], modules=self.policies.offloaded_modules
            )
            for kind in self.parts.kinds
        }
        return GroupTimes(self, cut, sent)

    def choose_exchanges(self, cut: Layout, times: GroupTimes, timing: TimingClass) -> Layout:
        """Return the layout with the dispatcher and exchange of context that take least time.

        It overlaps what tensor parallelism can, too. These choices change no memory but a
        dispatcher's own, nor each other's order, whatever is recomputed; the exchange of context
        has nothing to do with experts.
        """
        settled = self._with_tensor_overlap(cut)
        key = cut.tp, cut.cp, cut.mbs, timing.like
        if key not in self._context:
            layouts = [
                replace(settled, cp_comm=cp_comm) for cp_comm in cp_comm_choices(self.space, cut)
            ]
            self._context[key] = _fastest(layouts, times, timing).cp_comm
        settled = replace(settled, cp_comm=self._context[key])
        dispatchers = dispatcher_choices(self.space, cut)
        if len(dispatchers) > 1 and times.exchanges_less:
            return replace(settled, dispatcher=dispatchers[-1])
        layouts = [replace(settled, dispatcher=dispatcher) for dispatcher in dispatchers]
        return _fastest(layouts, times, timing)

    def _with_tensor_overlap(self, cut: Layout) -> Layout:
        """Return the layout with overlapped tensor parallelism where that hides some time.

        It costs nothing that is priced.
        """
        hides = self.collectives.constants["tp_overlap_hidden"] > 0
        if "overlap" in self.space.fixed or not (
            cut.sp and hides and self.space.permits(overlap=(Overlap.TP,))
        ):
            return cut
        return replace(cut, overlap=tuple(sorted({*cut.overlap, Overlap.TP})))


def _fastest(layouts: Sequence[Layout], times: GroupTimes, timing: TimingClass) -> Layout:
    return layouts[0] if len(layouts) == 1 else times.fastest(layouts, timing)


class GroupTimes:
    """Prices of the layouts of one cut, made when first needed.

    `sent` is what a layer of each kind sends to the host [policies].
    """

    def __init__(
        self, times: ScreeningTimes, cut: Layout, sent: Mapping[LayerKind, OffloadedActivations]
    ) -> None:
        self._times, self._cut, self._sent = times, cut, sent
        self._first_sent = {
            kind: OffloadedActivations(
                bytes=float(offloaded.bytes[0]), modules=float(offloaded.modules[0])
            )
            for kind, offloaded in sent.items()
        }
        self._known: dict[tuple[DispatcherKind, tuple[int, int]], Pricer] = {}

    def seconds(self, timing: TimingClass, layout: Layout, policies: Array) -> Array:
        """Return the seconds of one micro-batch under these policies [parts, policies]."""
        times, ones = self._times, np.ones(len(policies))
        sent = {
            kind: OffloadedActivations(
                bytes=offloaded.bytes[policies], modules=offloaded.modules[policies]
            )
            for kind, offloaded in self._sent.items()
        }
        pricer = self._pricer(layout, timing)
        layers = pricer.layer_totals_s(
            self._staged(layout, timing),
            times.replays,
            times.replay_of_policy[policies],
            sent,
            synced=timing.synced,
        )
        return np.stack([part * ones for part in pricer.part_seconds(times.parts, layers)])

    def floor_s(self, layout: Layout, timings: Sequence[TimingClass]) -> float:
        """Return a bound that no pipeline of these classes stays below in a step.

        It holds whatever is kept and however the states are held: the slowest rank of a pipeline
        takes at least the mean of its ranks.
        """
        space = self._times.space
        passes = (
            space.workload.global_batch
            * layout.tp
            * layout.cp
            / (layout.mbs * space.hardware.count)
        )
        return _BELOW * passes * min(self._least_s(layout, timing) for timing in timings)

    def fastest(self, layouts: Sequence[Layout], timing: TimingClass) -> Layout:
        """Return the first of the layouts whose layers take least without recompute."""
        seconds = [self._least_s(layout, timing) for layout in layouts]
        return layouts[seconds.index(min(seconds))]

    @cached_property
    def exchanges_less(self) -> bool:
        """Whether rows themselves travel faster without duplicates; sorts and waits always do."""
        times = self._times
        first, *_, last = dispatcher_choices(times.space, self._cut)
        plain, dedup = (
            price_collectives(
                times.collectives,
                times.symbols(replace(self._cut, dispatcher=dispatcher)),
                moe=True,
            )
            for dispatcher in (first, last)
        )
        return (
            dedup.ep_forward_s <= plain.ep_forward_s and dedup.ep_backward_s <= plain.ep_backward_s
        )

    def _least_s(self, layout: Layout, timing: TimingClass) -> float:
        """Return the seconds of one micro-batch through the model, under the first policy."""
        pricer, times = self._pricer(layout, timing), self._times
        layers = pricer.layer_total_s(
            self._staged(layout, timing),
            times.policies.members[0],
            self._first_sent,
            synced=timing.synced,
        )
        return float(times.model_counts @ np.array(pricer.part_seconds(times.parts, layers)))

    def _pricer(self, layout: Layout, timing: TimingClass) -> Pricer:
        key = layout.dispatcher, timing.like
        if key not in self._known:
            self._known[key] = self._times.pricer(replace(layout, pp=timing.pp))
        return self._known[key]

    def _staged(self, layout: Layout, timing: TimingClass) -> Layout:
        """Return the layout on as many stages as decide the share that full recompute takes."""
        if not layout.recompute_block:
            return layout
        return replace(layout, pp=timing.pp, vpp=timing.vpp)
