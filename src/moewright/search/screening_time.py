"""Prices of the layouts of a group in seconds, what a step does once among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moewright.cost.memory.activations import (
    NOTHING_OFFLOADED,
    ActivationPolicies,
    OffloadedActivations,
)
from moewright.cost.memory.estimate_memory import expected_symbols
from moewright.cost.memory.peak import ModelMemory
from moewright.cost.stage_parts import Array, LayerKind, StageParts
from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.layer_time import price_collectives
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.step_tail import (
    RankParameters,
    StepTail,
    exchange_window,
    step_tail,
)
from moewright.cost.time.step_time import Pricer, model_ops, price_model_ops
from moewright.rules.routing import counts_copies
from moewright.rules.shapes import shards
from moewright.search.pipelines import PipelineBatch
from moewright.search.screening_memory import ScreeningMemory
from moewright.search.space import SearchSpace, StatePolicy, cp_comm_choices, dispatcher_choices
from moewright.spec.layout import CpComm, DispatcherKind, Layout, Overlap
from moewright.spec.record import copy_with

_DENSE, _EXPERT = (shards.GRADIENT_GROUPS.index(group) for group in ("dp_cp", "edp"))


class ScreeningTails:
    """A calculator of the seconds that ranks take once a step, each distinct rank priced once."""

    def __init__(
        self, times: ScreeningTimes, memory: ScreeningMemory, states: Sequence[StatePolicy]
    ) -> None:
        self._times, self._memory, self._states = times, memory, states
        self._tails: dict[tuple[object, ...], StepTail] = {}

    def seconds(self, base: Layout, batch: PipelineBatch, is_needed: Array) -> tuple[Array, Array]:
        """Return the seconds of what a step does once, and the least that a step takes for it.

        The first are gradient reduction, weight gathers and the optimizer [pipelines, state
        policies] after the micro-batches, on the rank that takes longest; the others count what
        runs beside the micro-batches too. Both are 0 where `is_needed` asks for nothing.
        """
        tails = np.zeros((len(batch.pp), len(self._states)))
        least = np.zeros_like(tails)
        for column, policy in enumerate(self._states):
            pipelines = np.asarray(is_needed[:, :, column].any(axis=1))
            ranks = np.flatnonzero(pipelines[batch.pipeline_of_rank])
            if len(ranks):
                of_ranks = self._rank_tails(base, policy, batch, ranks)
                places = batch.pipeline_of_rank[ranks]
                # Several ranks fall on one pipeline: plain indices would keep the last of them.
                np.maximum.at(tails[:, column], places, [tail.total_s for tail in of_ranks])
                np.maximum.at(least[:, column], places, [tail.least_s for tail in of_ranks])
        return tails, least

    def windows(self, batch: PipelineBatch) -> Array:
        """Return the share of micro-batches beside which exchanges of states can run.

        It is [pipelines, state policies].
        """
        windows = [
            exchange_window(
                policy.zero, pp=batch.pp, vpp=batch.vpp, micro_batches=batch.micro_batches
            )
            for policy in self._states
        ]
        return np.stack([np.broadcast_to(window, batch.pp.shape) for window in windows], axis=1)

    def _rank_tails(
        self, base: Layout, policy: StatePolicy, batch: PipelineBatch, ranks: Array
    ) -> list[StepTail]:
        """Return what each of these ranks does once a step."""
        base = copy_with(
            base, zero=policy.zero, offload=tuple(sorted({*base.offload, *policy.offload}))
        )
        # Only zero=2 and 3 reduce more often with more micro-batches.
        mbs = base.mbs if base.zero >= 2 else 0
        overlaps_reduction = Overlap.GRAD in base.overlap
        shared_key = (
            base.tp,
            base.cp,
            base.ep,
            base.etp,
            mbs,
            base.zero,
            base.offload,
            overlaps_reduction,
        )
        elements = self._memory.elements(base, policy.zero, batch)
        columns = [_DENSE, _EXPERT]
        parameters = np.concatenate(
            [elements.numel[:, columns], elements.calls[:, columns]], axis=1
        )
        pp = batch.pp[batch.pipeline_of_rank]
        symbols: dict[int, Symbols] = {}
        of_ranks = []
        for rank_pp, numbers in zip(
            pp[ranks].tolist(), parameters[ranks].astype(np.int64).tolist(), strict=True
        ):
            key = shared_key, rank_pp, *numbers
            if key not in self._tails:
                if rank_pp not in symbols:
                    symbols[rank_pp] = self._times.symbols(copy_with(base, pp=rank_pp))
                self._tails[key] = self._one_tail(symbols[rank_pp], numbers)
            of_ranks.append(self._tails[key])
        return of_ranks

    def _one_tail(self, sym: Symbols, numbers: Sequence[int]) -> StepTail:
        dense, expert, dense_calls, expert_calls = numbers
        parameters = RankParameters(
            dense=dense,
            expert=expert,
            dense_calls=max(1, dense_calls),
            expert_calls=max(1, expert_calls),
        )
        times = self._times
        return step_tail(times.rates, times.collectives, sym, parameters)


# A lower bound is taken this much lower than its formula, so that rounding never lifts it above
# the price that it bounds.
_BELOW = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class TimingClass:
    """Pipelines whose layers take the same seconds a micro-batch.

    Two numbers in `like` decide that: what the number of micro-batches changes (whether the host
    can run ahead; for an eager stack their number itself), and the number of stages where the first
    layers of each are recomputed (0 elsewhere). `synced` says whether the host waits for every
    transfer between stages, as it does without virtual stages. `is_outrun` tells that layers take
    no longer in another class. `pipelines` [pipelines] is the mask of these pipelines; `pp` and
    `vpp` are those of one of them.
    """

    like: tuple[int, int]
    synced: bool
    is_outrun: bool
    pipelines: Array
    pp: int
    vpp: int


class ScreeningTimes:
    """A pricer of the layouts of one space, which prices what groups have in common once."""

    def __init__(self, space: SearchSpace, parts: StageParts, policies: ActivationPolicies) -> None:
        self.space = space
        self.parts = parts
        self.policies = policies
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
        """Count the parts of the whole model [parts].

        All layers count as a variant that does not offload where they have one, else as the first
        (StageParts.columns): chunks decide how many offload where a fraction does, and which layers
        full recompute makes another variant does not matter here.
        """
        layers = self.parts.columns[0].copy()
        offloads = np.array([part.offloads for part in self.parts.layers])
        for variant in self.parts.columns[1:]:
            stays = (variant >= 0) & offloads[layers] & ~offloads[variant]
            layers[stays] = variant[stays]
        counts = np.bincount(layers[layers >= 0], minlength=self.parts.count).astype(float)
        counts[[self.parts.embedding, self.parts.head]] = 1
        return counts

    def symbols(self, layout: Layout) -> Symbols:
        """Return the symbols of a layout of the space."""
        space = self.space
        return expected_symbols(
            space.job(layout),
            space.hardware,
            self.rates.constants,
        )

    def pricer(self, layout: Layout, sym: Symbols) -> Pricer:
        """Return the prices of layouts with these degrees, micro-batch and dispatcher.

        `sym` are the layout's symbols.
        """
        # An eager stack prices the sum of a layer's gradients, experts' included, as one row of
        # the layer, so groups have no prices in common; a fused stack sums them once a step.
        if not sym.is_fused:
            return self._price(sym)
        key = (
            layout.tp,
            layout.cp,
            layout.mbs,
            counts_copies(layout),
            Overlap.TP in layout.overlap,
        )
        if key not in self._known:
            self._known[key] = self._price(sym)
        return self._known[key].with_experts(self.rates, sym)

    def _price(self, sym: Symbols) -> Pricer:
        priced = price_model_ops(self.rates, self.collectives, sym, model_ops(sym))
        return Pricer(self.collectives, sym, priced)

    def price_group(self, cut: Layout, memory: ModelMemory | None) -> GroupTimes:
        """Return the prices of a layout `cut`.

        `memory` says what its layers offload where even the first policy offloads; else it is None.
        """
        return GroupTimes(self, cut, self.sent_activations(memory))

    def sent_activations(self, memory: ModelMemory | None) -> dict[LayerKind, OffloadedActivations]:
        """Return what a layer of each kind offloads under each policy [policies].

        Without `memory` that is nothing.
        """
        if memory is None:
            nothing = np.zeros(len(self.policies.members))
            return {
                kind: OffloadedActivations(bytes=nothing, modules=nothing)
                for kind in self.parts.kinds
            }
        by_kind = {
            part.kind: layer.offloaded.sum(axis=1)
            # Reversed, so that the first part of a kind is the one that stays in the mapping.
            for part, layer in reversed(list(zip(self.parts.layers, memory.layers, strict=True)))
            if part.offloads
        }
        return {
            kind: OffloadedActivations(bytes=by_kind[kind], modules=self.policies.offloaded_modules)
            for kind in self.parts.kinds
        }

    def choose_exchanges(self, cut: Layout, times: GroupTimes, timing: TimingClass) -> Layout:
        """Return the layout with TP overlap, and the dispatcher and CP exchange of least time.

        Each choice can be made by itself, once for all candidates of the group: it changes no
        memory but the dispatcher's buffers, and its fastest value stays the fastest whatever the
        other choices and recompute are. The CP exchange does not depend on the experts, so it is
        shared by groups that differ in EP and ETP alone.
        """
        chosen = self._with_tensor_overlap(cut)
        # Without ep and etp, on which this choice does not depend.
        key = cut.tp, cut.cp, cut.mbs, timing.like
        if key not in self._context:
            layouts = [
                copy_with(chosen, cp_comm=cp_comm) for cp_comm in cp_comm_choices(self.space, cut)
            ]
            self._context[key] = _fastest(layouts, times, timing).cp_comm
        chosen = copy_with(chosen, cp_comm=self._context[key])
        dispatchers = dispatcher_choices(self.space, cut)
        if len(dispatchers) > 1 and times.exchanges_less:
            return copy_with(chosen, dispatcher=dispatchers[-1])
        layouts = [copy_with(chosen, dispatcher=dispatcher) for dispatcher in dispatchers]
        return _fastest(layouts, times, timing)

    def _with_tensor_overlap(self, cut: Layout) -> Layout:
        """Return the layout with overlapped TP communication where that hides some time.

        The overlap is always taken where it is free to choose: it costs nothing that is priced.
        """
        if "overlap" in self.space.fixed or not cut.sp:
            return cut
        hides = self.collectives.constants["tp_overlap_hidden"] > 0
        if not hides or not self.space.permits(overlap=(Overlap.TP,)):
            return cut
        return copy_with(cut, overlap=tuple(sorted({*cut.overlap, Overlap.TP})))


def _fastest(layouts: Sequence[Layout], times: GroupTimes, timing: TimingClass) -> Layout:
    if len(layouts) == 1:
        return layouts[0]
    return times.fastest(layouts, timing)


class GroupTimes:
    """The prices of the layouts of one group, each computed when it is first needed.

    `cut` is the group's layout; `sent` holds what a layer of each kind offloads to the host under
    the first activation policy [policies].
    """

    def __init__(
        self, times: ScreeningTimes, cut: Layout, sent: Mapping[LayerKind, OffloadedActivations]
    ) -> None:
        self._times = times
        self._cut = cut
        self._first_sent = {
            kind: OffloadedActivations(
                bytes=float(offloaded.bytes[0]), modules=float(offloaded.modules[0])
            )
            for kind, offloaded in sent.items()
        }
        self._known: dict[tuple[DispatcherKind, tuple[int, int]], Pricer] = {}
        self._of_dispatcher: dict[DispatcherKind, Pricer] = {}
        self._lightest: dict[tuple[object, ...], Array] = {}

    def seconds(
        self,
        timing: TimingClass,
        layout: Layout,
        policies: Array,
        sent: Mapping[LayerKind, OffloadedActivations],
    ) -> Array:
        """Return the seconds of each part for one micro-batch, forward and backward.

        `policies` [policies] are indices of activation policies; the result is [parts, policies].
        `sent` holds what a layer of each kind offloads under each activation policy.
        """
        times = self._times
        ones = np.ones(len(policies))  # spreads what no policy changes over all of them
        sent = {
            kind: OffloadedActivations(
                bytes=offloaded.bytes[policies], modules=offloaded.modules[policies]
            )
            for kind, offloaded in sent.items()
        }
        pricer = self._pricer(layout, timing)

        def price(offloaded: Mapping[LayerKind, OffloadedActivations]) -> dict[LayerKind, Array]:
            return pricer.layer_totals_s(
                self._staged(layout, timing),
                times.replays,
                times.replay_of_policy[policies],
                offloaded,
                synced=timing.synced,
            )

        layers = price(sent)
        staying = price(dict.fromkeys(sent, NOTHING_OFFLOADED)) if times.parts.has_staying else {}
        return np.stack([part * ones for part in pricer.part_seconds(times.parts, layers, staying)])

    def floor_s(self, layout: Layout, timings: Sequence[TimingClass]) -> float:
        """Return a lower bound of the step's seconds for every pipeline of these classes.

        It holds for every activation and state policy: the slowest rank of a pipeline takes at
        least the mean over its ranks, which is the model's time over pp. pp cancels out, as the
        number of micro-batches grows with it.
        """
        space = self._times.space
        passes = (
            space.workload.global_batch
            * layout.tp
            * layout.cp
            / (layout.mbs * space.hardware.count)
        )
        quickest = (timing for timing in timings if not timing.is_outrun)
        return _BELOW * passes * min(self._least_s(layout, timing) for timing in quickest)

    def fastest(self, layouts: Sequence[Layout], timing: TimingClass) -> Layout:
        """Return the first of the layouts whose layers take least without recompute."""
        seconds = [self._least_s(layout, timing) for layout in layouts]
        return layouts[seconds.index(min(seconds))]

    @cached_property
    def exchanges_less(self) -> bool:
        """Whether the fastest dispatcher that removes duplicates also moves its rows faster.

        Its sorts and waits are always shorter, so it is the fastest without further pricing.
        """
        times = self._times
        # The plain exchange comes first, the library last (dispatcher_choices).
        first, *_, last = dispatcher_choices(times.space, self._cut)
        moe = next(kind for kind in times.parts.kinds if kind.is_moe)
        plain, dedup = (
            price_collectives(
                times.collectives,
                times.symbols(copy_with(self._cut, dispatcher=dispatcher)),
                moe,
            )
            for dispatcher in (first, last)
        )
        return (
            dedup.ep_forward_s <= plain.ep_forward_s and dedup.ep_backward_s <= plain.ep_backward_s
        )

    def lightest_seconds(self, timing: TimingClass, layout: Layout) -> Array:
        """Return the seconds of each part for one micro-batch under the first policy [parts]."""
        key = layout.overlap, layout.dispatcher, layout.cp_comm, timing.like, timing.synced
        if key not in self._lightest:
            pricer = self._pricer(layout, timing)
            times = self._times

            def price(
                offloaded: Mapping[LayerKind, OffloadedActivations],
            ) -> dict[LayerKind, float]:
                return pricer.layer_total_s(
                    self._staged(layout, timing),
                    times.policies.members[0],
                    offloaded,
                    synced=timing.synced,
                )

            layers, staying = price(self._first_sent), {}
            if times.parts.has_staying:
                staying = price(dict.fromkeys(self._first_sent, NOTHING_OFFLOADED))
            self._lightest[key] = np.array(pricer.part_seconds(times.parts, layers, staying))
        return self._lightest[key]

    def _least_s(self, layout: Layout, timing: TimingClass) -> float:
        """Return the seconds of one micro-batch through the model, under the first policy."""
        return float(self._times.model_counts @ self.lightest_seconds(timing, layout))

    def _pricer(self, layout: Layout, timing: TimingClass) -> Pricer:
        key = layout.dispatcher, timing.like
        if key not in self._known:
            staged = copy_with(layout, pp=timing.pp)
            sym = self._times.symbols(staged)
            alike = self._of_dispatcher.get(layout.dispatcher)
            if alike is None or not sym.is_fused:
                alike = self._of_dispatcher[layout.dispatcher] = self._times.pricer(staged, sym)
            else:
                alike = alike.with_micro_batches(sym)
            self._known[key] = alike
        return self._known[key]

    def _staged(self, layout: Layout, timing: TimingClass) -> Layout:
        """Return the layout on the stages of `timing`, where they decide how much is recomputed."""
        if not layout.recompute_block:
            return layout
        return copy_with(layout, pp=timing.pp, vpp=timing.vpp)
