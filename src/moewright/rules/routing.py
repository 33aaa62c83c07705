"""Routing arithmetic: where experts live, what capacity allows, and how even a load is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, exp, log, sqrt
from statistics import NormalDist, fmean

from moewright.rules import expert_placement, grid
from moewright.spec.errors import Reason
from moewright.spec.layout import CapacityFill, DispatcherKind, ExpertPlacement, Layout
from moewright.spec.ledger import Selection
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DropPolicy, RouterTraining, Routing, Workload

LIBRARY_DISPATCHERS = (DispatcherKind.DEEPEP, DispatcherKind.HYBRIDEP)  # kernels of their own
_COPYING = (DispatcherKind.DEDUP, *LIBRARY_DISPATCHERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBalance:
    """How even the tokens of one layer fell on its experts; `entropy` in units of log(experts), 1
    is even."""

    max_over_mean: float
    p95_over_mean: float  # of the least expert that 95% of all do not exceed
    dead_experts: int
    entropy: float


def local_slots(model: ModelSpec, layout: Layout, ep_rank: int) -> range:
    """The slots of experts on one EP rank, a contiguous block; without a placement
    (rules.placement) a slot's number is its expert's. Empty for a dense model.
    """
    local = (model.moe.experts if model.moe else 0) // layout.ep
    return range(ep_rank * local, (ep_rank + 1) * local)


def micro_batch_tokens(workload: Workload, layout: Layout) -> int:
    """Tokens of one micro-batch that a rank routes: its CP part, and its TP part under sequence
    parallelism."""
    tokens = workload.seq_len * layout.mbs // layout.cp
    return tokens // layout.tp if layout.sp else tokens


def capacity_rows(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Rows an expert takes from one source rank: ceil(tokens * top_k / experts * factor), at most
    `tokens`.

    `factor` 0 is dropless: `tokens`. docs/formulas.md 4. Exact: 0.1-like factors are read as their
    shortest decimal.
    """
    if factor <= 0:
        return tokens
    return min(tokens, ceil(Fraction(tokens * top_k, experts) * Fraction(str(factor))))


def routed_rows(model: ModelSpec, workload: Workload, layout: Layout, load: float) -> int:
    """Rows the experts of one rank compute per MoE layer and micro-batch, when their load is `load`
    x the mean.

    Even load: tokens * top_k rows leave every rank and as many arrive; ETP ranks share the rows of
    their group. A capacity bounds the rows by what each source may send, or padded to makes them
    that whatever the load.
    """
    if model.moe is None:
        return 0
    tokens, top_k, experts = (
        micro_batch_tokens(workload, layout),
        model.moe.router.top_k,
        model.moe.experts,
    )
    even = tokens * top_k * layout.etp
    if layout.capacity <= 0:
        return round(load * even)
    sources = layout.ep * layout.etp
    most = capacity_rows(tokens, top_k, experts, layout.capacity) * sources * (experts // layout.ep)
    if layout.capacity_fill is CapacityFill.PADDED:
        return most
    return min(round(load * min(even, most)), most)


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchCounts:
    """What one dispatch of a layer and micro-batch moves for a rank: (token, expert) rows it sends,
    and under dedup the copies of tokens, one a rank, that it sends and receives; where they cross
    to nodes before, those that it sends to ranks of its node are of tokens that nodes sent, and
    `node_out` and `node_in` are the copies, one a node, that it sends and receives. `gathered` are
    the copies that the ranks of its ETP group have received together, each part padded to the
    largest.
    """

    rows_sent: int
    copies_out: int
    copies_in: int
    copies_gathered: int
    node_copies_out: int = 0
    node_copies_in: int = 0


def dispatch_nodes(layout: Layout) -> int:
    """Nodes that a token crosses to before it crosses to a rank; 0 where it does not."""
    return (
        grid.axis_size(layout, "ep_far")
        if layout.ep_node and layout.dispatcher is DispatcherKind.DEDUP
        else 0
    )


def counts_copies(layout: Layout) -> bool:
    """Whether a token crosses to a rank once, and is counted so beside the rows that experts
    get."""
    return layout.dispatcher in _COPYING


def expected_dispatch(model: ModelSpec, workload: Workload, layout: Layout) -> DispatchCounts:
    """Under even routing, as many copies out as in: docs/formulas.md 3."""
    if model.moe is None:
        return DispatchCounts(rows_sent=0, copies_out=0, copies_in=0, copies_gathered=0)
    tokens, top_k = micro_batch_tokens(workload, layout), model.moe.router.top_k
    rows = capacity_rows(tokens, top_k, model.moe.experts, layout.capacity)
    copies = round(tokens * expected_distinct(layout.ep, top_k))
    sent = rows * model.moe.experts
    if layout.capacity_fill is not CapacityFill.PADDED:
        sent = min(tokens * top_k, sent)
    crossing = (
        round(tokens * expected_distinct(nodes, top_k)) if (nodes := dispatch_nodes(layout)) else 0
    )
    return DispatchCounts(
        rows_sent=sent,
        copies_out=copies,
        copies_in=copies,
        copies_gathered=copies * layout.etp,
        node_copies_out=crossing,
        node_copies_in=crossing,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRobinCounts:
    """What every rank sends where experts are taken in turn: rows to each expert, and copies of
    tokens to each rank and to each node.
    """

    rows: tuple[int, ...]
    copies: tuple[int, ...]
    nodes: tuple[int, ...]


@lru_cache(maxsize=8)  # of one job, whose micro-batches are alike
def round_robin_counts(
    tokens: int, top_k: int, experts: int, *, capacity: int, ranks: int, nodes: int = 0
) -> RoundRobinCounts:
    """Slot s of a rank's tokens, `top_k` a token, takes expert s % `experts`, of which each takes
    the first `most`."""
    rows, copies, crossing, local = [0] * experts, [0] * ranks, [0] * nodes, experts // ranks
    for token in range(tokens):
        reached = set()
        for slot in range(token * top_k, (token + 1) * top_k):
            expert = slot % experts
            if rows[expert] < capacity:
                rows[expert] += 1
                reached.add(expert // local)
        for rank in reached:
            copies[rank] += 1
        for node in {rank * nodes // ranks for rank in reached} if nodes else ():
            crossing[node] += 1
    return RoundRobinCounts(rows=tuple(rows), copies=tuple(copies), nodes=tuple(crossing))


def drops_by_probability(layout: Layout, training: RouterTraining) -> bool:
    """Whether the number of copies under dedup hangs on probabilities, by which a capacity drops
    rows."""
    drops = layout.capacity > 0 and training.drop_policy is DropPolicy.PROBS
    return drops and layout.dispatcher is DispatcherKind.DEDUP


def round_robin_selection(
    model: ModelSpec, workload: Workload, layout: Layout, *, micro_batches: int
) -> Selection | None:
    """What a step would record where experts are taken in turn; None for a dense model."""
    if model.moe is None:
        return None
    tokens, top_k, experts = (
        micro_batch_tokens(workload, layout),
        model.moe.router.top_k,
        model.moe.experts,
    )
    most = capacity_rows(tokens, top_k, experts, layout.capacity)
    sent = round_robin_counts(
        tokens, top_k, experts, capacity=most, ranks=layout.ep, nodes=dispatch_nodes(layout)
    )

    def everywhere(one: tuple[int, ...]) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
        return (
            ((one,) * (layout.world_size // layout.pp),) * len(model.routed_layers),
        ) * micro_batches

    return Selection(
        step=1,
        counts=everywhere(sent.rows),
        copies=everywhere(sent.copies) if counts_copies(layout) else (),
        nodes=everywhere(sent.nodes) if sent.nodes else (),
    )


def expected_load_factor(model: ModelSpec, workload: Workload, layout: Layout) -> float:
    """The load of the hottest expert rank over the mean that a prediction assumes.

    A layer waits for its hottest rank, so layers of different load add up: of a histogram it is
    their mean.
    """
    if workload.routing is Routing.BALANCED or model.moe is None:
        return 1.0
    if workload.routing is Routing.LEARNED:
        return workload.load_factor
    if workload.routing is Routing.SKEWED:
        return skewed_load_factor(
            model.moe.experts,
            layout.ep,
            model.moe.router.top_k,
            workload.load_skew,
            capacity=layout.capacity,
        )
    return fmean(layer_load_factors(model, workload, layout))


def layer_load_factors(model: ModelSpec, workload: Workload, layout: Layout) -> tuple[float, ...]:
    """The measured load of the hottest EP rank over the mean, of each layer with experts."""
    if layout.spare:
        return tuple(
            expert_placement.place_with_replicas(counts, layout.ep, layout.spare).load_factor
            for counts in workload.load_histogram
        )
    even = layout.expert_placement is ExpertPlacement.BALANCED
    return tuple(
        expert_placement.rank_load_factor(
            expert_placement.balanced_slot_loads(counts, layout.ep) if even else counts, layout.ep
        )
        for counts in workload.load_histogram
    )


def skewed_load_factor(
    experts: int, ep: int, top_k: int, skew: float, *, capacity: float = 0.0
) -> float:
    """Expected load of the hottest of `ep` ranks over the mean when experts' loads vary by `skew`
    about it.

    A `capacity` cuts each expert off: what is left has a smaller mean and spread, and is told over
    the mean that even loads keep under it.

    A rank's mean of n = experts / ep loads, drawn without replacement, has the deviation d = skew
    sqrt((1 - n / E) E / (E - 1) / n). Ranks are taken as log-normal: with s^2 = ln(1 + d^2) the
    hottest of N is exp(s z - s^2 / 2), z the expected largest of N normal draws whose sum is 0
    (Blom). No rank can get more than every token on each of its experts, nor more than everything.
    docs/formulas.md 4.
    """
    if capacity > 0 and skew > 0:
        kept, spread_left = _cut_off(skew, capacity)
        hottest = kept * skewed_load_factor(experts, ep, top_k, spread_left)
        return min(hottest, capacity) / min(1.0, capacity)
    if ep == 1 or experts == 1:
        return 1.0
    local = experts // ep
    deviation = skew * sqrt((1 - local / experts) / local * experts / (experts - 1))
    largest = _largest(ep)
    spread = min(sqrt(log(1 + deviation**2)), largest)  # beyond, the formula would fall again
    return min(exp(spread * largest - spread**2 / 2), float(ep), max(1.0, experts / top_k))


def _cut_off(skew: float, most: float) -> tuple[float, float]:
    """Mean of min(X, most), and its deviation over that mean, X log-normal of mean 1 and deviation
    `skew`."""
    spread, below = sqrt(log(1 + skew**2)), NormalDist().cdf
    edge = log(most) / spread + spread / 2
    mean = below(edge - spread) + most * below(-edge)
    square = (1 + skew**2) * below(edge - 2 * spread) + most**2 * below(-edge)
    return mean, sqrt(max(0.0, square - mean**2)) / mean


def _largest(draws: int) -> float:
    """The expected largest of so many (at least 2) normal draws whose sum is 0, in their deviations
    (Blom)."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25)) * sqrt(draws / (draws - 1))


def etp_gathered_rows(workload: Workload, layout: Layout, rows: int) -> int:
    """Rows that ETP ranks gather to have `rows` between them, as each sends its part padded to the
    largest.

    Their parts are of different tokens: about rows / etp each, deviating by the root of that,
    unless routing is even or a capacity pads them. docs/formulas.md 3.
    """
    even = workload.routing is Routing.BALANCED or layout.capacity_fill is CapacityFill.PADDED
    if layout.etp == 1 or even or not rows:
        return rows
    mean = rows / layout.etp
    return round(layout.etp * (mean + _largest(layout.etp) * sqrt(mean * (1 - 1 / layout.etp))))


def check_load_histogram(
    model: ModelSpec, workload: Workload, layout: Layout
) -> tuple[Reason, ...]:
    """What is wrong with a load histogram, as there must be one where it decides: a count for every
    expert, layers as many as have experts."""
    used = (
        workload.routing is Routing.MEASURED or layout.expert_placement is ExpertPlacement.BALANCED
    )
    if not used or model.moe is None:
        return ()
    found, experts = workload.load_histogram, model.moe.experts
    if len(found) != model.moe_layer_count:
        rule = (
            f"needs the tokens an expert of each of the {model.moe_layer_count} layers with experts"
        )
        return (Reason(field="workload.load_histogram", value=f"{len(found)} layers", rule=rule),)
    for layer, counts in enumerate(found):
        if len(counts) != experts or min(counts) < 0 or not sum(counts):
            rule = f"needs {experts} counts, not negative and not all zero"
            return (
                Reason(
                    field=f"workload.load_histogram[{layer}]",
                    value=f"{len(counts)} counts",
                    rule=rule,
                ),
            )
    return ()


def random_max_over_mean(experts: int, tokens_per_expert: float) -> float:
    """Expected max/mean expert load when routing is uniform at random: 1 + sqrt(2 ln E / Te);
    docs/formulas.md 4."""
    return 1.0 + sqrt(2.0 * log(experts) / tokens_per_expert) if experts > 1 else 1.0


def expected_distinct(places: int, draws: int) -> float:
    """Expected distinct places (ranks, nodes) that k uniform draws hit: N (1 - (1 - 1/N)^k);
    docs/formulas.md 3."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def measure_load_balance(counts: Sequence[int]) -> LoadBalance:
    """Load of one layer from its tokens per expert. All zero counts as even, with every expert
    dead."""
    total = sum(counts)
    dead = sum(1 for value in counts if value == 0)
    if total == 0:
        return LoadBalance(max_over_mean=1.0, p95_over_mean=1.0, dead_experts=dead, entropy=1.0)
    spread = -sum(value / total * log(value / total) for value in counts if value)
    return LoadBalance(
        max_over_mean=max(counts) * len(counts) / total,
        p95_over_mean=sorted(counts)[ceil(0.95 * len(counts)) - 1] * len(counts) / total,
        dead_experts=dead,
        entropy=spread / log(len(counts)) if len(counts) > 1 else 1.0,
    )


def expert_rows(by_source: Sequence[Sequence[int]], experts: Sequence[int]) -> tuple[int, ...]:
    """Rows each of the given experts receives from all source ranks;
    by_source[source_rank][expert]."""
    return tuple(sum(source[expert] for source in by_source) for expert in experts)


def rank_rows(
    model: ModelSpec,
    layout: Layout,
    by_source: Sequence[Sequence[int]],
    rank: int,
    slots: Sequence[int],
) -> int:
    """Rows a rank's experts receive, when `by_source` holds the counts of the sources of its EP
    group and `slots` the expert of every slot; those of an expert with several are dealt to them.
    """
    ep_rank = grid.coordinate(layout, rank, "ep")
    if not layout.spare:
        return sum(expert_rows(by_source, expert_placement.rank_experts(slots, layout.ep, ep_rank)))
    return sum(slot_rows(by_source, slots)[expert_placement.rank_slots(slots, layout.ep, ep_rank)])


def slot_rows(by_source: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[int, ...]:
    """Rows of every slot, where each source deals an expert's rows to its slots in turn."""
    places: dict[int, list[int]] = {}
    for slot, expert in enumerate(slots):
        places.setdefault(expert, []).append(slot)
    return tuple(
        sum(
            expert_placement.rows_for_slot(
                of_source[expert], len(places[expert]), source, places[expert].index(slot)
            )
            for source, of_source in enumerate(by_source)
        )
        for slot, expert in enumerate(slots)
    )
