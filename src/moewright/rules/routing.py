"""Routing arithmetic: what a dispatch moves and over which links, and how even a load is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb, log, sqrt
from statistics import NormalDist

import numpy as np

from moewright.rules import expert_placement, grid
from moewright.rules.context_parallel import rank_positions
from moewright.rules.job import Job, capacity_rows, micro_batch_tokens, rows_for_peer
from moewright.spec.choices import Payload
from moewright.spec.errors import Reason
from moewright.spec.hardware import Fabric, MessagePath
from moewright.spec.layout import CapacityFill, DispatcherKind, ExpertPlacement, Layout
from moewright.spec.ledger import Selection
from moewright.spec.model import ModelSpec, RouterSpec
from moewright.spec.workload import (
    DropPolicy,
    RouterForce,
    RouterTraining,
    Routing,
    Workload,
)

# Copies of tokens that de-duplicating dispatchers send: the distinct places that tokens reach.

# Tokens that a message of DeepEP between nodes holds, by the size of its group: the harmonic mean
# of dispatch and combine in the tuned configurations of deep_ep/buffer.py (20 and 12, 8 and 8,
# 12 and 8).
_SMALL_GROUP = (16, 15.0)
_MIDDLE_GROUP = (64, 8.0)
_LARGE_GROUP_TOKENS = 9.6


def expected_distinct(places: float, draws: int) -> float:
    """Return the expected distinct places (ranks, nodes) that k uniform draws hit.

    It is N (1 - (1 - 1/N)^k); docs/formulas.md 3.
    """
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def expected_places(router: RouterSpec, places: int) -> float:
    """Return the expected distinct places (ranks, nodes) that the experts of a token lie on.

    A token that draws its k experts from g of G groups reaches a place of j chosen groups with
    probability 1 - (1 - j/g)^k, and a place that is 1/r of a group with 1 - (1 - 1/(g r))^k if the
    group is chosen: a router of 4 of 8 groups sends a token to 3.6 of 8 nodes, not to 5.3.
    """
    groups = router.groups
    chosen = router.top_groups
    draws = router.top_k
    if chosen >= groups or places == 1:
        return expected_distinct(places, draws)
    if places >= groups:
        # Only the places of the chosen groups take draws, each of them equally.
        parts = chosen * places / groups
        return expected_distinct(parts, draws)
    # Hypergeometric: j of the place's groups are among the chosen ones.
    place_groups = round(groups / places)
    missed = sum(
        comb(place_groups, j)
        * comb(groups - place_groups, chosen - j)
        * (1.0 - j / chosen) ** draws
        for j in range(min(place_groups, chosen) + 1)
    )
    return places * (1.0 - missed / comb(groups, chosen))


def message_tokens(ranks: int) -> float:
    """Return the tokens that one message of DeepEP between nodes holds, in a group of so many."""
    for largest, tokens in (_SMALL_GROUP, _MIDDLE_GROUP):
        if ranks <= largest:
            return tokens
    return _LARGE_GROUP_TOKENS


# Expected largest of several draws: the hottest rank, the slowest device.


def largest_of(draws: int) -> float:
    """Return the expected largest of some normal draws, in units of their deviation (Blom)."""
    if draws > 1:
        # Blom (1958): the i-th of n order statistics is near the quantile (i - 3/8) / (n + 1/4).
        return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
    return 0.0


def largest_of_centred(draws: int) -> float:
    """Return the expected largest of at least 2 normal draws whose sum is 0, in their deviation."""
    # Less their mean, draws have a variance of (n - 1) / n.
    return largest_of(draws) * sqrt(draws / (draws - 1))


_Sent = tuple[tuple[int, ...], ...]  # what each source rank sends to each of some places


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBalance:
    """How evenly the tokens of one layer are spread over its experts.

    `entropy` is in units of log(experts): 1 is even.
    """

    max_over_mean: float
    p95_over_mean: float  # 95th percentile of the experts' loads over their mean
    dead_experts: int
    entropy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchCounts:
    """The rows and copies of tokens that one dispatch of a layer and micro-batch moves for a rank.

    `rows_sent` counts the (token, expert) rows that the rank sends. Under dedup `copies_out` and
    `copies_in` count the copies of tokens, one per destination rank, that it sends and receives.
    Where tokens are sent to nodes first, `node_copies_out` and `node_copies_in` count the copies,
    one per destination node, that it sends and receives, and `copies_out` counts the copies that it
    forwards of the tokens which reached it as such. `copies_gathered` counts the copies that the
    ranks of its ETP group received together, each part padded to the largest.
    """

    rows_sent: int
    copies_out: int
    copies_in: int
    copies_gathered: int
    node_copies_out: int = 0
    node_copies_in: int = 0


def dispatch_nodes(layout: Layout) -> int:
    """Return the number of nodes, where tokens are sent to a node before a rank; else 0."""
    if not layout.ep_node or not sends_own_copies(layout):
        return 0
    return grid.axis_size(layout, "ep_far")


def counts_copies(layout: Layout) -> bool:
    """Return whether a dispatcher sends one copy of a token to a rank, however many its rows.

    Then copies are counted besides the (token, expert) rows.
    """
    return layout.dispatcher.facts.payload is Payload.COPIES


def sends_own_copies(layout: Layout) -> bool:
    """Return whether a dispatcher sends copies by collectives, not by the kernels of a library."""
    return counts_copies(layout) and not layout.dispatcher.facts.is_library


def expected_dispatch(job: Job) -> DispatchCounts:
    """Return what a dispatch moves under even routing (docs/formulas.md 3).

    As many copies come in as go out.
    """
    if job.model.moe is None:
        return DispatchCounts(rows_sent=0, copies_out=0, copies_in=0, copies_gathered=0)
    tokens = micro_batch_tokens(job.workload, job.layout)
    top_k = job.model.moe.router.top_k
    experts = job.model.moe.experts
    rows_sent = experts * capacity_rows(tokens, top_k, experts, job.layout.capacity)
    if job.layout.capacity_fill is not CapacityFill.PADDED:
        rows_sent = min(tokens * top_k, rows_sent)
    if job.layout.rank_capacity > 0:
        rows_sent = job.layout.ep * rows_for_peer(tokens, top_k, job.layout)
    copies = round(tokens * expected_places(job.model.moe.router, job.layout.ep))
    nodes = dispatch_nodes(job.layout)
    node_copies = 0
    if nodes:
        node_copies = round(tokens * expected_places(job.model.moe.router, nodes))
    return DispatchCounts(
        rows_sent=rows_sent,
        copies_out=copies,
        copies_in=copies,
        copies_gathered=copies * job.layout.etp,
        node_copies_out=node_copies,
        node_copies_in=node_copies,
    )


# Experts that a benchmark dictates in turn: those of a token follow from its place in its sequence.


@lru_cache(maxsize=1024)
def _routed_positions(parts: tuple[range, ...], mbs: int, routed: range) -> tuple[int, ...]:
    """Return the positions in their sequences of the tokens that a rank routes.

    They are those numbered `routed` of a micro-batch of sequences, of each of which its TP group
    has these `parts`.
    """
    positions = [position for part in parts for position in part] * mbs
    return tuple(positions[routed.start : routed.stop])


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRobinCounts:
    """The counts of what a rank sends where tokens take experts in turn.

    They are the rows to each expert, and the copies of tokens to each rank and to each node.
    """

    rows: tuple[int, ...]
    copies: tuple[int, ...]
    nodes: tuple[int, ...]


@lru_cache(maxsize=1024)  # ranks at one place of their TP and CP groups are alike
def round_robin_counts(
    positions: tuple[int, ...],
    top_k: int,
    experts: int,
    *,
    max_rows: int,
    ranks: int,
    nodes: int = 0,
) -> RoundRobinCounts:
    """Count what a rank sends whose tokens take experts in turn.

    Choice j of the token at position p of its sequence is expert (p `top_k` + j) mod `experts`, in
    any layout. An expert keeps the first `max_rows` rows of a rank.
    """
    slots_Tk = np.array(positions)[:, None] * top_k + np.arange(top_k)
    experts_Tk = slots_Tk % experts
    # Ranks within an expert by a stable sort: as many rows as tokens, no loop over experts.
    flat = experts_Tk.ravel()
    order = flat.argsort(kind="stable")
    counts = np.bincount(flat, minlength=experts)
    starts = counts.cumsum() - counts
    is_kept = np.empty(len(flat), dtype=bool)
    is_kept[order] = np.arange(len(flat)) - starts[flat[order]] < max_rows
    tokens, _ = np.nonzero(is_kept.reshape(experts_Tk.shape))
    reached_TR = np.zeros((len(positions), ranks), dtype=bool)
    reached_TR[tokens, flat[is_kept] // (experts // ranks)] = True
    reached_TN = (
        reached_TR.reshape(len(positions), nodes, -1).any(2) if nodes else reached_TR[:, :0]
    )
    return RoundRobinCounts(
        rows=tuple(np.minimum(counts, max_rows).tolist()),
        copies=tuple(reached_TR.sum(0).tolist()),
        nodes=tuple(reached_TN.sum(0).tolist()),
    )


def count_in_turn(job: Job, rank: int) -> RoundRobinCounts:
    """Count what a rank of a job sends in a layer and micro-batch whose tokens take turns."""
    assert job.model.moe is not None
    layout = job.layout
    top_k = job.model.moe.router.top_k
    experts = job.model.moe.experts
    tokens = job.micro_batch_tokens
    parts = rank_positions(job.workload.seq_len, layout.cp, grid.coordinate(layout, rank, "cp"))
    start = 0
    if layout.sp:
        start = grid.coordinate(layout, rank, "tp") * tokens
    return round_robin_counts(
        _routed_positions(parts, layout.mbs, range(start, start + tokens)),
        top_k,
        experts,
        max_rows=capacity_rows(tokens, top_k, experts, layout.capacity),
        ranks=layout.ep,
        nodes=dispatch_nodes(layout),
    )


def drops_by_probability(layout: Layout, training: RouterTraining) -> bool:
    """Return whether the copies under dedup depend on which rows are dropped by probability."""
    drops = layout.capacity > 0 and training.drop_policy is DropPolicy.PROBS
    return drops and sends_own_copies(layout)


def knows_sent_rows(job: Job) -> bool:
    """Return whether forced routing fixes what every rank sends, so that the host reads no counts.

    It does where experts are taken round-robin and placed contiguously, unless the counts depend on
    which rows a capacity drops.
    """
    training = job.workload.router
    return (
        training.force is RouterForce.BALANCED
        and job.layout.expert_placement is ExpertPlacement.CONTIGUOUS
        and not drops_by_probability(job.layout, training)
    )


def round_robin_selection(job: Job) -> Selection | None:
    """Return what a step would record if experts were taken in turn; None for a dense model."""
    model = job.model
    layout = job.layout
    if model.moe is None:
        return None
    first_stage = [
        rank for rank in range(layout.world_size) if grid.coordinate(layout, rank, "pp") == 0
    ]
    sources = [
        count_in_turn(job, rank)
        for rank in sorted(first_stage, key=lambda rank: grid.stage_index(layout, rank))
    ]

    def repeat(counts: _Sent) -> tuple[tuple[_Sent, ...], ...]:
        return ((counts,) * len(model.routed_layers),) * job.micro_batches

    return Selection(
        step=1,
        counts=repeat(tuple(sent.rows for sent in sources)),
        copies=repeat(tuple(sent.copies for sent in sources)) if counts_copies(layout) else (),
        nodes=repeat(tuple(sent.nodes for sent in sources)) if dispatch_nodes(layout) else (),
    )


def is_even(workload: Workload) -> bool:
    """Return whether every expert gets as many rows: assumed of the job, or forced by it."""
    is_forced = workload.router.force is RouterForce.BALANCED
    return is_forced or workload.routing is Routing.BALANCED


def etp_gathered_rows(workload: Workload, layout: Layout, rows: int) -> int:
    """Return the rows that an ETP group gathers, padding included, to share `rows` rows.

    Each rank sends its part, padded to the largest one (docs/formulas.md 3). The parts are of
    different tokens: about rows / etp each, with the root of that as deviation, unless routing is
    even or a capacity pads them.
    """
    is_fixed = layout.has_fixed_rows
    if layout.etp == 1 or is_even(workload) or is_fixed or not rows:
        return rows
    # Binomial: each row is on this ETP rank with probability 1 / etp.
    mean = rows / layout.etp
    deviation = sqrt(mean * (1 - 1 / layout.etp))
    return round(layout.etp * (mean + largest_of_centred(layout.etp) * deviation))


def check_load_histogram(job: Job) -> tuple[Reason, ...]:
    """Return what is wrong with the load histogram of a job that uses one.

    It needs as many layers as have experts, and a count for every expert.
    """
    model = job.model
    histogram = job.workload.load_histogram
    is_load_measured = job.workload.routing is Routing.MEASURED
    is_placed_by_load = job.layout.expert_placement is ExpertPlacement.BALANCED
    if model.moe is None or not (is_load_measured or is_placed_by_load):
        return ()
    field = "workload.load_histogram"
    if len(histogram) != model.moe_layer_count:
        layers = model.moe_layer_count
        rule = f"needs the tokens an expert of each of the {layers} layers with experts"
        return (Reason(field=field, value=f"{len(histogram)} layers", rule=rule),)
    experts = model.moe.experts
    for layer, counts in enumerate(histogram):
        if len(counts) != experts or min(counts) < 0 or not sum(counts):
            rule = f"needs {experts} counts, not negative and not all zero"
            return (Reason(field=f"{field}[{layer}]", value=f"{len(counts)} counts", rule=rule),)
    return ()


def random_max_over_mean(experts: int, tokens_per_expert: float) -> float:
    """Return the expected max/mean expert load under uniformly random routing.

    It is 1 + sqrt(2 ln E / Te); docs/formulas.md 4.
    """
    if experts <= 1:
        return 1.0
    return 1.0 + sqrt(2.0 * log(experts) / tokens_per_expert)


def measure_load_balance(counts: Sequence[int]) -> LoadBalance:
    """Return the load balance of one layer from its tokens per expert.

    Where all counts are zero the load is even, and every expert dead.
    """
    total = sum(counts)
    dead = sum(1 for count in counts if count == 0)
    if total == 0:
        return LoadBalance(max_over_mean=1.0, p95_over_mean=1.0, dead_experts=dead, entropy=1.0)
    entropy = 1.0
    if len(counts) > 1:
        nats = -sum(count / total * log(count / total) for count in counts if count)
        entropy = nats / log(len(counts))
    return LoadBalance(
        max_over_mean=max(counts) * len(counts) / total,
        # The nearest-rank percentile: a load that an expert has, not one between two.
        p95_over_mean=sorted(counts)[ceil(0.95 * len(counts)) - 1] * len(counts) / total,
        dead_experts=dead,
        entropy=entropy,
    )


def expert_rows(by_source: Sequence[Sequence[int]], experts: Sequence[int]) -> tuple[int, ...]:
    """Return the rows that each of the given experts receives from all source ranks.

    The counts are by_source[source_rank][expert].
    """
    return tuple(sum(source[expert] for source in by_source) for expert in experts)


def rank_rows(
    model: ModelSpec,
    layout: Layout,
    by_source: Sequence[Sequence[int]],
    rank: int,
    slots: Sequence[int],
) -> int:
    """Return the rows that the experts of a rank receive.

    `by_source` holds the counts of the sources of its EP group, `slots` the expert of every slot;
    the rows of an expert with several slots are dealt to them.
    """
    ep_rank = grid.coordinate(layout, rank, "ep")
    if not layout.spare:
        experts = expert_placement.rank_experts(slots, layout.ep, ep_rank)
        return sum(expert_rows(by_source, experts))
    local = expert_placement.rank_slots(slots, layout.ep, ep_rank)
    return sum(slot_rows(by_source, slots)[local])


def slot_rows(by_source: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of every slot, where each source deals an expert's rows to its slots."""
    expert_slots: dict[int, list[int]] = {}
    for slot, expert in enumerate(slots):
        expert_slots.setdefault(expert, []).append(slot)
    rows = []
    for slot, expert in enumerate(slots):
        replicas = len(expert_slots[expert])
        index = expert_slots[expert].index(slot)
        rows.append(
            sum(
                expert_placement.rows_for_slot(counts[expert], replicas, source, index)
                for source, counts in enumerate(by_source)
            )
        )
    return tuple(rows)


def message_path(fabric: Fabric, dispatcher: DispatcherKind, *, domains: int) -> MessagePath:
    """Return how a dispatcher's messages leave a device, in a group that spans so many domains.

    Collectives reach every device, and so does a library that the fabric says nothing about.
    """
    for path in fabric.library_paths:
        if path.dispatcher is dispatcher:
            if domains == 1:
                return path.inside
            return path.between
    return MessagePath.GPU


def runs_on(fabric: Fabric, dispatcher: DispatcherKind, *, domains: int) -> bool:
    """Return whether a dispatcher runs in a group that spans so many domains of a fabric."""
    return message_path(fabric, dispatcher, domains=domains) is not MessagePath.NONE
