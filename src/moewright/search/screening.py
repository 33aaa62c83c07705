"""Seconds and bytes of all candidates of a group at once: the cost floor over arrays.

The parts of a model are priced once and used for every pipeline, number of micro-batches and state
policy of a group. Bytes equal those of a full estimate. Seconds do too except for the bubble, which
comes from a closed form instead of the simulated timetable (tests/search/test_screening.py).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from moewright.cost.evidence import job_factor, needed_margin
from moewright.cost.memory.activations import (
    ActivationPolicies,
    ActivationPolicy,
    OffloadedActivations,
)
from moewright.cost.memory.peak import ModelMemory
from moewright.cost.stage_parts import Array, LayerKind, count_parts, list_parts
from moewright.cost.time.host_time import host_exponents
from moewright.cost.time.layer_time import stage_transfer_s
from moewright.cost.time.pipeline_time import build_pipeline, closed_form_s
from moewright.cost.time.step_tail import exchange_window
from moewright.rules.limits.compatibility import check_compatibility
from moewright.rules.limits.megatron_limits import paired_pass_limits
from moewright.rules.timetable import stages
from moewright.search.pipelines import PipelineBatch, PipelineCache
from moewright.search.screening_memory import ScreeningMemory
from moewright.search.screening_risk import PolicyFactors, ScreeningRisk
from moewright.search.screening_time import GroupTimes, ScreeningTails, ScreeningTimes, TimingClass
from moewright.search.space import (
    DegreeGroup,
    PipelineShape,
    PipelineShapes,
    SearchSpace,
    activation_policies,
    dispatcher_choices,
    state_policies,
    with_pipeline,
)
from moewright.spec.layout import Layout, Offload, Overlap, Recompute
from moewright.spec.plan import DEFAULT_RULE, RankingRule
from moewright.spec.record import copy_with

_WORD_BITS = 64  # the widest integers that NumPy compares bit by bit

_TimingKey = tuple[int, int, bool]  # TimingClass.like and synced


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundedGroup:
    """A group under one overlap of expert communication, with a lower bound of its bounds.

    `base` is the group's layout with the dispatcher, CP exchange and overlap that were chosen for
    it. `legal` [pipelines, activation policies, state policies] is the mask of the combinations
    that exist, `is_searched` [pipelines, state policies] of where any activation policy does.
    `factors` are those of the group's variants, some of which has the least. No candidate takes
    less than `floor_s` a step, nor has a bound (RankingRule) below `floor_bound_s`.
    """

    group: DegreeGroup
    base: Layout
    timings: tuple[TimingClass, ...]
    times: GroupTimes
    legal: Array
    is_searched: Array
    factors: Sequence[PolicyFactors]
    floor_s: float
    floor_bound_s: float

    @property
    def legal_count(self) -> int:
        """The number of candidates."""
        return int(np.count_nonzero(self.legal))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """The scores of a group's candidates under one overlap of expert communication.

    Arrays have the axes [pipelines, activation policies, state policies]. `legal` is the mask of
    the combinations that exist. `step_s` and `bound_s` (RankingRule) are infinite where a time was
    not worth pricing; `uncovered_s` is what collectives beside the micro-batches take beyond them,
    which `step_s` has in it. `dp_overlap` is the mask of candidates whose bound is lower with
    overlapped gradient reduction and weight gathers. `base` is as in BoundedGroup.
    """

    pipelines: PipelineShapes
    base: Layout
    legal: Array
    peak_bytes: Array
    sd_bytes: Array
    step_s: Array
    bound_s: Array
    uncovered_s: Array
    dp_overlap: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class _TooLarge:
    """A group of which nothing may fit in some room, and what makes others at least as large."""

    bounded: BoundedGroup
    room_bytes: float

    def is_within(self, other: BoundedGroup, room_bytes: float) -> bool:
        """Return whether each candidate of a group keeps all that one of these does.

        A larger micro-batch, overlapped experts and delayed weight gradients only add to what is
        kept, where pipelines and policies are among those of this group.
        """
        own = self.bounded
        return (
            room_bytes <= self.room_bytes
            and own.base.mbs <= other.base.mbs
            and set(own.base.overlap) <= set(other.base.overlap)
            and other.group.pipelines.members <= own.group.pipelines.members
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PricedGroup:
    """A group whose parts are priced, with its pipelines and what its layers offload."""

    base: Layout
    batch: PipelineBatch
    timings: tuple[TimingClass, ...]
    times: GroupTimes
    sent: Mapping[LayerKind, OffloadedActivations]


class Screener:
    """A screener that scores the candidates of one space, group by group.

    What does not depend on the candidate is worked out once. `pipelines` are those of a space that
    differs in the machine's speeds alone.
    """

    def __init__(
        self,
        space: SearchSpace,
        rule: RankingRule = DEFAULT_RULE,
        *,
        pipelines: PipelineCache | None = None,
    ) -> None:
        self._space = space
        self.rule = rule
        self.pipelines = pipelines or PipelineCache(space)
        self._parts = list_parts(space.model, space.base, space.workload.trainer)
        self.activation_policies = activation_policies(space)
        self.state_policies = state_policies(space)
        policies = ActivationPolicies(members=self.activation_policies)
        self.times = ScreeningTimes(space, self._parts, policies)
        constants = self.times.rates.constants
        self._memory = ScreeningMemory(
            space, self._parts, constants, policies, self.state_policies, self.pipelines.tree
        )
        self._tails = ScreeningTails(self.times, self._memory, self.state_policies)
        self._risk = ScreeningRisk(
            space, constants, self.activation_policies, self.state_policies, self.rule.risk
        )
        # [light, heavy]: 1 where the first policy recomputes and offloads less than the second.
        self._lighter = np.array(
            [
                [_does_less(light, heavy) for heavy in self.activation_policies]
                for light in self.activation_policies
            ],
            dtype=bool,
        )
        self._searches_dp_overlap = (
            space.hardware.device.kind.is_accelerator
            and "overlap" not in space.fixed
            and space.permits(overlap=(Overlap.GRAD, Overlap.PARAM))
        )
        self._legal: dict[tuple[object, ...], tuple[Array, Array]] = {}
        self._legal_policies: dict[tuple[object, ...], Array] = {}
        self._timings: dict[tuple[PipelineShapes, int, int], tuple[TimingClass, ...]] = {}
        self._transfers: dict[tuple[int, int, int, int], float] = {}
        self._group_memory: tuple[DegreeGroup, ModelMemory] | None = None
        self._stalls: dict[Layout, float] = {}
        self._too_large: dict[tuple[object, ...], list[_TooLarge]] = {}

    def bound(self, group: DegreeGroup) -> Iterator[BoundedGroup]:
        """Yield a group with the lower bound of its candidates, for each overlap of experts."""
        times = None
        for overlap in self._expert_overlaps(group.layout):
            cut = copy_with(group.layout, overlap=overlap)
            _, is_searched = self._legality(group, self._with_static_shapes(cut))
            if not is_searched.any():
                continue
            if times is None:
                times = self.times.price_group(group.layout, self._always_sent(group))
            timings = self._timing_classes(group)
            base = self.times.choose_exchanges(cut, times, timings[0])
            legal, is_searched = self._legality(group, copy_with(cut, dispatcher=base.dispatcher))
            if not is_searched.any():
                continue
            floor_s = min(times.floor_s(variant, timings) for variant in self._quickest(base))
            factors = self._list_factors(base, group.pipelines)
            yield BoundedGroup(
                group=group,
                base=base,
                timings=timings,
                times=times,
                legal=legal,
                is_searched=is_searched,
                factors=factors,
                floor_s=floor_s * min(float(some.own.min()) for some in factors),
                floor_bound_s=floor_s * min(float(some.of_class.min()) for some in factors),
            )

    def score(
        self, bounded: BoundedGroup, *, room_bytes: float, below_s: float, is_best: bool = False
    ) -> GroupScores | None:
        """Return the scores of all candidates of a group; None where no bound is below `below_s`.

        A time that cannot matter is not priced: that of a layout whose bytes exceed `room_bytes` by
        more than a standard deviation, and of a pipeline whose bound is `below_s` or more even
        without recompute. Where the best candidate `is_best` alone wanted, neither are those of
        layouts that are not safe, nor of any whose micro-batches take so long.
        """
        if bounded.floor_bound_s >= below_s or self.lacks_room(bounded, room_bytes):
            return None
        group, base = bounded.group, bounded.base
        batch = self.pipelines.batch(group, is_paired=Overlap.EP in base.overlap)
        least_s = self._least_s(bounded, batch)
        least_factors = np.minimum.reduce(
            [factors.least_by_pipeline() for factors in bounded.factors]
        )
        is_fast = least_s * least_factors[:, None] < below_s
        if not is_fast.any():
            return None
        memory = self._model_memory(group)
        sym = self.times.symbols(base)
        peak, sd = self._memory.device_bytes(memory, sym, batch, bounded.is_searched)
        is_worth_pricing = bounded.legal & (peak <= room_bytes + sd)
        if not is_worth_pricing.any():
            too_large = self._too_large.setdefault(_sharding(base), [])
            too_large.append(_TooLarge(bounded=bounded, room_bytes=room_bytes))
        # Views of one number: most groups are never priced.
        step = np.broadcast_to(np.inf, peak.shape)
        bound = step
        uncovered = np.broadcast_to(0.0, peak.shape)
        dp_overlap = np.broadcast_to(False, peak.shape)
        if is_worth_pricing.any():
            is_worth_pricing &= is_fast[:, :, None]
            has_room = bounded.legal & (peak <= self.safe_bytes(sd))
            if is_best:
                is_worth_pricing &= has_room
            # The graphs and bytes of these are left as they are: only their time is not worked out.
            rows = np.flatnonzero(is_worth_pricing.any(axis=(1, 2)))
            is_worth_pricing[rows] &= ~self._is_needless(has_room[rows], base, group, rows)
            priced = _PricedGroup(
                base=base,
                batch=batch,
                timings=bounded.timings,
                times=bounded.times,
                sent=self.times.sent_activations(memory),
            )
            limit_s = below_s if is_best else np.inf
            step, bound, uncovered, dp_overlap = self._price(priced, is_worth_pricing, limit_s)
        return GroupScores(
            pipelines=group.pipelines,
            base=base,
            legal=bounded.legal,
            peak_bytes=peak,
            sd_bytes=sd,
            step_s=step,
            bound_s=bound,
            uncovered_s=uncovered,
            dp_overlap=dp_overlap,
        )

    def lacks_room(self, bounded: BoundedGroup, room_bytes: float) -> bool:
        """Return whether a group that was scored shows that nothing of this one may fit."""
        too_large = self._too_large.get(_sharding(bounded.base), ())
        return any(group.is_within(bounded, room_bytes) for group in too_large)

    def fits(self, bounded: BoundedGroup) -> Array:
        """Return which candidates are safe, whatever time they take."""
        memory = self._model_memory(bounded.group)
        batch = self.pipelines.batch(bounded.group, is_paired=Overlap.EP in bounded.base.overlap)
        sym = self.times.symbols(bounded.base)
        peak, sd = self._memory.device_bytes(memory, sym, batch, bounded.is_searched)
        return bounded.legal & (peak <= self.safe_bytes(sd))

    def safe_bytes(self, sd_bytes: Array, extra_bytes: float = 0.0) -> Array:
        """Return the mean peaks up to which layouts are safe, with so much more memory."""
        capacity = self._space.hardware.device.memory_bytes.value
        margin = needed_margin(sd_bytes, self.rule.fit_probability)
        return capacity + extra_bytes - margin

    def factor(self, scores: GroupScores, place: tuple[int, ...]) -> float:
        """Return bound over step of the candidate at these indices."""
        return float(scores.bound_s[place] / scores.step_s[place])

    def _model_memory(self, group: DegreeGroup) -> ModelMemory:
        """Return the memory of the model's parts in a group; that of the last group is kept."""
        if self._group_memory is None or self._group_memory[0] is not group:
            memory = self._memory.model_memory(self.times.symbols(group.layout))
            self._group_memory = group, memory
        return self._group_memory[1]

    def _always_sent(self, group: DegreeGroup) -> ModelMemory | None:
        """Return the group's memory where every policy offloads activations; else None."""
        return self._model_memory(group) if self.activation_policies[0].offload else None

    def _quickest(self, base: Layout) -> list[Layout]:
        """Return the variants of a layout of which some takes least before recompute.

        Overlapped gradient sums take host time, under which more of an overlapped expert exchange
        hides.
        """
        if self._searches_dp_overlap and Overlap.EP in base.overlap:
            return [base, with_dp_overlap(base)]
        return [base]

    def _variants(self, base: Layout) -> list[Layout]:
        """Return a layout without and with overlapped gradient sums, where both are searched."""
        # Graphs of attention would lose delayed weight gradients of biases under overlapped sums.
        loses_biases = self._space.model.attention.qkv_bias and Overlap.WGRAD in base.overlap
        if self._searches_dp_overlap and not loses_biases:
            return [base, with_dp_overlap(base)]
        return [base]

    def _list_factors(self, base: Layout, pipelines: PipelineShapes) -> list[PolicyFactors]:
        """Return the factors of a group's variants, some of which has the least.

        Overlapped gradient sums are one more choice, surer only where own runs made it.
        """
        variants = self._variants(base) if self._space.hardware.own_runs else [base]
        return [self._risk.factors(variant, pipelines) for variant in variants]

    def _is_needless(
        self, has_room: Array, base: Layout, group: DegreeGroup, pipelines: Array
    ) -> Array:
        """Return the mask of candidates that a lighter policy makes needless.

        That is where less recompute or offload of activations, or the first state policy instead of
        this one, is safe (`has_room`), and its bound lies no further above its step. `pipelines`
        are places among those of the group; the others have [pipelines, policies, states].
        """
        if not has_room.any():
            return np.zeros(has_room.shape, dtype=bool)
        needless = np.full(has_room.shape, True)
        for variant in self._variants(base):
            factors = self._risk.factors(variant, group.pipelines)
            for place, row in enumerate(factors.of_class):
                members = factors.class_of_pipeline[pipelines] == place
                if members.any():
                    needless[members] &= self._is_beaten(has_room[members], row)
        return needless

    def _is_beaten(self, has_room: Array, factors: Array) -> Array:
        """Return which candidates of pipelines with the same factors are beaten by a lighter one.

        `has_room` and the result are [pipelines, activation policies, state policies]; `factors`
        broadcasts to [activation policies, state policies].
        """
        by_state = np.broadcast_to(factors, has_room.shape[1:]).T
        # [heavy, state policies, words] and [pipelines, state policies, words], a bit a lighter
        # policy: a product of matrices would start BLAS's threads, which wait busily on each other.
        beats = self._lighter & (by_state[:, :, None] <= by_state[:, None, :])
        beating = _pack_bits(beats.transpose(2, 0, 1))
        safe = _pack_bits(has_room.transpose(0, 2, 1))
        is_beaten = np.zeros(has_room.shape, dtype=bool)
        for word in range(safe.shape[-1]):
            is_beaten |= (safe[:, None, :, word] & beating[None, :, :, word]) > 0
        is_surer = by_state[0] <= by_state[1:]
        is_beaten[:, :, 1:] |= has_room[:, :, :1] & is_surer.T
        return np.asarray(is_beaten)

    def stall_s(self, layout: Layout) -> float:
        """Return the seconds that the simulated timetable takes beyond the closed form of scores.

        It is 0 for schedules that split backwards, whose timetables take too long to simulate for
        any layouts but the plans that are shown.
        """
        if layout.schedule.splits_backward:
            return 0.0
        if layout not in self._stalls:
            self._stalls[layout] = self._simulate_stall_s(layout)
        return self._stalls[layout]

    def covered_by_stall_s(self, layout: Layout, uncovered_s: float) -> float:
        """Return how much less of `uncovered_s` shows beside the stalls of a layout's pipeline."""
        if not uncovered_s:
            return 0.0
        m = self.times.symbols(layout).m
        window = exchange_window(layout.zero, pp=layout.pp, vpp=layout.vpp, micro_batches=m)
        return min(uncovered_s, float(window) * self.stall_s(layout))

    def _simulate_stall_s(self, layout: Layout) -> float:
        pricer = self.times.pricer(layout, self.times.symbols(layout))
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
            # Scores have the transfers already.
            transfer_s=0.0,
        )
        stalled_s = build_pipeline(layout, pricer.sym.m).total_s(forward, backward) - float(closed)
        return stalled_s * job_factor(self._space.job(layout), self._space.hardware)

    def layout(self, scores: GroupScores, pipeline: int, activations: int, states: int) -> Layout:
        """Return the layout of the candidate at these indices of the scores' arrays."""
        policy = self.activation_policies[activations]
        state_policy = self.state_policies[states]
        layout = copy_with(
            scores.base,
            recompute=policy.recompute,
            graphs=policy.graphs,
            zero=state_policy.zero,
            offload=tuple(sorted({*policy.offload, *state_policy.offload})),
        )
        if scores.dp_overlap[pipeline, activations, states]:
            layout = with_dp_overlap(layout)
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
        is_static = cut.dispatcher.facts.has_static_shapes
        # Rules of compatibility ask of degrees whether they are above 1.
        key = group.pipelines, cut.overlap, is_static, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal:
            shapes = group.pipelines.shapes
            cuts = [copy_with(cut, zero=policy.zero) for policy in self.state_policies]
            is_legal = np.array(
                [[self._policy_legality(own, shape) for own in cuts] for shape in shapes]
            )
            is_searched = np.array(
                [
                    [policy.is_searched_on(shape, self._space) for policy in self.state_policies]
                    for shape in shapes
                ]
            )
            legal = is_legal & is_searched[:, :, None]
            self._legal[key] = legal.transpose(0, 2, 1), np.asarray(legal.any(axis=2))
        return self._legal[key]

    def _with_static_shapes(self, cut: Layout) -> Layout:
        """Return a layout with a dispatcher of static shapes, where it may get one."""
        for dispatcher in dispatcher_choices(self._space, cut):
            if dispatcher.facts.has_static_shapes:
                return copy_with(cut, dispatcher=dispatcher)
        return cut

    def _policy_legality(self, cut: Layout, shape: PipelineShape) -> Array:
        """Return which activation policies are legal on a pipeline [activation policies]."""
        degrees = shape.pp > 1, shape.vpp > 1, cut.ep > 1, cut.tp > 1, cut.cp > 1
        key = degrees, cut.overlap, cut.dispatcher.facts.has_static_shapes, cut.zero
        if key not in self._legal_policies:
            layout = with_pipeline(cut, shape, self._space)
            jobs = [self._space.job(policy.apply_to(layout)) for policy in self.activation_policies]
            reasons = [check_compatibility(job) for job in jobs]
            if "overlap" not in self._space.fixed:
                # The share of an exchange that hides is fitted to runs of Megatron-LM: what it does
                # not overlap is not searched unless it is asked for.
                reasons = [
                    chain(own, paired_pass_limits(job))
                    for own, job in zip(reasons, jobs, strict=True)
                ]
            self._legal_policies[key] = np.array(
                [next(policy_reasons, None) is None for policy_reasons in reasons]
            )
        return self._legal_policies[key]

    def _timing_classes(self, group: DegreeGroup) -> tuple[TimingClass, ...]:
        cut, shapes = group.layout, group.pipelines.shapes
        sequences = self._space.workload.global_batch * cut.tp * cut.cp
        key = group.pipelines, sequences, cut.mbs * self._space.hardware.count
        if key not in self._timings:
            self._timings[key] = tuple(self._list_timing_classes(cut, shapes))
        return self._timings[key]

    def _list_timing_classes(
        self, cut: Layout, shapes: Sequence[PipelineShape]
    ) -> Iterator[TimingClass]:
        by_degree = {pp: self.times.symbols(copy_with(cut, pp=pp)) for pp in {s.pp for s in shapes}}
        classes: dict[_TimingKey, list[int]] = {}
        for place, shape in enumerate(shapes):
            sym = by_degree[shape.pp]
            # The host's time a micro-batch changes once there are enough of them; in an eager
            # stack, a layer's time changes with every number of micro-batches.
            like = int(sym.is_steady) if sym.is_fused else sym.m
            # Full recompute of the first layers of each chunk: the stages decide their share.
            stage_count = shape.pp * shape.vpp if cut.recompute_block else 0
            is_synced = shape.pp > 1 and shape.vpp == 1
            classes.setdefault((like, stage_count, is_synced), []).append(place)
        outrun = self._find_outrun(classes) if by_degree[shapes[0].pp].is_fused else set()
        for (like, stage_count, is_synced), places in sorted(classes.items()):
            is_member = np.zeros(len(shapes), dtype=bool)
            is_member[places] = True
            yield TimingClass(
                like=(like, stage_count),
                synced=is_synced,
                is_outrun=(like, stage_count, is_synced) in outrun,
                pipelines=is_member,
                pp=shapes[places[0]].pp,
                vpp=shapes[places[0]].vpp,
            )

    def _find_outrun(self, classes: Collection[_TimingKey]) -> set[_TimingKey]:
        """Find the classes in which no layer of a fused stack is faster than in another class.

        Those whose chunks recompute alike differ in how much of the host's time the device's hides.
        """
        constants = self.times.rates.constants
        exponents = {
            key: host_exponents(constants, is_steady=bool(key[0]), synced=key[2]) for key in classes
        }
        outrun: set[_TimingKey] = set()
        for key, own in exponents.items():
            for other, higher in exponents.items():
                # Of classes that outrun each other, one has to stay.
                is_rival = other not in outrun and other != key and other[1] == key[1]
                # The higher exponent hides more of the host's time.
                if is_rival and all(map(operator.ge, higher, own)):
                    outrun.add(key)
                    break
        return outrun

    def _price(
        self, priced: _PricedGroup, is_worth_pricing: Array, below_s: float
    ) -> tuple[Array, Array, Array, Array]:
        """Return `step_s`, `bound_s`, `uncovered_s` and `dp_overlap` of GroupScores.

        Seconds are infinite outside `is_worth_pricing`, and where the bound of micro-batches alone
        is `below_s` or more. All shapes are [pipelines, activation
        policies, state policies].
        """
        step = np.full(is_worth_pricing.shape, np.inf)
        bound = np.full(is_worth_pricing.shape, np.inf)
        uncovered = np.zeros(is_worth_pricing.shape)
        overlapped = np.zeros(is_worth_pricing.shape, dtype=bool)
        needed = np.flatnonzero(is_worth_pricing.any(axis=(0, 2)))
        if not len(needed):
            return step, bound, uncovered, overlapped
        for place, base in enumerate(self._variants(priced.base)):
            variant = replace(priced, base=base)
            factors = self._risk.factors(base, priced.batch.pipelines)
            spread = np.broadcast_to(factors.spread(), step.shape)[:, needed]
            spread_own = np.broadcast_to(factors.spread_own(), step.shape)[:, needed]
            pipeline_s = self._pipeline_s(variant, needed)
            is_fast = is_worth_pricing[:, needed] & (pipeline_s[:, :, None] * spread < below_s)
            tail_s, least_s = self._tails.seconds(base, variant.batch, is_fast)
            covered = pipeline_s[:, :, None] + tail_s[:, None, :]
            apart = (1 - self._tails.windows(variant.batch))[:, None, :]
            total = np.maximum(covered, apart * pipeline_s[:, :, None] + least_s[:, None, :])
            total_s = np.where(is_fast, total, np.inf)
            total_bound_s = total_s * spread
            better = total_bound_s < bound[:, needed]
            bound[:, needed] = np.where(better, total_bound_s, bound[:, needed])
            step[:, needed] = np.where(better, total_s * spread_own, step[:, needed])
            beyond_s = (total - covered) * spread_own
            uncovered[:, needed] = np.where(better, beyond_s, uncovered[:, needed])
            overlapped[:, needed] = np.where(better, place > 0, overlapped[:, needed])
        return step, bound, uncovered, overlapped

    def _least_s(self, bounded: BoundedGroup, batch: PipelineBatch) -> Array:
        """Return the seconds of all micro-batches without recompute [pipelines, 1]."""
        of_variants = [
            self._join_pipelines(
                variant,
                batch,
                [
                    bounded.times.lightest_seconds(timing, variant)[:, None]
                    for timing in bounded.timings
                ],
                bounded.timings,
            )
            for variant in self._quickest(bounded.base)
        ]
        return np.asarray(np.minimum.reduce(of_variants))

    def _pipeline_s(self, priced: _PricedGroup, policies: Array) -> Array:
        """Return the seconds of all micro-batches under these policies [pipelines, policies]."""
        seconds = [
            priced.times.seconds(timing, priced.base, policies, priced.sent)
            for timing in priced.timings
        ]
        return self._join_pipelines(priced.base, priced.batch, seconds, priced.timings)

    def _join_pipelines(
        self,
        base: Layout,
        batch: PipelineBatch,
        seconds: Sequence[Array],
        timings: Sequence[TimingClass],
    ) -> Array:
        """Return the seconds of all micro-batches [pipelines, policies].

        `seconds` [parts, policies] are of one micro-batch, in each class of `timings`.
        """
        by_rank = np.empty((len(batch.ranks), seconds[0].shape[1]))
        for timing, of_parts in zip(timings, seconds, strict=True):
            ranks = timing.pipelines[batch.pipeline_of_rank]
            by_rank[ranks] = batch.ranks[ranks] @ of_parts
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
            layout = copy_with(base, pp=pp)
            self._transfers[key] = stage_transfer_s(
                self.times.collectives, self.times.symbols(layout), layout
            )
        return self._transfers[key]


def _sharding(base: Layout) -> tuple[object, ...]:
    """Return what divides and buffers what layers keep: equal for groups that compare by size."""
    return base.tp, base.cp, base.ep, base.etp, base.dispatcher, base.cp_comm


def _pack_bits(mask: Array) -> Array:
    """Return the last axis of a mask as bits of 64-bit words, the last word filled up with 0."""
    count = mask.shape[-1]
    padded = np.zeros((*mask.shape[:-1], count + -count % _WORD_BITS), dtype=bool)
    padded[..., :count] = mask
    return np.packbits(padded, axis=-1).view(np.uint64)


def _does_less(light: ActivationPolicy, heavy: ActivationPolicy) -> bool:
    """Return whether `heavy` recomputes and offloads all that `light` does, and more.

    What takes the host more time, since its graphs capture less, is not light.
    """
    if not set(heavy.graphs) <= set(light.graphs):
        return False
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


def with_dp_overlap(layout: Layout) -> Layout:
    """Return the layout with overlapped gradient sums, and weight gathers where there are any."""
    added = {Overlap.GRAD} if layout.zero == 0 else {Overlap.GRAD, Overlap.PARAM}
    return copy_with(layout, overlap=tuple(sorted({*layout.overlap, *added})))
