"""Fast closed forms that rank candidates: seconds by the same pieces as an estimate, memory by its leading terms.

The best candidates get the full estimate of the cost floor; this only decides which ones those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, prod

from moewright.cost import memory
from moewright.cost.comm import Links
from moewright.cost.compute import Rates
from moewright.cost.estimate import size_of
from moewright.cost.saved import layer_bytes
from moewright.cost.sizes import Sizes
from moewright.cost.step_time import LayerKind, Pieces, Pricer, Share, kind_of, tail
from moewright.cost.timeline import pipeline_s
from moewright.rules import routing, schedule, shards, stages
from moewright.rules.inventory import parameters
from moewright.rules.recompute import activation_bytes
from moewright.search.space import Allowed, Group, Pipe, Space, choices, with_pipe
from moewright.spec.layout import Layout, Offload

MASTER_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that can fit, with its seconds a step and device bytes by closed forms."""

    layout: Layout
    step_s: float
    peak_bytes: float
    spread_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """What a pipeline rank holds: layers by kind, and how many embeddings, heads and MTP depths."""

    layers: tuple[tuple[LayerKind, int], ...]
    embedding: int
    head: int
    mtp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Parameters of one rank: (dense, expert) of each kind of layer and of an MTP depth, and of embedding and head."""

    layers: tuple[tuple[LayerKind, tuple[int, int]], ...]
    embedding: int
    head: int
    mtp: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Working:
    """Bytes of one micro-batch under one choice: kept and short-lived, by kind of layer; short-lived of a head pass."""

    saved: tuple[tuple[LayerKind, int], ...]
    transient: tuple[tuple[LayerKind, int], ...]
    head: float


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """What the states take on the pipeline ranks that can be fullest: first, second, last, most layers."""

    pp_ranks: tuple[int, ...]
    ranks: tuple[Rank, ...]
    shares: tuple[Share, ...]
    held_bytes: tuple[float, ...]
    communicators: int


class Scout:
    """Prices the candidates of one space; what does not depend on the candidate is worked out once."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._rates = Rates(space.hardware)
        self._links = Links(space.hardware, self._rates.constants)
        self._params = parameters(space.model)
        self._kinds = {kind_of(space.model, layer): layer for layer in range(space.model.layers)}
        self._elements: dict[tuple[int, int, int], Elements] = {}
        self._ranks: dict[Pipe, tuple[Rank, ...]] = {}
        self.without_room = 0
        self.dominated = 0
        self._states: dict[tuple[int, int, int, int, Pipe], States] = {}
        self._tails: dict[tuple[int, int, int, int, int, Pipe], float] = {}
        self._live: dict[tuple[Pipe, int], tuple[float, ...]] = {}

    def candidates(self, group: Group, *, allowed: Allowed) -> Iterator[Candidate]:
        """Candidates of a group that can fit and are allowed. The others are counted: `without_room`, and those that
        keep more than a fitting one of the same pipeline replays for nothing in `dominated`.
        """
        space, limit = self._space, self._space.hardware.device.memory_bytes.value
        pipes = [(pipe, self._held_states(group.layout, pipe)) for pipe in group.pipes]
        roomless = {pipe for pipe, states in pipes if max(states.held_bytes) > limit}
        for options in choices(space, group.layout):
            # Few micro-batches change how host time adds, and the eager gradient sums: priced apart.
            pricers: dict[int, Pricer] = {}
            roomy: set[Pipe] = set()
            for choice in options:
                working: Working | None = None
                priced: dict[tuple[int, bool, bool, bool], Pieces] = {}
                for pipe, states in pipes:
                    if pipe in roomy:
                        self.dominated += 1
                        continue
                    if pipe in roomless:
                        self.without_room += 1
                        continue
                    working = working or self._working(choice)
                    peak, spread = self._peak(choice, pipe, states, working)
                    if peak > limit + spread:
                        self.without_room += 1
                        continue
                    layout = with_pipe(choice, pipe, space)
                    if allowed(layout):
                        continue
                    if peak < limit - spread:
                        roomy.add(pipe)
                    near = self._links.span(layout, "pp").inside > 1
                    size = self._size(layout)
                    like = int(size.steady) if size.fused else size.m
                    # Without virtual stages the host waits for transfers.
                    key = like, layout.pp > 1, layout.vpp > 1, near
                    if key not in priced:
                        if like not in pricers:
                            pricers[like] = Pricer(self._rates, self._links, size)
                        priced[key] = pricers[like].pieces(layout)
                    step_s = self._moving_s(layout, self._pipe_ranks(pipe), priced[key])
                    step_s += self._tail_s(layout, pipe, states)
                    yield Candidate(layout=layout, step_s=step_s, peak_bytes=peak, spread_bytes=spread)

    def _size(self, layout: Layout) -> Sizes:
        space = self._space
        return size_of(space.model, space.workload, space.hardware, layout, self._rates.constants)

    def _pipe_ranks(self, pipe: Pipe) -> tuple[Rank, ...]:
        if pipe not in self._ranks:
            layout = Layout(world_size=pipe.pp, pp=pipe.pp, vpp=pipe.vpp, stages=pipe.stages)
            chunks = stages.chunks(self._space.model, layout)
            self._ranks[pipe] = tuple(_rank_of(self._space, chunks, pp_rank) for pp_rank in range(pipe.pp))
        return self._ranks[pipe]

    def _held_elements(self, layout: Layout) -> Elements:
        key = (layout.tp, layout.ep, layout.etp)
        if key not in self._elements:
            self._elements[key] = self._count(layout)
        return self._elements[key]

    def _count(self, layout: Layout) -> Elements:
        model = self._space.model
        sums: dict[int, list[int]] = {}
        for param in self._params:
            of_layer = sums.setdefault(param.layer, [0, 0])
            of_layer[param.expert] += prod(shards.local_shape(param, layout))
        mtp = sums.get(model.layers + 1, [0, 0])
        return Elements(
            layers=tuple((kind, (sums[layer][0], sums[layer][1])) for kind, layer in self._kinds.items()),
            embedding=sums[-1][0],
            head=sums[model.layers][0] + (sums[-1][0] if model.tie_embeddings else 0),
            mtp=(mtp[0], mtp[1]),
        )

    def _working(self, layout: Layout) -> Working:
        space, load, size = self._space, routing.expected_load(self._space.workload), self._size(layout)
        saved, transient = [], []
        for kind, layer in self._kinds.items():
            held = layer_bytes(space.model, space.workload, layout, layer, load=load)
            saved.append((kind, sum(held.values())))
            transient.append((kind, memory.layer_transient(space.workload, size, layer)))
        a_logit = 6 if size.fused else 2 * size.c
        head = a_logit * size.T * space.model.vocab_size / layout.tp
        return Working(saved=tuple(saved), transient=tuple(transient), head=head)

    def _held_states(self, cut: Layout, pipe: Pipe) -> States:
        key = (cut.tp, cut.cp, cut.ep, cut.etp, pipe)
        if key not in self._states:
            layout = with_pipe(cut, pipe, self._space)
            every, elements = self._pipe_ranks(pipe), self._held_elements(cut)
            most_layers = max(range(pipe.pp), key=lambda r: sum(count for _, count in every[r].layers))
            fullest = sorted({0, min(1, pipe.pp - 1), most_layers, pipe.pp - 1})
            shares = tuple(_share(every[r], elements) for r in fullest)
            self._states[key] = States(
                pp_ranks=tuple(fullest),
                ranks=tuple(every[r] for r in fullest),
                shares=shares,
                held_bytes=tuple(self._state_bytes(layout, share) for share in shares),
                communicators=memory.communicators(layout),
            )
        return self._states[key]

    def _tail_s(self, layout: Layout, pipe: Pipe, states: States) -> float:
        # Only under zero=3 does the tail grow with the micro-batches.
        often = layout.mbs if layout.zero == 3 else 0
        key = (layout.tp, layout.cp, layout.ep, layout.etp, often, pipe)
        if key not in self._tails:
            size, workload = self._size(layout), self._space.workload
            tails = [tail(self._rates, self._links, workload, size, layout, share) for share in states.shares]
            self._tails[key] = max(one.total_s for one in tails)
        return self._tails[key]

    def _live_sets(self, choice: Layout, pipe: Pipe, states: States) -> tuple[float, ...]:
        """How many micro-batches of all its layers each of the fullest ranks holds at its peak."""
        count = self._space.workload.global_batch * choice.tp * choice.cp * pipe.pp // (choice.mbs * choice.world_size)
        key = (pipe, count)
        if key not in self._live:
            layout = with_pipe(choice, pipe, self._space)
            self._live[key] = tuple(schedule.in_flight(layout, count, r) / pipe.vpp for r in states.pp_ranks)
        return self._live[key]

    def _state_bytes(self, layout: Layout, share: Share) -> float:
        workload = self._space.workload
        held = activation_bytes(workload) + workload.grad_dtype.nbytes
        on_host = Offload.OPTIMIZER in layout.offload
        owned = 0 if on_host else MASTER_BYTES + 2 * workload.optimizer.moment_dtype.nbytes
        total = 0.0
        for numel, over in ((share.dense, layout.dp * layout.cp), (share.expert, layout.edp)):
            shard = numel / (over if layout.zero else 1)
            total += (shard if layout.zero == 3 else numel) * held + shard * owned
        return total

    def _peak(self, choice: Layout, pipe: Pipe, states: States, working: Working) -> tuple[float, float]:
        """Device bytes of the fullest rank, and their spread."""
        c = self._rates.constants
        saved, transient = dict(working.saved), dict(working.transient)
        most = 0.0
        mtp_saved = saved[kind_of(self._space.model, self._space.model.layers - 1)]
        live_sets = self._live_sets(choice, pipe, states)
        for rank, held_bytes, live in zip(states.ranks, states.held_bytes, live_sets, strict=True):
            kept = live * (rank.mtp * mtp_saved + sum([saved[kind] * layers for kind, layers in rank.layers]))
            short = max([(rank.head + rank.mtp) * working.head, *[transient[kind] for kind, _ in rank.layers]])
            most = max(most, held_bytes + kept + short)
        most += c["workspace_bytes"]
        spread = hypot(c["reserved_share_sd"] * most, states.communicators * c["communicator_bytes_sd"])
        device = most * (1 + c["reserved_share"]) + c["context_bytes"] + states.communicators * c["communicator_bytes"]
        return device, spread

    def _moving_s(self, layout: Layout, ranks: tuple[Rank, ...], pieces: Pieces) -> float:
        """Seconds of all micro-batches through the pipeline."""
        model = self._space.model
        seconds = {kind: times.total_s for kind, times in pieces.layers.items()}
        mtp = pieces.mtp.total_s + (seconds[kind_of(model, model.layers + 1)] if model.mtp_layers else 0.0)
        head, embedding = pieces.head.total_s, pieces.embedding.total_s
        totals = [
            sum([seconds[kind] * count for kind, count in rank.layers])
            + rank.mtp * mtp
            + rank.head * head
            + rank.embedding * embedding
            for rank in ranks
        ]
        count = self._space.workload.global_batch // (layout.mbs * layout.dp)
        return pipeline_s(totals, vpp=layout.vpp, micro_batches=count, transfer_s=pieces.transfer_s)


def _share(rank: Rank, elements: Elements) -> Share:
    of_kind = dict(elements.layers)
    dense = sum(of_kind[kind][0] * count for kind, count in rank.layers)
    expert = sum(of_kind[kind][1] * count for kind, count in rank.layers)
    dense += rank.embedding * elements.embedding + rank.head * elements.head + rank.mtp * elements.mtp[0]
    return Share(dense=dense, expert=expert + rank.mtp * elements.mtp[1])


def _rank_of(space: Space, chunks: tuple[stages.Chunk, ...], pp_rank: int) -> Rank:
    mine = [chunk for chunk in chunks if chunk.pp_rank == pp_rank]
    counts: dict[LayerKind, int] = {}
    for chunk in mine:
        for layer in chunk.layers:
            kind = kind_of(space.model, layer)
            counts[kind] = counts.get(kind, 0) + 1
    return Rank(
        layers=tuple(counts.items()),
        embedding=sum(chunk.embedding for chunk in mine),
        head=sum(chunk.loss for chunk in mine),
        mtp=sum(chunk.mtp for chunk in mine),
    )
