"""Which expert-parallel rank holds which expert, from a measured load: even by packing, or by
replicas of hot experts.

Greedy packing and replication after DeepSeek's EPLB (github.com/deepseek-ai/EPLB). A slot is a
place for one expert; a rank's slots follow each other: first those of the experts that are its own,
then those of replicas, which belong to other ranks and are equal to what these hold. A load is the
tokens of each expert of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from moewright.spec.errors import Reason
from moewright.spec.layout import ExpertPlacement, Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlacement:
    """The expert of every slot, `slots`, more slots than experts; an expert's tokens are dealt
    evenly to its slots. Of each rank's slots the last are of replicas, by the rank whose own their
    expert is.
    """

    slots: tuple[int, ...]
    load_factor: float  # of the hottest rank, over the mean


def slot_experts(
    model: ModelSpec, workload: Workload, layout: Layout, layer: int
) -> tuple[int, ...]:
    """The expert of every slot of a layer with experts; MTP depths, whose load no histogram counts,
    keep theirs."""
    experts = model.moe.experts if model.moe else 0
    place = model.routed_layers.index(layer)
    if layout.expert_placement is ExpertPlacement.CONTIGUOUS or place >= len(
        workload.load_histogram
    ):
        return tuple(range(experts))
    counts = workload.load_histogram[place]
    if layout.spare:
        return place_with_replicas(counts, layout.ep, layout.spare).slots
    return place_balanced(counts, layout.ep)


def count_slots(model: ModelSpec, workload: Workload, layout: Layout, layer: int) -> int:
    """Slots of all ranks in a layer with experts, those of replicas included."""
    experts = model.moe.experts if model.moe else 0
    counted = (
        model.routed_layers.index(layer) < len(workload.load_histogram) if layout.spare else False
    )
    return experts + (layout.spare * layout.ep if counted else 0)


def rank_slots(slots: Sequence[int], ep: int, rank: int) -> slice:
    """Where one rank's slots are."""
    local = len(slots) // ep
    return slice(rank * local, (rank + 1) * local)


def rank_experts(slots: Sequence[int], ep: int, rank: int) -> Sequence[int]:
    """The experts of one rank's slots."""
    return slots[rank_slots(slots, ep, rank)]


def rows_for_slot(count: int, slots: int, source: int, slot: int) -> int:
    """How many of an expert's rows the rank `source` of a group sends to one of its slots: it deals
    them in turn, and starts where its own number says, so that what is over does not go to the same
    slot from everywhere.
    """
    return (count - (slot - source) % slots + slots - 1) // slots


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaExchange:
    """What one rank exchanges to hold replicas: the numbers of its own experts' slots whose weights
    it sends, ordered by the rank that they go to, and how many go to and come from each rank. What
    comes fills its spare slots in order.
    """

    sent_slots: tuple[int, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]


def plan_replica_exchange(slots: Sequence[int], ep: int, rank: int, spare: int) -> ReplicaExchange:
    """Of a rank's part in slots of which each rank has `spare` for replicas."""
    own = len(slots) // ep - spare
    mine = list(rank_experts(slots, ep, rank)[:own])
    wanted = [rank_experts(slots, ep, other)[own:] for other in range(ep)]
    owners = {
        expert: other for other in range(ep) for expert in rank_experts(slots, ep, other)[:own]
    }
    going = [[mine.index(expert) for expert in of if owners[expert] == rank] for of in wanted]
    coming = [owners[expert] for expert in wanted[rank]]
    return ReplicaExchange(
        sent_slots=tuple(slot for of in going for slot in of),
        send_counts=tuple(map(len, going)),
        receive_counts=tuple(coming.count(other) for other in range(ep)),
    )


@lru_cache(maxsize=512)
def place_balanced(counts: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """The expert of every slot such that ranks with equally many experts have about equal loads:
    the next hottest expert goes to the least loaded rank that has room. Never worse than contiguous
    blocks.
    """
    room = len(counts) // ep
    held: list[list[int]] = [[] for _ in range(ep)]
    loads = [0] * ep
    for expert in sorted(range(len(counts)), key=lambda one: (-counts[one], one)):
        rank = min((r for r in range(ep) if len(held[r]) < room), key=lambda r: (loads[r], r))
        held[rank].append(expert)
        loads[rank] += counts[expert]
    if max(loads) >= max(rank_loads(counts, ep)):
        return tuple(range(len(counts)))
    return tuple(expert for mine in held for expert in sorted(mine))


@lru_cache(maxsize=512)
def place_with_replicas(counts: tuple[int, ...], ep: int, spare: int) -> ReplicaPlacement:
    """The balanced placement, and `spare` slots more on each rank for replicas of what is hot
    there: each goes to an expert of the hottest rank that has one to share, on the least loaded
    rank with room that has not got it. Where none would even the load any more, a rank takes the
    one that adds the least to its own.
    """
    blocks = place_balanced(counts, ep)
    held = [list(rank_experts(blocks, ep, rank)) for rank in range(ep)]
    owner = {expert: rank for rank, mine in enumerate(held) for expert in mine}
    holders = {expert: [rank] for expert, rank in owner.items()}
    replicas: list[list[int]] = [[] for _ in range(ep)]
    loads = [float(sum(counts[expert] for expert in mine)) for mine in held]
    for _ in range(spare * ep):
        expert, rank = _shared(counts, held, replicas, holders, loads, spare)
        before = counts[expert] / len(holders[expert])
        for other in holders[expert]:
            loads[other] -= before
        holders[expert].append(rank)
        for other in holders[expert]:
            loads[other] += counts[expert] / len(holders[expert])
        replicas[rank].append(expert)
    slots = [
        one
        for mine, others in zip(held, replicas, strict=True)
        for one in (*mine, *sorted(others, key=lambda expert: (owner[expert], expert)))
    ]
    share = [counts[expert] / len(holders[expert]) for expert in range(len(counts))]
    hottest = max(
        sum(share[expert] for expert in rank_experts(slots, ep, rank)) for rank in range(ep)
    )
    total = sum(counts)
    return ReplicaPlacement(slots=tuple(slots), load_factor=hottest * ep / total if total else 1.0)


def _shared(
    counts: Sequence[int],
    held: Sequence[Sequence[int]],
    replicas: Sequence[Sequence[int]],
    holders: Mapping[int, Sequence[int]],
    loads: Sequence[float],
    spare: int,
) -> tuple[int, int]:
    """The expert that gets the next replica, and the rank: of those that leave no rank above the
    hottest sharer, what lessens the sum of squared loads the most.
    """
    room = [rank for rank, mine in enumerate(replicas) if len(mine) < spare]
    for hot in sorted(range(len(loads)), key=lambda rank: (-loads[rank], rank)):
        best: tuple[float, int, int] | None = None
        for expert in sorted({*held[hot], *replicas[hot]}):
            free = [rank for rank in room if rank not in holders[expert]]
            if not free:
                continue
            rank = min(free, key=lambda one: (loads[one], one))
            share = counts[expert] / (len(holders[expert]) + 1)
            less = counts[expert] / len(holders[expert]) - share
            change = share * (2 * loads[rank] + share)
            change += sum(less * (less - 2 * loads[other]) for other in holders[expert])
            if change < 0 and loads[rank] + share <= loads[hot]:
                best = min(best or (change, expert, rank), (change, expert, rank))
        if best:
            return best[1], best[2]
    rank = room[0]

    def more(expert: int) -> float:
        slots, here = len(holders[expert]), holders[expert].count(rank)
        return counts[expert] * ((here + 1) / (slots + 1) - here / slots)

    return min(range(len(counts)), key=lambda expert: (more(expert), expert)), rank


def balanced_slot_loads(counts: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """Tokens of every slot of the balanced placement."""
    return tuple(counts[expert] for expert in place_balanced(counts, ep))


def rank_loads(counts: Sequence[int], ep: int) -> tuple[int, ...]:
    """Tokens of each EP rank, experts in contiguous blocks."""
    local = len(counts) // ep
    return tuple(sum(counts[rank * local : (rank + 1) * local]) for rank in range(ep))


def rank_load_factor(counts: Sequence[int], ep: int) -> float:
    """Load of the hottest EP rank over the mean, experts in contiguous blocks. 1 when nothing was
    routed."""
    total = sum(counts)
    return max(rank_loads(counts, ep)) * ep / total if total else 1.0


def describe_placements(workload: Workload, ep: int) -> str:
    """What placements make of the measured load, mean over layers: the hottest rank over the mean,
    in words."""
    histogram = workload.load_histogram
    blocks, packed = (
        fmean(loads) for loads in zip(*(_two(counts, ep) for counts in histogram), strict=True)
    )
    spare = fmean(place_with_replicas(counts, ep, 1).load_factor for counts in histogram)
    return f"{blocks:.3g} x the mean in contiguous blocks, {packed:.3g} balanced, {spare:.3g} with a replica more a rank"


def _two(counts: tuple[int, ...], ep: int) -> tuple[float, float]:
    return rank_load_factor(counts, ep), rank_load_factor(balanced_slot_loads(counts, ep), ep)


def check_placement(model: ModelSpec, workload: Workload, layout: Layout) -> tuple[Reason, ...]:
    """What an even placement lacks: ranks to place on, and the load that it is made from; and
    replicas: a placement to go with, and experts of other ranks.
    """
    placed_evenly = layout.expert_placement is ExpertPlacement.BALANCED
    others = model.moe.experts - model.moe.experts // layout.ep if model.moe else 0
    rule, near = "", str(others)
    if layout.spare and not placed_evenly:
        rule, near = f"goes with expert_placement={ExpertPlacement.BALANCED}", "0"
    elif layout.spare > others and layout.ep > 1:
        rule = f"a rank of ep={layout.ep} has {others} experts to replicate that are not its own"
    if rule:
        return (Reason(field="layout.spare", value=str(layout.spare), rule=rule, nearest=near),)
    if not placed_evenly:
        return ()
    if model.moe is None or layout.ep == 1:
        rule = "needs ep > 1"
    elif not workload.load_histogram:
        rule = "is made from train.load_histogram, which is not given"
    else:
        return ()
    field, value = "layout.expert_placement", layout.expert_placement
    return (Reason(field=field, value=value, rule=rule, nearest=ExpertPlacement.CONTIGUOUS),)
