"""Fast closed forms that rank candidates: seconds by the same pieces as an estimate, memory by its leading terms.

The best candidates get the full estimate of the cost floor; this only decides which ones those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, inf, prod

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
from moewright.spec.layout import Layout

MASTER_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """`step_s` is infinite for a candidate that cannot fit."""

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
    """Parameters of one rank: (dense, expert) of each kind of layer, of embedding, head and an MTP depth's own."""

    layers: tuple[tuple[LayerKind, tuple[int, int]], ...]
    embedding: int
    head: int
    mtp: tuple[int, int]


class Scout:
    """Prices the candidates of one space; what does not depend on the candidate is worked out once."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._rates = Rates(space.hardware)
        self._links = Links(space.hardware, self._rates.constants)
        self._params = parameters(space.model)
        self._elements: dict[tuple[int, int, int], Elements] = {}
        self._ranks: dict[Pipe, tuple[Rank, ...]] = {}

    def candidates(self, group: Group, *, allowed: Allowed) -> Iterator[Candidate]:
        """Every allowed candidate of a group; those that cannot fit come without a time."""
        space, capacity = self._space, self._space.hardware.device.memory_bytes.value
        elements = self._held_elements(group.layout)
        # Few micro-batches change how host time adds, so those pipelines are priced apart.
        pricers: dict[bool, Pricer] = {}
        for choice in choices(space, group.layout):
            saved = self._saved(choice)
            priced: dict[tuple[bool, bool], Pieces] = {}
            for pipe in group.pipes:
                layout = with_pipe(choice, pipe, space)
                if allowed(layout):
                    continue
                size = size_of(space.model, space.workload, space.hardware, layout, self._rates.constants)
                ranks = self._pipe_ranks(pipe)
                peak, spread = self._peak(size, ranks, elements, saved)
                if peak > capacity + spread:
                    yield Candidate(layout=layout, step_s=inf, peak_bytes=peak, spread_bytes=spread)
                    continue
                key = (size.steady, self._links.span(layout, "pp").inside > 1)
                if key not in priced:
                    if size.steady not in pricers:
                        pricers[size.steady] = Pricer(self._rates, self._links, size)
                    priced[key] = pricers[size.steady].pieces(layout)
                step_s = self._step_s(size, ranks, elements, priced[key])
                yield Candidate(layout=layout, step_s=step_s, peak_bytes=peak, spread_bytes=spread)

    def _pipe_ranks(self, pipe: Pipe) -> tuple[Rank, ...]:
        if pipe not in self._ranks:
            model = self._space.model
            layout = Layout(world_size=pipe.pp, pp=pipe.pp, vpp=pipe.vpp, stages=pipe.stages)
            chunks = stages.chunks(model, layout)
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
        kinds = {kind_of(self._space.model, layer): layer for layer in range(model.layers)}
        mtp = sums.get(model.layers + 1, [0, 0])
        return Elements(
            layers=tuple((kind, (sums[layer][0], sums[layer][1])) for kind, layer in kinds.items()),
            embedding=sums[-1][0],
            head=sums[model.layers][0] + (sums[-1][0] if model.tie_embeddings else 0),
            mtp=(mtp[0], mtp[1]),
        )

    def _saved(self, layout: Layout) -> dict[LayerKind, int]:
        """Bytes that a layer of each kind keeps for a micro-batch."""
        space, load = self._space, routing.expected_load(self._space.workload)
        found = {}
        for layer in range(space.model.layers):
            kind = kind_of(space.model, layer)
            if kind not in found:
                found[kind] = sum(layer_bytes(space.model, space.workload, layout, layer, load=load).values())
        return found

    def _share(self, rank: Rank, elements: Elements) -> Share:
        of_kind = dict(elements.layers)
        dense = sum(of_kind[kind][0] * count for kind, count in rank.layers)
        expert = sum(of_kind[kind][1] * count for kind, count in rank.layers)
        dense += rank.embedding * elements.embedding + rank.head * elements.head + rank.mtp * elements.mtp[0]
        return Share(dense=dense, expert=expert + rank.mtp * elements.mtp[1])

    def _peak(
        self, size: Sizes, ranks: tuple[Rank, ...], elements: Elements, saved: dict[LayerKind, int]
    ) -> tuple[float, float]:
        """Device bytes of the fullest rank, which is the first, the second or the last; and their spread."""
        layout, workload, c = size.layout, self._space.workload, self._rates.constants
        count = workload.global_batch // (layout.mbs * layout.dp)
        groups = memory.communicators(layout)
        most = 0.0
        for pp_rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
            rank = ranks[pp_rank]
            states = self._state_bytes(layout, self._share(rank, elements))
            live = schedule.in_flight(layout, count, pp_rank) / layout.vpp
            kept = live * sum(saved[kind] * layers for kind, layers in rank.layers)
            transient = self._transient(size, rank)
            most = max(most, states + kept + transient + c["workspace_bytes"])
        spread = hypot(c["reserved_share_sd"] * most, groups * c["communicator_bytes_sd"])
        device = most * (1 + c["reserved_share"]) + c["context_bytes"] + groups * c["communicator_bytes"]
        return device, spread

    def _state_bytes(self, layout: Layout, share: Share) -> float:
        workload = self._space.workload
        held = activation_bytes(workload) + workload.grad_dtype.nbytes
        owned = MASTER_BYTES + 2 * workload.optimizer.moment_dtype.nbytes
        total = 0.0
        for numel, over in ((share.dense, layout.dp * layout.cp), (share.expert, layout.edp)):
            shard = numel / (over if layout.zero else 1)
            total += (shard if layout.zero == 3 else numel) * held + shard * owned
        return total

    def _transient(self, size: Sizes, rank: Rank) -> float:
        logits = size.T * size.model.vocab_size / size.layout.tp
        passes = rank.head + rank.mtp
        bytes_a_logit = 6 if size.fused else 2 * size.c
        layer = max(
            (memory.layer_transient(self._space.workload, size, self._layer_of(k)) for k, _ in rank.layers), default=0
        )
        return max(passes * bytes_a_logit * logits, layer)

    def _layer_of(self, kind: LayerKind) -> int:
        space = self._space
        return next(layer for layer in range(space.model.layers) if kind_of(space.model, layer) == kind)

    def _step_s(self, size: Sizes, ranks: tuple[Rank, ...], elements: Elements, pieces: Pieces) -> float:
        layout, workload = size.layout, self._space.workload
        seconds = {kind: times.total_s for kind, times in pieces.layers.items()}
        mtp = pieces.mtp.total_s + (
            seconds[kind_of(size.model, size.model.layers + 1)] if size.model.mtp_layers else 0.0
        )
        head, embedding = pieces.head.total_s, pieces.embedding.total_s
        totals = [
            sum(seconds[kind] * count for kind, count in rank.layers)
            + rank.mtp * mtp
            + rank.head * head
            + rank.embedding * embedding
            for rank in ranks
        ]
        count = workload.global_batch // (layout.mbs * layout.dp)
        moving_s = pipeline_s(totals, vpp=layout.vpp, micro_batches=count, transfer_s=pieces.transfer_s)
        last = tail(self._rates, self._links, workload, size, layout, self._share(ranks[0], elements))
        return moving_s + last.total_s


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
