"""Seconds and bytes of all candidates of a group at once: the prices of the cost floor, combined over arrays.

A piece (a layer, an embedding, a pass through the head) is priced once for all pipelines, micro-batch counts and ways
to hold the states that go with it; the closed form of the pipeline joins them. Nothing here is an estimate of its own:
the best candidates are estimated in full, and both agree (tests/search/test_scout.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.cost.buffers import dispatcher_bytes
from moewright.cost.comm import Links
from moewright.cost.compute import Rates
from moewright.cost.estimate import size_of
from moewright.cost.layer_time import exchange, stage_transfer_s
from moewright.cost.memory import enough_micro_batches
from moewright.cost.prepared import chunk_counts, passes_of
from moewright.cost.saved import Away, activations_away
from moewright.cost.sizes import Sizes
from moewright.cost.step_time import LayerKind, Pricer, Share, kind_of, kinds_of, tail
from moewright.cost.timeline import closed_s, pipeline_of
from moewright.rules.exclusions import exclusion_reasons
from moewright.search.room import Layers, Room
from moewright.search.shapes import Array, Moments, Shape, Stack, moments_of, pieces_of, shape_of, stack
from moewright.search.space import (
    Group,
    Pipe,
    Pipes,
    Space,
    Work,
    context_exchanges,
    dispatchers,
    keeps,
    with_pipe,
    works,
)
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import CpComm, Dispatcher, Layout, Offload, Overlap, Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A group without or with overlapped expert communication, as arrays over [pipelines, works, keeps].

    `legal` says which combinations exist. `step_s` is infinite where it was not worth pricing; `dp_overlap` says where
    overlapped gradient sums and weight gathers are faster. `base` is the group's layout with what pricing settled.
    """

    pipes: Pipes
    base: Layout
    legal: Array
    peak_bytes: Array
    spread_bytes: Array
    step_s: Array
    dp_overlap: Array


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """Pipelines whose layers take the same seconds: what the number of micro-batches changes is alike, and the host
    waits for every transfer (no virtual stages) in all or none. `seats` [Q] are theirs.
    """

    like: int
    synced: bool
    seats: Array
    pp: int


class _Pricers:
    """The pricers of a group, made when first needed."""

    def __init__(self, scout: Scout, sent: Mapping[LayerKind, Away]) -> None:
        self._scout, self._sent = scout, sent
        self._known: dict[tuple[Dispatcher, int], Pricer] = {}

    def of(self, base: Layout, pace: _Pace) -> Pricer:
        key = base.dispatcher, pace.like
        if key not in self._known:
            self._known[key] = self._scout.pricer(replace(base, pp=pace.pp))
        return self._known[key]

    def totals(self, layout: Layout, pace: _Pace, works: Array) -> dict[LayerKind, Array]:
        """[works] seconds of a layer and micro-batch of each kind, of these works of the scout."""
        sent = {kind: Away(bytes=each.bytes[works], modules=each.modules[works]) for kind, each in self._sent.items()}
        there = replace(layout, pp=2 if pace.synced else 1)
        return self.of(layout, pace).totals(there, self._scout.replays, self._scout.replay_of_work[works], sent)


class Scout:
    """Prices the candidates of one space; what does not depend on the candidate is worked out once."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._rates = Rates(space.hardware)
        self._links = Links(space.hardware, self._rates.constants)
        self._pieces = pieces_of(space.model)
        self.works, self.keeps = works(space), keeps(space)
        # Works that replay alike and differ in what they send to the host share a price.
        alike = [(work.recompute, work.graphs) for work in self.works]
        self.replays = tuple(self.works[alike.index(each)] for each in dict.fromkeys(alike))
        self.replay_of_work = np.array([list(dict.fromkeys(alike)).index(each) for each in alike])
        self._modules = np.array([activations_away(work.offload) for work in self.works])
        # [w, v]: work w replays and sends away less than work v.
        self._lighter = np.array([[_does_less(w, v) for v in self.works] for w in self.works], dtype=np.float32)
        cuda = space.hardware.device.kind is DeviceKind.CUDA
        sums = (Overlap.GRAD, Overlap.PARAM)
        self._overlaps_sums = cuda and "overlap" not in space.fixed and space.permits(overlap=sums)
        self._room = Room(space, self._pieces, self._rates.constants, self.works, self.keeps)
        kinds = [kind_of(space.model, layer) for layer in range(space.model.layers)]
        counts = [kinds.count(kind) for kind in self._pieces.kinds]
        self._whole = np.array([*counts, space.model.mtp_layers, 1, 1], dtype=float)
        self._shapes: dict[Pipe, Shape] = {}
        self._moments: dict[tuple[Pipe, int, bool], Moments] = {}
        self._stacks: dict[tuple[Pipes, int, int, bool], tuple[Stack, tuple[_Pace, ...]]] = {}
        self._context: dict[tuple[int, int, int, int], CpComm] = {}
        self._legal: dict[tuple[object, ...], Array] = {}
        self._legal_works: dict[tuple[object, ...], Array] = {}
        self._tails: dict[tuple[object, ...], float] = {}
        self._transfers: dict[tuple[int, int, int, int], float] = {}
        self._bare: dict[tuple[Pipe, int, bool], Layout] = {}

    def scores(self, group: Group, *, room_bytes: float, below_s: float) -> Iterator[Scores]:
        """All candidates of a group. Time is left out where it cannot matter: of layouts that need more than
        `room_bytes` by more than the spread, and of pipelines that take `below_s` or more even without recompute.
        """
        size = self._size(group.layout)
        layers = self._room.layers(size)
        pricers = _Pricers(self, self._sent(layers))
        for overlap in self._expert_overlaps(group.layout):
            cut = replace(group.layout, overlap=overlap)
            legal = self._legality(group, cut)
            if not legal.any():
                continue
            stacked, paces = self._stack(group, paired=Overlap.EP in overlap)
            peak, spread = self._room.device_bytes(size, layers, group.pipes, stacked, np.asarray(legal.any(axis=1)))
            worth = legal & (peak <= room_bytes + spread)
            roomy = legal & (peak <= self._space.hardware.device.memory_bytes.value - spread)
            # Nothing is gained by replaying or moving more than room asks for.
            worth[:, :, 1:] &= ~roomy[:, :, :1]
            for keep in range(len(self.keeps)):
                worth[:, :, keep] &= roomy[:, :, keep].astype(np.float32) @ self._lighter == 0
            base, step, dp_overlap = cut, np.full(peak.shape, np.inf), np.zeros(peak.shape, dtype=bool)
            if worth.any():
                base = self._settled(cut, pricers, paces[0])
                peak = peak + dispatcher_bytes(self._size(base)) - dispatcher_bytes(size)
                step, dp_overlap = self._price(base, stacked, pricers, paces, worth, below_s)
            yield Scores(
                pipes=group.pipes,
                base=base,
                legal=legal,
                peak_bytes=peak,
                spread_bytes=spread,
                step_s=step,
                dp_overlap=dp_overlap,
            )

    def pricer(self, layout: Layout) -> Pricer:
        """The prices of layouts with these degrees, micro-batch and dispatcher."""
        return Pricer(self._rates, self._links, self._size(layout))

    def stalls_s(self, layout: Layout) -> float:
        """Seconds that the rows of the layout's timetable take beyond the closed form that scores it; 0 for schedules
        that split backwards, whose tables are too long to run for any but the plans shown.
        """
        if layout.schedule.splits_backward:
            return 0.0
        size, pieces = self._size(layout), self.pricer(layout).pieces(layout)
        held = chunk_counts(size.model, layout, tuple(pieces.layers))
        forward, backward = (held @ seconds for seconds in passes_of(pieces))
        of_rank = (forward + backward).reshape(layout.vpp, layout.pp).sum(axis=0)
        closed = closed_s(
            of_rank.max(), of_rank.sum(), pp=layout.pp, vpp=layout.vpp, micro_batches=size.m, transfer_s=0.0
        )
        return pipeline_of(layout, size.m).total_s(forward, backward) - float(closed)

    def layout(self, scores: Scores, pipe: int, work: int, keep: int) -> Layout:
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
        return with_pipe(layout, scores.pipes.each[pipe], self._space)

    def _expert_overlaps(self, cut: Layout) -> list[tuple[Overlap, ...]]:
        """Overlaps of the layout without and with that of expert communication, as far as they can gain."""
        found = [cut.overlap]
        hides = self._links.constants["ep_overlap_hidden"] > 0
        if "overlap" not in self._space.fixed and cut.ep > 1 and hides and self._space.permits(overlap=(Overlap.EP,)):
            found.append((Overlap.EP,))
        return found

    def _legality(self, group: Group, cut: Layout) -> Array:
        """[pipelines, works, keeps]"""
        key = group.pipes, cut.overlap, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal:
            found = np.array([self._work_legality(cut, pipe) for pipe in group.pipes.each])
            suits = [[keep.suits(pipe, self._space) for keep in self.keeps] for pipe in group.pipes.each]
            self._legal[key] = found[:, :, None] & np.array(suits)[:, None, :]
        return self._legal[key]

    def _work_legality(self, cut: Layout, pipe: Pipe) -> Array:
        """[works]"""
        key = pipe.pp > 1, pipe.vpp > 1, cut.overlap, cut.ep > 1, cut.tp > 1, cut.cp > 1
        if key not in self._legal_works:
            layout = with_pipe(cut, pipe, self._space)
            reasons = [
                exclusion_reasons(self._space.model, self._space.workload, work.on(layout)) for work in self.works
            ]
            self._legal_works[key] = np.array([next(each, None) is None for each in reasons])
        return self._legal_works[key]

    def _stack(self, group: Group, *, paired: bool) -> tuple[Stack, tuple[_Pace, ...]]:
        cut, world = group.layout, self._space.hardware.count
        batch, one_pass = self._space.workload.global_batch * cut.tp * cut.cp, cut.mbs * world
        key = group.pipes, batch, one_pass, paired
        if key not in self._stacks:
            layouts = [self._alone(pipe, cut.vpp_group, paired=paired) for pipe in group.pipes.each]
            counts = [batch * pipe.pp // one_pass for pipe in group.pipes.each]
            shapes = [self._shape(pipe, layout) for pipe, layout in zip(group.pipes.each, layouts, strict=True)]
            moments = [
                self._fullest(pipe, layout, shape, count)
                for pipe, layout, shape, count in zip(group.pipes.each, layouts, shapes, counts, strict=True)
            ]
            stacked = stack(layouts, shapes, moments, counts)
            self._stacks[key] = stacked, tuple(self._paces(cut, stacked))
        return self._stacks[key]

    def _alone(self, pipe: Pipe, vpp_group: int, *, paired: bool) -> Layout:
        """A pipeline of single ranks."""
        key = pipe, vpp_group, paired
        if key not in self._bare:
            bare = Layout(world_size=pipe.pp, vpp_group=vpp_group, overlap=(Overlap.EP,) if paired else ())
            self._bare[key] = with_pipe(bare, pipe, self._space)
        return self._bare[key]

    def _paces(self, cut: Layout, stacked: Stack) -> Iterator[_Pace]:
        sizes = [self._size(replace(cut, pp=pp)) for pp in stacked.degrees]
        likes = np.array([int(size.steady) if size.fused else size.m for size in sizes])[stacked.degree]
        synced = (stacked.pp > 1) & (stacked.vpp == 1)
        for like, waits in sorted(set(zip(likes.tolist(), synced.tolist(), strict=True))):
            rows = (likes == like) & (synced == waits)
            pp = int(stacked.pp[int(np.argmax(rows))])
            yield _Pace(like=like, synced=waits, seats=rows[stacked.pipe_of_seat], pp=pp)

    def _shape(self, pipe: Pipe, layout: Layout) -> Shape:
        if pipe not in self._shapes:
            self._shapes[pipe] = shape_of(self._space.model, self._pieces, layout)
        return self._shapes[pipe]

    def _fullest(self, pipe: Pipe, layout: Layout, shape: Shape, count: int) -> Moments:
        key = pipe, enough_micro_batches(layout, count), bool(layout.overlap)
        if key not in self._moments:
            self._moments[key] = moments_of(shape, self._pieces, layout, count)
        return self._moments[key]

    def _size(self, layout: Layout) -> Sizes:
        space = self._space
        return size_of(space.model, space.workload, space.hardware, layout, self._rates.constants)

    def _settled(self, cut: Layout, pricers: _Pricers, pace: _Pace) -> Layout:
        """The layout with the dispatcher and the exchange of context under which its layers take least, and with what
        tensor parallelism can overlap. They change no memory but a dispatcher's own, nor each other's order, whatever
        is recomputed; the exchange of context has nothing to do with experts.
        """
        settled = self._with_tensor_overlap(cut)
        context = cut.tp, cut.cp, cut.mbs, pace.like
        if context not in self._context:
            ways = context_exchanges(self._space, cut)
            tries = [replace(settled, cp_comm=way) for way in ways]
            self._context[context] = ways[0] if len(ways) == 1 else self._fastest(tries, pricers, pace).cp_comm
        settled = replace(settled, cp_comm=self._context[context])
        tries = [replace(settled, dispatcher=each) for each in dispatchers(self._space, cut)]
        if len(tries) > 1 and self._exchanges_less(tries[-1], tries[0]):
            return tries[-1]
        return tries[0] if len(tries) == 1 else self._fastest(tries, pricers, pace)

    def _exchanges_less(self, dedup: Layout, plain: Layout) -> bool:
        """Whether the rows themselves travel faster without duplicates; sorting and waiting always are."""
        ours, theirs = (exchange(self._links, self._size(layout), moe=True) for layout in (dedup, plain))
        return ours.ep_forward <= theirs.ep_forward and ours.ep_backward <= theirs.ep_backward

    def _fastest(self, tries: Sequence[Layout], pricers: _Pricers, pace: _Pace) -> Layout:
        """The first of the layouts whose layers take least without recompute."""
        seconds = [float(self._whole @ self._seconds(pricers, pace, one, np.array([0]))[:, 0]) for one in tries]
        return tries[seconds.index(min(seconds))]

    def _with_tensor_overlap(self, cut: Layout) -> Layout:
        """Overlap of tensor parallelism hides a share of its time and costs nothing that is priced."""
        hides = self._links.constants["tp_overlap_hidden"] > 0
        if "overlap" in self._space.fixed or not (cut.sp and hides and self._space.permits(overlap=(Overlap.TP,))):
            return cut
        return replace(cut, overlap=tuple(sorted({*cut.overlap, Overlap.TP})))

    def _sent(self, layers: Layers) -> dict[LayerKind, Away]:
        """[works] what a layer of each kind sends to the host; an MTP depth nothing."""
        sent = {
            kind: Away(bytes=layers.away[piece], modules=self._modules * (layers.away[piece] > 0))
            for piece, kind in enumerate(self._pieces.kinds)
        }
        nothing = np.zeros(len(self.works))
        return {kind: sent.get(kind, Away(bytes=nothing, modules=nothing)) for kind in kinds_of(self._space.model)}

    def _seconds(self, pricers: _Pricers, pace: _Pace, layout: Layout, works: Array) -> Array:
        """[pieces, works] seconds of one micro-batch."""
        model, ones = self._space.model, np.ones(len(works))
        layers = pricers.totals(layout, pace, works)
        mtp, embedding, head = pricers.of(layout, pace).outside_s()
        depth = mtp + layers[kind_of(model, model.layers + 1)] if model.mtp_layers else 0 * ones
        return np.stack([*(layers[kind] for kind in self._pieces.kinds), depth, embedding * ones, head * ones])

    def _price(
        self,
        base: Layout,
        stacked: Stack,
        pricers: _Pricers,
        paces: Sequence[_Pace],
        worth: Array,
        below_s: float,
    ) -> tuple[Array, Array]:
        """[pipelines, works, keeps] seconds of a step where it is worth it, and whether with overlapped sums."""
        variants = [base]
        if self._overlaps_sums:
            variants.append(_with_dp_overlap(base))
        step, overlapped = np.full(worth.shape, np.inf), np.zeros(worth.shape, dtype=bool)
        # Neither replays nor the host's work for overlapped sums make the lightest work any shorter.
        least = self._moving(pricers, base, stacked, paces, np.array([0]))
        wanted = worth & (least < below_s)[:, :, None]
        needed = np.flatnonzero(wanted.any(axis=(0, 2)))
        if not len(needed):
            return step, overlapped
        for variant in variants:
            moving = self._moving(pricers, variant, stacked, paces, needed)
            whole = moving[:, :, None] + self._tail_s(variant, stacked, wanted)[:, None, :]
            found = np.where(wanted[:, needed], whole, np.inf)
            better = found < step[:, needed]
            step[:, needed] = np.where(better, found, step[:, needed])
            overlapped[:, needed] = np.where(better, variant is not base, overlapped[:, needed])
        return step, overlapped

    def _moving(
        self, pricers: _Pricers, base: Layout, stacked: Stack, paces: Sequence[_Pace], of_works: Array
    ) -> Array:
        """[P, works] seconds of all micro-batches through the pipelines."""
        totals = np.empty((len(stacked.seats), len(of_works)))
        for pace in paces:
            totals[pace.seats] = stacked.seats[pace.seats] @ self._seconds(pricers, pace, base, of_works)
        transfer = np.array([self._transfer_s(base, pp) for pp in stacked.degrees])
        slowest, whole = stacked.slowest_and_all(totals)
        return closed_s(
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
            self._transfers[key] = stage_transfer_s(self._links, self._size(layout), layout)
        return self._transfers[key]

    def _tail_s(self, base: Layout, stacked: Stack, wanted: Array) -> Array:
        """[P, keeps] seconds of what a step does once, on the rank that takes longest; 0 where nothing is wanted."""
        found = np.zeros((len(stacked.pp), len(self.keeps)))
        shares = self._room.shares(base, stacked)
        for column, keep in enumerate(self.keeps):
            pipes = np.asarray(wanted[:, :, column].any(axis=1))
            if pipes.any():
                layout = replace(base, zero=keep.zero, offload=tuple(sorted({*base.offload, *keep.offload})))
                self._add_tails(found[:, column], layout, stacked, shares, np.flatnonzero(pipes[stacked.pipe_of_seat]))
        return found

    def _add_tails(self, found: Array, base: Layout, stacked: Stack, shares: Array, seats: Array) -> None:
        pipes = stacked.pipe_of_seat[seats]
        # Only zero=3 reduces and gathers more often with more micro-batches.
        often = base.mbs if base.zero == 3 else 0
        same = base.tp, base.cp, base.ep, base.etp, often, base.zero, base.offload, Overlap.GRAD in base.overlap
        sizes: dict[int, Sizes] = {}
        for share, pipe, pp in zip(shares[seats].tolist(), pipes.tolist(), stacked.pp[pipes].tolist(), strict=True):
            dense, expert, dense_calls, expert_calls = share
            key = same, pp, dense, expert
            if key not in self._tails:
                held = Share(dense=dense, expert=expert, dense_calls=dense_calls, expert_calls=expert_calls)
                if pp not in sizes:
                    sizes[pp] = self._size(replace(base, pp=pp))
                size = sizes[pp]
                last = tail(self._rates, self._links, self._space.workload, size, size.layout, held)
                self._tails[key] = last.total_s
            found[pipe] = max(found[pipe], self._tails[key])


def _does_less(light: Work, heavy: Work) -> bool:
    """Whether everything that `light` replays or sends to the host is so by `heavy` too, and more."""
    few, many = (
        (_replayed(work.recompute), work.offload if Recompute.FULL not in work.recompute else tuple(Offload))
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
