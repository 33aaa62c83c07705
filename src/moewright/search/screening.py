"""Seconds and bytes of all candidates of a group at once: the prices of the cost floor, combined
over arrays.

A piece (a layer, an embedding, a pass through the head) is priced once for all pipelines,
micro-batch counts and ways to hold the states that go with it; the closed form of the pipeline
joins them. Nothing here is an estimate of its own: the best candidates are estimated in full, and
both agree (tests/search/test_scout.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.cost.buffers import dispatcher_bytes
from moewright.cost.layer_time import stage_transfer_s
from moewright.cost.memory import steady_micro_batches
from moewright.cost.pipeline_time import build_pipeline, closed_form_s
from moewright.cost.repricing import count_chunk_layers, pass_seconds
from moewright.cost.step_time import RankParameters, step_tail
from moewright.cost.symbols import Symbols
from moewright.rules.compatibility import check_compatibility
from moewright.search.pipeline_arrays import (
    Array,
    DistinctRanks,
    PipelineBatch,
    batch_pipelines,
    find_distinct_ranks,
    list_layer_kinds,
    peak_snapshots,
)
from moewright.search.screening_memory import ScreeningMemory
from moewright.search.screening_time import GroupTimes, ScreeningTimes, TimingClass
from moewright.search.space import (
    ActivationPolicy,
    DegreeGroup,
    PipelineShape,
    PipelineShapes,
    SearchSpace,
    activation_policies,
    state_policies,
    with_pipeline,
)
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Offload, Overlap, Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """A group under one way to overlap expert communication, as arrays over [pipelines, works,
    keeps].

    `legal` says which combinations exist. `step_s` is infinite where it was not worth pricing, and
    nowhere below `floor_s`; `dp_overlap` says where overlapped gradient sums and weight gathers are
    faster. `base` is the group's layout with what pricing settled.
    """

    pipelines: PipelineShapes
    base: Layout
    legal: Array
    peak_bytes: Array
    sd_bytes: Array
    step_s: Array
    floor_s: float
    dp_overlap: Array


class Screener:
    """Prices the candidates of one space; what does not depend on the candidate is worked out
    once."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._pieces = list_layer_kinds(space.model)
        self.works, self.keeps = activation_policies(space), state_policies(space)
        self.prices = ScreeningTimes(space, self._pieces, self.works)
        self._rates, self._links = self.prices.rates, self.prices.links
        # [w, v]: work w replays and sends away less than work v.
        self._lighter = np.array(
            [[_does_less(w, v) for v in self.works] for w in self.works], dtype=np.float32
        )
        cuda = space.hardware.device.kind is DeviceKind.CUDA
        sums = (Overlap.GRAD, Overlap.PARAM)
        self._overlaps_sums = cuda and "overlap" not in space.fixed and space.permits(overlap=sums)
        self._room = ScreeningMemory(
            space, self._pieces, self._rates.constants, self.works, self.keeps
        )
        self._shapes: dict[PipelineShape, DistinctRanks] = {}
        self._moments: dict[tuple[PipelineShape, int, bool], tuple[Array, ...]] = {}
        self._stacks: dict[
            tuple[PipelineShapes, int, int, bool], tuple[PipelineBatch, tuple[TimingClass, ...]]
        ] = {}
        self._legal: dict[tuple[object, ...], tuple[Array, Array]] = {}
        self._legal_works: dict[tuple[object, ...], Array] = {}
        self._tails: dict[tuple[object, ...], float] = {}
        self._transfers: dict[tuple[int, int, int, int], float] = {}
        self._bare: dict[tuple[PipelineShape, int, bool], Layout] = {}

    def screen(
        self, group: DegreeGroup, *, room_bytes: float, below_s: float
    ) -> Iterator[GroupScores]:
        """All candidates of a group. Time is left out where it cannot matter: of layouts that need
        more than `room_bytes` by more than the spread, and of pipelines that take `below_s` or more
        even without recompute.
        """
        size = self.prices.size(group.layout)
        at_once = self._room.layers(size)
        prices, fits = self.prices.price_group(group.layout, at_once), True
        for overlap in self._expert_overlaps(group.layout):
            cut, layers = replace(group.layout, overlap=overlap), at_once
            legal, suits = self._legality(group, cut)
            if not suits.any():
                continue
            stacked, paces = self._stack(group, paired=Overlap.EP in overlap)
            if Overlap.WGRAD in overlap:
                # Late weight gradients fit nowhere that others do not, so those that are too slow
                # are not even weighed.
                if not fits or not self._in_time(cut, stacked, prices, paces, below_s):
                    continue
                layers = self._room.delay_weight_gradients(size, at_once)
            peak, spread = self._room.device_bytes(size, layers, group.pipelines, stacked, suits)
            worth = legal & (peak <= room_bytes + spread)
            base, floor_s = cut, np.inf
            step, dp_overlap = (
                np.broadcast_to(np.inf, peak.shape),
                np.broadcast_to(False, peak.shape),
            )
            fits = bool(worth.any())
            if fits:
                base = self.prices.choose_exchanges(cut, prices, paces[0])
                floor_s = prices.floor_s(base, paces)
                if floor_s < below_s:
                    worth &= ~self._needless(legal, peak, spread)
                    step, dp_overlap = self._price(base, stacked, prices, paces, worth, below_s)
                peak = peak + (dispatcher_bytes(self.prices.size(base)) - dispatcher_bytes(size))
            yield GroupScores(
                pipelines=group.pipelines,
                base=base,
                legal=legal,
                peak_bytes=peak,
                sd_bytes=spread,
                step_s=step,
                floor_s=floor_s,
                dp_overlap=dp_overlap,
            )

    def _in_time(
        self,
        cut: Layout,
        stacked: PipelineBatch,
        prices: GroupTimes,
        paces: Sequence[TimingClass],
        below_s: float,
    ) -> bool:
        """Whether any pipeline takes less than `below_s` without recompute."""
        base = self.prices.choose_exchanges(cut, prices, paces[0])
        if prices.floor_s(base, paces) >= below_s:
            return False
        return bool((self._moving(prices, base, stacked, paces, np.array([0])) < below_s).any())

    def _needless(self, legal: Array, peak: Array, spread: Array) -> Array:
        """[pipelines, works, keeps] where nothing is gained, as less replaying or moving fits with
        room."""
        roomy = legal & (peak <= self._space.hardware.device.memory_bytes.value - spread)
        found = roomy.transpose(0, 2, 1).astype(np.float32) @ self._lighter > 0
        found[:, 1:] |= roomy.transpose(0, 2, 1)[:, :1]
        return np.asarray(found.transpose(0, 2, 1))

    def stall_s(self, layout: Layout) -> float:
        """Seconds that the rows of the layout's timetable take beyond the closed form that scores
        it; 0 for schedules that split backwards, whose tables are too long to run for any but the
        plans shown.
        """
        if layout.schedule.splits_backward:
            return 0.0
        pricer = self.prices.pricer(layout)
        size, pieces = pricer.size, pricer.layer_times(layout)
        held = count_chunk_layers(size.model, layout, tuple(pieces.layers))
        forward, backward = (held @ seconds for seconds in pass_seconds(pieces))
        of_rank = (forward + backward).reshape(layout.vpp, layout.pp).sum(axis=0)
        closed = closed_form_s(
            of_rank.max(),
            of_rank.sum(),
            pp=layout.pp,
            vpp=layout.vpp,
            micro_batches=size.m,
            transfer_s=0.0,
        )
        return build_pipeline(layout, size.m).total_s(forward, backward) - float(closed)

    def layout(self, scores: GroupScores, pipe: int, work: int, keep: int) -> Layout:
        """The layout of one entry of the arrays."""
        chosen, states = self.works[work], self.keeps[keep]
        layout = replace(
            scores.base,
            recompute=chosen.recompute,
            graphs=chosen.graphs,
            zero=states.zero,
            offload=tuple(sorted({*chosen.offload, *states.offload})),
        )
        if scores.dp_overlap[pipe, work, keep]:
            layout = _with_dp_overlap(layout)
        return with_pipeline(layout, scores.pipelines.shapes[pipe], self._space)

    def _expert_overlaps(self, cut: Layout) -> list[tuple[Overlap, ...]]:
        """Overlaps of the layout without and with that of expert communication, and with weight
        gradients delayed for it, as far as they can gain.
        """
        hides = self._links.constants["ep_overlap_hidden"] > 0
        if "overlap" in self._space.fixed or cut.ep == 1 or not hides:
            return [cut.overlap]
        ways = ((Overlap.EP,), (Overlap.EP, Overlap.WGRAD))
        return [cut.overlap, *(way for way in ways if self._space.permits(overlap=way))]

    def _legality(self, group: DegreeGroup, cut: Layout) -> tuple[Array, Array]:
        """[pipelines, works, keeps], and [pipelines, keeps] where any work is legal."""
        key = group.pipelines, cut.overlap, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal:
            found = np.array([self._work_legality(cut, pipe) for pipe in group.pipelines.shapes])
            suits = [
                [keep.is_searched_on(pipe, self._space) for keep in self.keeps]
                for pipe in group.pipelines.shapes
            ]
            legal = found[:, None, :] & np.array(suits)[:, :, None]
            self._legal[key] = legal.transpose(0, 2, 1), np.asarray(legal.any(axis=2))
        return self._legal[key]

    def _work_legality(self, cut: Layout, pipe: PipelineShape) -> Array:
        """[works]"""
        key = pipe.pp > 1, pipe.vpp > 1, cut.overlap, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal_works:
            layout = with_pipeline(cut, pipe, self._space)
            reasons = [
                check_compatibility(self._space.model, self._space.workload, work.apply_to(layout))
                for work in self.works
            ]
            self._legal_works[key] = np.array([next(each, None) is None for each in reasons])
        return self._legal_works[key]

    def _stack(
        self, group: DegreeGroup, *, paired: bool
    ) -> tuple[PipelineBatch, tuple[TimingClass, ...]]:
        cut, world = group.layout, self._space.hardware.count
        batch, one_pass = self._space.workload.global_batch * cut.tp * cut.cp, cut.mbs * world
        key = group.pipelines, batch, one_pass, paired
        if key not in self._stacks:
            layouts = [
                self._alone(pipe, cut.vpp_group, paired=paired) for pipe in group.pipelines.shapes
            ]
            counts = [batch * pipe.pp // one_pass for pipe in group.pipelines.shapes]
            shapes = [
                self._shape(pipe, layout)
                for pipe, layout in zip(group.pipelines.shapes, layouts, strict=True)
            ]
            moments = [
                self._fullest(pipe, layout, shape, count)
                for pipe, layout, shape, count in zip(
                    group.pipelines.shapes, layouts, shapes, counts, strict=True
                )
            ]
            stacked = batch_pipelines(layouts, shapes, moments, counts)
            self._stacks[key] = stacked, tuple(self._paces(cut, stacked))
        return self._stacks[key]

    def _alone(self, pipe: PipelineShape, vpp_group: int, *, paired: bool) -> Layout:
        """A pipeline of single ranks."""
        key = pipe, vpp_group, paired
        if key not in self._bare:
            bare = Layout(
                world_size=pipe.pp, vpp_group=vpp_group, overlap=(Overlap.EP,) if paired else ()
            )
            self._bare[key] = with_pipeline(bare, pipe, self._space)
        return self._bare[key]

    def _paces(self, cut: Layout, stacked: PipelineBatch) -> Iterator[TimingClass]:
        sizes = [self.prices.size(replace(cut, pp=pp)) for pp in stacked.degrees]
        likes = np.array([int(size.is_steady) if size.is_fused else size.m for size in sizes])[
            stacked.degree
        ]
        synced = (stacked.pp > 1) & (stacked.vpp == 1)
        for like, waits in sorted(set(zip(likes.tolist(), synced.tolist(), strict=True))):
            rows = (likes == like) & (synced == waits)
            pp = int(stacked.pp[int(np.argmax(rows))])
            yield TimingClass(like=like, synced=waits, ranks=rows[stacked.pipe_of_seat], pp=pp)

    def _shape(self, pipe: PipelineShape, layout: Layout) -> DistinctRanks:
        if pipe not in self._shapes:
            self._shapes[pipe] = find_distinct_ranks(self._space.model, self._pieces, layout)
        return self._shapes[pipe]

    def _fullest(
        self, pipe: PipelineShape, layout: Layout, shape: DistinctRanks, count: int
    ) -> tuple[Array, ...]:
        key = pipe, steady_micro_batches(layout, count), bool(layout.overlap)
        if key not in self._moments:
            self._moments[key] = peak_snapshots(shape, self._pieces, layout, count)
        return self._moments[key]

    def _price(
        self,
        base: Layout,
        stacked: PipelineBatch,
        prices: GroupTimes,
        paces: Sequence[TimingClass],
        worth: Array,
        below_s: float,
    ) -> tuple[Array, Array]:
        """[pipelines, works, keeps] seconds of a step where it is worth it, and whether with
        overlapped sums."""
        variants = [base]
        if self._overlaps_sums:
            variants.append(_with_dp_overlap(base))
        step, overlapped = np.full(worth.shape, np.inf), np.zeros(worth.shape, dtype=bool)
        # Neither replays nor the host's work for overlapped sums make the lightest work any
        # shorter.
        least = self._moving(prices, base, stacked, paces, np.array([0]))
        wanted = worth & (least < below_s)[:, :, None]
        needed = np.flatnonzero(wanted.any(axis=(0, 2)))
        if not len(needed):
            return step, overlapped
        for variant in variants:
            moving = self._moving(prices, variant, stacked, paces, needed)
            whole = moving[:, :, None] + self._tail_s(variant, stacked, wanted)[:, None, :]
            found = np.where(wanted[:, needed], whole, np.inf)
            better = found < step[:, needed]
            step[:, needed] = np.where(better, found, step[:, needed])
            overlapped[:, needed] = np.where(better, variant is not base, overlapped[:, needed])
        return step, overlapped

    def _moving(
        self,
        prices: GroupTimes,
        base: Layout,
        stacked: PipelineBatch,
        paces: Sequence[TimingClass],
        of_works: Array,
    ) -> Array:
        """[P, works] seconds of all micro-batches through the pipelines."""
        totals = np.empty((len(stacked.ranks), len(of_works)))
        for pace in paces:
            totals[pace.ranks] = stacked.ranks[pace.ranks] @ prices.seconds(pace, base, of_works)
        transfer = np.array([self._transfer_s(base, pp) for pp in stacked.degrees])
        slowest, whole = stacked.slowest_and_all(totals)
        return closed_form_s(
            slowest,
            whole,
            pp=stacked.pp[:, None],
            vpp=stacked.vpp[:, None],
            micro_batches=stacked.micro_batches[:, None],
            transfer_s=transfer[stacked.degree][:, None],
        )

    def _transfer_s(self, base: Layout, pp: int) -> float:
        key = base.tp, base.cp, base.mbs, pp
        if key not in self._transfers:
            layout = replace(base, pp=pp)
            self._transfers[key] = stage_transfer_s(self._links, self.prices.size(layout), layout)
        return self._transfers[key]

    def _tail_s(self, base: Layout, stacked: PipelineBatch, wanted: Array) -> Array:
        """[P, keeps] seconds of what a step does once, on the rank that takes longest; 0 where
        nothing is wanted."""
        found = np.zeros((len(stacked.pp), len(self.keeps)))
        shares = self._room.shares(base, stacked)
        for column, keep in enumerate(self.keeps):
            pipes = np.asarray(wanted[:, :, column].any(axis=1))
            if pipes.any():
                layout = replace(
                    base, zero=keep.zero, offload=tuple(sorted({*base.offload, *keep.offload}))
                )
                self._add_tails(
                    found[:, column],
                    layout,
                    stacked,
                    shares,
                    np.flatnonzero(pipes[stacked.pipe_of_seat]),
                )
        return found

    def _add_tails(
        self, found: Array, base: Layout, stacked: PipelineBatch, shares: Array, seats: Array
    ) -> None:
        pipes = stacked.pipe_of_seat[seats]
        # Only zero=3 reduces and gathers more often with more micro-batches.
        often = base.mbs if base.zero == 3 else 0
        same = (
            base.tp,
            base.cp,
            base.ep,
            base.etp,
            often,
            base.zero,
            base.offload,
            Overlap.GRAD in base.overlap,
        )
        sizes: dict[int, Symbols] = {}
        for share, pipe, pp in zip(
            shares[seats].tolist(), pipes.tolist(), stacked.pp[pipes].tolist(), strict=True
        ):
            dense, expert, dense_calls, expert_calls = share
            key = same, pp, dense, expert
            if key not in self._tails:
                held = RankParameters(
                    dense=dense, expert=expert, dense_calls=dense_calls, expert_calls=expert_calls
                )
                if pp not in sizes:
                    sizes[pp] = self.prices.size(replace(base, pp=pp))
                size = sizes[pp]
                last = step_tail(
                    self._rates, self._links, self._space.workload, size, size.layout, held
                )
                self._tails[key] = last.total_s
            found[pipe] = max(found[pipe], self._tails[key])


def _does_less(light: ActivationPolicy, heavy: ActivationPolicy) -> bool:
    """Whether everything that `light` replays or sends to the host is so by `heavy` too, and
    more."""
    few, many = (
        (
            _replayed(work.recompute),
            work.offload if Recompute.FULL not in work.recompute else tuple(Offload),
        )
        for work in (light, heavy)
    )
    return few != many and few[0] <= many[0] and {*few[1]} <= {*many[1]}


def _replayed(recompute: Collection[Recompute]) -> frozenset[Recompute]:
    if Recompute.FULL in recompute:
        return frozenset(Recompute)
    inside = (Recompute.MOE_ACT, Recompute.SHARED_EXPERTS) if Recompute.MOE in recompute else ()
    return frozenset((*recompute, *inside))


def _with_dp_overlap(layout: Layout) -> Layout:
    """With gradient sums under backward, and weight gathers where there are any."""
    added = {Overlap.GRAD} if layout.zero == 0 else {Overlap.GRAD, Overlap.PARAM}
    return replace(layout, overlap=tuple(sorted({*layout.overlap, *added})))
