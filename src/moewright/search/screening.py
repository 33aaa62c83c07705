"""Seconds and bytes of all candidates of a group at once: the cost floor over arrays.

The parts of a model are priced once and used for every pipeline, number of micro-batches and state
policy of a group. Bytes equal those of a full estimate. Seconds do too except for the bubble, which
comes from a closed form instead of the simulated timetable (tests/search/test_screening.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.cost.activations import ActivationPolicies, ActivationPolicy
from moewright.cost.buffers import dispatcher_bytes
from moewright.cost.layer_time import stage_transfer_s
from moewright.cost.memory import ModelMemory, MomentCounts, steady_micro_batches
from moewright.cost.parameter_tree import ParameterTree
from moewright.cost.pipeline_time import build_pipeline, closed_form_s
from moewright.cost.stage_parts import Array, count_parts, list_parts
from moewright.cost.step_time import RankParameters, step_tail
from moewright.cost.symbols import Symbols
from moewright.rules import shards, stages
from moewright.rules.compatibility import check_compatibility
from moewright.search.pipeline_arrays import (
    DistinctRanks,
    PipelineBatch,
    batch_pipelines,
    find_distinct_ranks,
    fullest_moments,
)
from moewright.search.screening_memory import ScreeningMemory
from moewright.search.screening_time import GroupTimes, ScreeningTimes, TimingClass
from moewright.search.space import (
    DegreeGroup,
    PipelineShape,
    PipelineShapes,
    SearchSpace,
    StatePolicy,
    activation_policies,
    state_policies,
    with_pipeline,
)
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Offload, Overlap, Recompute

_DENSE, _EXPERT = (shards.GRADIENT_GROUPS.index(group) for group in ("dp_cp", "edp"))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """The scores of a group's candidates under one overlap of expert communication.

    Arrays have the axes [pipelines, activation policies, state policies]. `legal` is the mask of
    the combinations that exist. `step_s` is infinite where a time was not worth pricing, and
    nowhere below `floor_s`. `dp_overlap` is the mask of candidates that are faster with overlapped
    gradient reduction and weight gathers. `base` is the group's layout with the dispatcher, CP
    exchange and overlap that were chosen for it.
    """

    pipelines: PipelineShapes
    base: Layout
    legal: Array
    peak_bytes: Array
    sd_bytes: Array
    step_s: Array
    floor_s: float
    dp_overlap: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class _PricedGroup:
    """A group whose parts are priced, with its pipelines and their timing classes."""

    base: Layout
    batch: PipelineBatch
    timings: tuple[TimingClass, ...]
    times: GroupTimes


class Screener:
    """A screener that scores the candidates of one space, group by group.

    What does not depend on the candidate is worked out once.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._parts = list_parts(space.model, space.base)
        self.activation_policies = activation_policies(space)
        self.state_policies = state_policies(space)
        policies = ActivationPolicies(members=self.activation_policies)
        self.times = ScreeningTimes(space, self._parts, policies)
        self._memory = ScreeningMemory(
            space, self._parts, self.times.rates.constants, policies, self.state_policies
        )
        # [light, heavy]: 1 where the first policy recomputes and offloads less than the second.
        self._lighter = np.array(
            [
                [_does_less(light, heavy) for heavy in self.activation_policies]
                for light in self.activation_policies
            ],
            dtype=np.float32,
        )
        self._searches_dp_overlap = (
            space.hardware.device.kind is DeviceKind.CUDA
            and "overlap" not in space.fixed
            and space.permits(overlap=(Overlap.GRAD, Overlap.PARAM))
        )
        self._pipelines = _Pipelines(space, self._memory.tree)
        self._batches: dict[
            tuple[PipelineShapes, int, int, bool], tuple[PipelineBatch, tuple[TimingClass, ...]]
        ] = {}
        self._legal: dict[tuple[object, ...], tuple[Array, Array]] = {}
        self._legal_policies: dict[tuple[object, ...], Array] = {}
        self._tails: dict[tuple[object, ...], float] = {}
        self._transfers: dict[tuple[int, int, int, int], float] = {}

    def screen(
        self, group: DegreeGroup, *, room_bytes: float, below_s: float
    ) -> Iterator[GroupScores]:
        """Yield the scores of all candidates of a group, for each overlap of expert communication.

        A time that cannot matter is not priced: that of a layout whose bytes exceed `room_bytes` by
        more than a standard deviation, and of a pipeline that takes `below_s` or more even without
        recompute.
        """
        sym = self.times.symbols(group.layout)
        memory = self._memory.model_memory(sym)
        times = self.times.price_group(group.layout, memory)
        fits = True
        for overlap in self._expert_overlaps(group.layout):
            cut = replace(group.layout, overlap=overlap)
            legal, is_searched = self._legality(group, cut)
            if not is_searched.any():
                continue
            batch, timings = self._batch(group, is_paired=Overlap.EP in overlap)
            priced = _PricedGroup(base=cut, batch=batch, timings=timings, times=times)
            parts_memory = memory
            if Overlap.WGRAD in overlap:
                # Delayed weight gradients only add memory. Where nothing fitted without them, or no
                # pipeline is fast enough with them, their memory is not worked out either.
                if not fits or not self._is_in_time(priced, below_s):
                    continue
                parts_memory = self._memory.delay_weight_gradients(memory)
            scores = self._score(
                priced, parts_memory, legal, is_searched, room_bytes=room_bytes, below_s=below_s
            )
            fits = scores.floor_s < np.inf  # the floor is priced only where some candidate fits
            yield scores

    def _score(
        self,
        priced: _PricedGroup,
        memory: ModelMemory,
        legal: Array,
        is_searched: Array,
        *,
        room_bytes: float,
        below_s: float,
    ) -> GroupScores:
        peak, sd = self._memory.device_bytes(memory, priced.batch, is_searched)
        is_worth_pricing = legal & (peak <= room_bytes + sd)
        base = priced.base
        floor_s = np.inf
        step = np.broadcast_to(np.inf, peak.shape)
        dp_overlap = np.broadcast_to(False, peak.shape)
        if is_worth_pricing.any():
            base = self.times.choose_exchanges(base, priced.times, priced.timings[0])
            floor_s = priced.times.floor_s(base, priced.timings)
            if floor_s < below_s:
                is_worth_pricing &= ~self._is_needless(legal, peak, sd)
                step, dp_overlap = self._price(
                    replace(priced, base=base), is_worth_pricing, below_s
                )
            # The bytes above are those of the group's own dispatcher.
            peak = peak + (
                dispatcher_bytes(self.times.symbols(base)) - dispatcher_bytes(memory.sym)
            )
        return GroupScores(
            pipelines=priced.batch.pipelines,
            base=base,
            legal=legal,
            peak_bytes=peak,
            sd_bytes=sd,
            step_s=step,
            floor_s=floor_s,
            dp_overlap=dp_overlap,
        )

    def _is_in_time(self, priced: _PricedGroup, below_s: float) -> bool:
        """Return whether any pipeline takes less than `below_s` without recompute."""
        base = self.times.choose_exchanges(priced.base, priced.times, priced.timings[0])
        if priced.times.floor_s(base, priced.timings) >= below_s:
            return False
        least_s = self._pipeline_s(replace(priced, base=base), np.array([0]))
        return bool((least_s < below_s).any())

    def _is_needless(self, legal: Array, peak: Array, sd: Array) -> Array:
        """Return the mask of candidates that a lighter policy makes needless.

        That is where less recompute or offload of activations, or the first state policy instead of
        this one, fits with more than a standard deviation to spare.
        """
        has_room = legal & (peak <= self._space.hardware.device.memory_bytes.value - sd)
        has_room = has_room.transpose(0, 2, 1)
        needless = has_room.astype(np.float32) @ self._lighter > 0
        needless[:, 1:] |= has_room[:, :1]
        return np.asarray(needless.transpose(0, 2, 1))

    def stall_s(self, layout: Layout) -> float:
        """Return the seconds that the simulated timetable takes beyond the closed form of scores.

        It is 0 for schedules that split backwards, whose timetables take too long to simulate for
        any layouts but the plans that are shown.
        """
        if layout.schedule.splits_backward:
            return 0.0
        pricer = self.times.pricer(layout)
        model = self._space.model
        times = pricer.part_times(layout, self._parts)
        chunks = stages.pipeline_chunks(model, layout)
        counts = count_parts(model, layout, self._parts, chunks)
        forward, backward = counts @ times.forward_s, counts @ times.backward_s
        by_rank = (forward + backward).reshape(layout.vpp, layout.pp).sum(axis=0)
        closed = closed_form_s(
            by_rank.max(),
            by_rank.sum(),
            pp=layout.pp,
            vpp=layout.vpp,
            micro_batches=pricer.sym.m,
            transfer_s=0.0,
        )
        return build_pipeline(layout, pricer.sym.m).total_s(forward, backward) - float(closed)

    def layout(self, scores: GroupScores, pipeline: int, activations: int, states: int) -> Layout:
        """Return the layout of the candidate at these indices of the scores' arrays."""
        policy = self.activation_policies[activations]
        state_policy = self.state_policies[states]
        layout = replace(
            scores.base,
            recompute=policy.recompute,
            graphs=policy.graphs,
            zero=state_policy.zero,
            offload=tuple(sorted({*policy.offload, *state_policy.offload})),
        )
        if scores.dp_overlap[pipeline, activations, states]:
            layout = _with_dp_overlap(layout)
        return with_pipeline(layout, scores.pipelines.shapes[pipeline], self._space)

    def _expert_overlaps(self, cut: Layout) -> list[tuple[Overlap, ...]]:
        """Return the overlaps to screen: without and with overlapped expert communication.

        The last one also delays weight gradients. Where the overlap is fixed, or could hide
        nothing, the layout's own is the only one.
        """
        hides = self.times.collectives.constants["ep_overlap_hidden"] > 0
        if "overlap" in self._space.fixed or cut.ep == 1 or not hides:
            return [cut.overlap]
        overlaps = ((Overlap.EP,), (Overlap.EP, Overlap.WGRAD))
        permitted = (overlap for overlap in overlaps if self._space.permits(overlap=overlap))
        return [cut.overlap, *permitted]

    def _legality(self, group: DegreeGroup, cut: Layout) -> tuple[Array, Array]:
        """Return the mask of legal candidates, and the mask of where any activation policy is.

        Shapes: [pipelines, activation policies, state policies] and [pipelines, state policies].
        """
        key = group.pipelines, cut.overlap, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal:
            shapes = group.pipelines.shapes
            is_legal = np.array([self._policy_legality(cut, shape) for shape in shapes])
            is_searched = np.array(
                [
                    [policy.is_searched_on(shape, self._space) for policy in self.state_policies]
                    for shape in shapes
                ]
            )
            legal = is_legal[:, None, :] & is_searched[:, :, None]
            self._legal[key] = legal.transpose(0, 2, 1), np.asarray(legal.any(axis=2))
        return self._legal[key]

    def _policy_legality(self, cut: Layout, shape: PipelineShape) -> Array:
        """Return which activation policies are legal on a pipeline [activation policies]."""
        key = shape.pp > 1, shape.vpp > 1, cut.overlap, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal_policies:
            layout = with_pipeline(cut, shape, self._space)
            reasons = [
                check_compatibility(
                    self._space.model, self._space.workload, policy.apply_to(layout)
                )
                for policy in self.activation_policies
            ]
            self._legal_policies[key] = np.array(
                [next(policy_reasons, None) is None for policy_reasons in reasons]
            )
        return self._legal_policies[key]

    def _batch(
        self, group: DegreeGroup, *, is_paired: bool
    ) -> tuple[PipelineBatch, tuple[TimingClass, ...]]:
        """Return the pipelines of a group as arrays, with their timing classes."""
        cut = group.layout
        sequences = self._space.workload.global_batch * cut.tp * cut.cp
        pass_sequences = cut.mbs * self._space.hardware.count
        key = group.pipelines, sequences, pass_sequences, is_paired
        if key not in self._batches:
            shapes = group.pipelines.shapes
            layouts = [
                self._pipelines.layout(shape, cut.vpp_group, is_paired=is_paired)
                for shape in shapes
            ]
            micro_batches = [sequences * shape.pp // pass_sequences for shape in shapes]
            batch = batch_pipelines(
                group.pipelines,
                layouts,
                [
                    self._pipelines.ranks(shape, layout)
                    for shape, layout in zip(shapes, layouts, strict=True)
                ],
                [
                    self._pipelines.moments(shape, layout, count)
                    for shape, layout, count in zip(shapes, layouts, micro_batches, strict=True)
                ],
                self._pipelines.distinct_moments,
                micro_batches,
            )
            self._batches[key] = batch, tuple(self._timing_classes(cut, batch))
        return self._batches[key]

    def _timing_classes(self, cut: Layout, batch: PipelineBatch) -> Iterator[TimingClass]:
        symbols = [self.times.symbols(replace(cut, pp=pp)) for pp in batch.degrees]
        # The host's time a micro-batch changes once there are enough of them; in an eager stack, a
        # layer's time changes with every number of micro-batches.
        likes = [int(sym.is_steady) if sym.is_fused else sym.m for sym in symbols]
        like = np.array(likes)[batch.degree]
        synced = (batch.pp > 1) & (batch.vpp == 1)
        # Full recompute of the first layers of each chunk: the stages decide their share.
        stage_counts = batch.pp * batch.vpp if cut.recompute_block else np.zeros_like(batch.pp)
        keys = list(zip(like.tolist(), stage_counts.tolist(), synced.tolist(), strict=True))
        for key in sorted(set(keys)):
            is_alike = np.array([other == key for other in keys])
            first = keys.index(key)
            yield TimingClass(
                like=key[:2],
                synced=key[2],
                ranks=is_alike[batch.pipeline_of_rank],
                pp=int(batch.pp[first]),
                vpp=int(batch.vpp[first]),
            )

    def _price(
        self, priced: _PricedGroup, is_worth_pricing: Array, below_s: float
    ) -> tuple[Array, Array]:
        """Return the step's seconds, and the mask of where overlapped gradient sums are faster.

        Seconds are infinite outside `is_worth_pricing`, and for pipelines that take `below_s` or
        more under the lightest policy. All shapes are [pipelines, activation policies, state
        policies].
        """
        variants = [priced]
        if self._searches_dp_overlap:
            variants.append(replace(priced, base=_with_dp_overlap(priced.base)))
        step = np.full(is_worth_pricing.shape, np.inf)
        overlapped = np.zeros(is_worth_pricing.shape, dtype=bool)
        # Policy 0 is the lightest: neither more recompute nor the host's work for overlapped sums
        # makes a pipeline shorter than under it.
        least = self._pipeline_s(priced, np.array([0]))
        is_needed = is_worth_pricing & (least < below_s)[:, :, None]
        needed = np.flatnonzero(is_needed.any(axis=(0, 2)))
        if not len(needed):
            return step, overlapped
        for variant in variants:
            pipeline_s = self._pipeline_s(variant, needed)
            total = pipeline_s[:, :, None] + self._tail_s(variant, is_needed)[:, None, :]
            total_s = np.where(is_needed[:, needed], total, np.inf)
            better = total_s < step[:, needed]
            step[:, needed] = np.where(better, total_s, step[:, needed])
            overlapped[:, needed] = np.where(better, variant is not priced, overlapped[:, needed])
        return step, overlapped

    def _pipeline_s(self, priced: _PricedGroup, policies: Array) -> Array:
        """Return the seconds of all micro-batches under these policies [pipelines, policies]."""
        batch = priced.batch
        base = priced.base
        by_rank = np.empty((len(batch.ranks), len(policies)))
        for timing in priced.timings:
            seconds = priced.times.seconds(timing, base, policies)
            by_rank[timing.ranks] = batch.ranks[timing.ranks] @ seconds
        transfers = np.array([self._transfer_s(base, pp) for pp in batch.degrees])
        slowest, total = batch.slowest_and_all(by_rank)
        return closed_form_s(
            slowest,
            total,
            pp=batch.pp[:, None],
            vpp=batch.vpp[:, None],
            micro_batches=batch.micro_batches[:, None],
            transfer_s=transfers[batch.degree][:, None],
        )

    def _transfer_s(self, base: Layout, pp: int) -> float:
        key = base.tp, base.cp, base.mbs, pp
        if key not in self._transfers:
            layout = replace(base, pp=pp)
            self._transfers[key] = stage_transfer_s(
                self.times.collectives, self.times.symbols(layout), layout
            )
        return self._transfers[key]

    def _tail_s(self, priced: _PricedGroup, is_needed: Array) -> Array:
        """Return the seconds of what a step does once, on the rank that takes longest.

        These are gradient reduction, weight gathers and the optimizer [pipelines, state policies];
        0 where `is_needed` asks for nothing.
        """
        batch = priced.batch
        tails = np.zeros((len(batch.pp), len(self.state_policies)))
        for column, policy in enumerate(self.state_policies):
            pipelines = np.asarray(is_needed[:, :, column].any(axis=1))
            ranks = np.flatnonzero(pipelines[batch.pipeline_of_rank])
            if len(ranks):
                seconds = self._rank_tails_s(priced.base, policy, batch, ranks)
                np.maximum.at(tails[:, column], batch.pipeline_of_rank[ranks], seconds)
        return tails

    def _rank_tails_s(
        self, base: Layout, policy: StatePolicy, batch: PipelineBatch, ranks: Array
    ) -> list[float]:
        """Return the seconds that each of these ranks takes once a step."""
        base = replace(
            base, zero=policy.zero, offload=tuple(sorted({*base.offload, *policy.offload}))
        )
        # Only zero=3 reduces and gathers more often with more micro-batches.
        mbs = base.mbs if base.zero == 3 else 0
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
        seconds = []
        for rank_pp, numbers in zip(
            pp[ranks].tolist(), parameters[ranks].astype(np.int64).tolist(), strict=True
        ):
            key = shared_key, rank_pp, *numbers
            if key not in self._tails:
                if rank_pp not in symbols:
                    symbols[rank_pp] = self.times.symbols(replace(base, pp=rank_pp))
                self._tails[key] = self._one_tail_s(symbols[rank_pp], numbers)
            seconds.append(self._tails[key])
        return seconds

    def _one_tail_s(self, sym: Symbols, numbers: Sequence[int]) -> float:
        dense, expert, dense_calls, expert_calls = numbers
        parameters = RankParameters(
            dense=dense,
            expert=expert,
            dense_calls=max(1, dense_calls),
            expert_calls=max(1, expert_calls),
        )
        times = self.times
        tail = step_tail(times.rates, times.collectives, sym, parameters)
        return tail.total_s


class _Pipelines:
    """The pipelines of a space apart from all other degrees, each worked out once."""

    def __init__(self, space: SearchSpace, tree: ParameterTree) -> None:
        self._space, self._tree = space, tree
        self._parts = list_parts(space.model, space.base)
        self._layouts: dict[tuple[PipelineShape, int, bool], Layout] = {}
        self._ranks: dict[PipelineShape, DistinctRanks] = {}
        self._moments: dict[tuple[PipelineShape, int, bool], Array] = {}
        self._places: dict[bytes, int] = {}
        self.distinct_moments: list[MomentCounts] = []

    def layout(self, shape: PipelineShape, vpp_group: int, *, is_paired: bool) -> Layout:
        """Return a layout that is this pipeline with one device a pipeline rank."""
        key = shape, vpp_group, is_paired
        if key not in self._layouts:
            base = self._space.base
            alone = Layout(
                world_size=shape.pp,
                vpp_group=vpp_group,
                overlap=(Overlap.EP,) if is_paired else (),
                recompute_block=base.recompute_block,
                recompute_span=base.recompute_span,
            )
            self._layouts[key] = with_pipeline(alone, shape, self._space)
        return self._layouts[key]

    def ranks(self, shape: PipelineShape, layout: Layout) -> DistinctRanks:
        """Return the pipeline ranks that hold different layers."""
        if shape not in self._ranks:
            self._ranks[shape] = find_distinct_ranks(
                self._space.model, self._parts, self._tree, layout
            )
        return self._ranks[shape]

    def moments(self, shape: PipelineShape, layout: Layout, micro_batches: int) -> Array:
        """Return the index in `distinct_moments` of the fullest moments of each rank [ranks]."""
        steady = steady_micro_batches(layout, micro_batches)
        key = shape, steady, bool(layout.overlap)
        if key not in self._moments:
            ranks = self.ranks(shape, layout)
            moments = fullest_moments(ranks, self._parts, layout, steady)
            self._moments[key] = np.array([self._place(counts) for counts in moments])
        return self._moments[key]

    def _place(self, counts: MomentCounts) -> int:
        key = counts.live.tobytes() + counts.backward.tobytes() + counts.paired.tobytes()
        if key not in self._places:
            self._places[key] = len(self.distinct_moments)
            self.distinct_moments.append(counts)
        return self._places[key]


def _does_less(light: ActivationPolicy, heavy: ActivationPolicy) -> bool:
    """Return whether `heavy` recomputes and offloads all that `light` does, and more."""
    less = _recomputed(light.recompute), _offloaded(light)
    more = _recomputed(heavy.recompute), _offloaded(heavy)
    return less != more and less[0] <= more[0] and less[1] <= more[1]


def _offloaded(policy: ActivationPolicy) -> frozenset[Offload]:
    """Return what a policy keeps off the device; under full recompute that is everything."""
    return frozenset(Offload if Recompute.FULL in policy.recompute else policy.offload)


def _recomputed(recompute: Collection[Recompute]) -> frozenset[Recompute]:
    """Return the modules that are recomputed, those that lie inside a wider choice among them."""
    if Recompute.FULL in recompute:
        return frozenset(Recompute)
    if Recompute.MOE in recompute:
        return frozenset((*recompute, Recompute.MOE_ACT, Recompute.SHARED_EXPERTS))
    return frozenset(recompute)


def _with_dp_overlap(layout: Layout) -> Layout:
    """Return the layout with overlapped gradient sums, and weight gathers where there are any."""
    added = {Overlap.GRAD} if layout.zero == 0 else {Overlap.GRAD, Overlap.PARAM}
    return replace(layout, overlap=tuple(sorted({*layout.overlap, *added})))
