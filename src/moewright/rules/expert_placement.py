"""Which expert-parallel rank holds which expert: a measured load evened by packing or replicas.

The greedy packing and replication follow DeepSeek's EPLB (github.com/deepseek-ai/EPLB). A slot is a
place for one expert. The slots of a rank follow each other: first those of its own experts, then
those of replicas, which belong to other ranks and equal what these hold. A load is the tokens of
each expert of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import TypeVar

from moewright.rules.job import Job
from moewright.spec.errors import Reason
from moewright.spec.layout import ExpertPlacement, Layout
from moewright.spec.units import divide
from moewright.spec.workload import Workload

Tokens = TypeVar("Tokens", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlacement:
    """A placement with more slots than experts.

    `slots` holds the expert of every slot; the tokens of an expert are dealt evenly to its slots.
    The last slots of each rank hold replicas, sorted by the rank that owns their expert.
    """

    slots: tuple[int, ...]
    load_factor: float  # of the hottest rank, over the mean


def slot_experts(job: Job, layer: int) -> tuple[int, ...]:
    """Return the expert of every slot of a layer with experts.

    No histogram counts the load of MTP depths; their experts stay in order.
    """
    experts = job.model.expert_count
    index = job.model.routed_layers.index(layer)
    is_counted = index < len(job.workload.load_histogram)
    if job.layout.expert_placement is ExpertPlacement.CONTIGUOUS or not is_counted:
        return tuple(range(experts))
    counts = job.workload.load_histogram[index]
    if job.layout.spare:
        return place_with_replicas(counts, job.layout.ep, job.layout.spare).slots
    return place_balanced(counts, job.layout.ep)


def count_slots(job: Job, layer: int) -> int:
    """Return the slots of all ranks in a layer with experts, those of replicas included."""
    experts = job.model.expert_count
    if job.layout.spare and job.model.routed_layers.index(layer) < len(job.workload.load_histogram):
        return experts + job.layout.spare * job.layout.ep
    return experts


def rank_slots(slots: Sequence[int], ep: int, rank: int) -> slice:
    """Return the range of slots that one rank holds, as a slice of all slots."""
    local = len(slots) // ep
    return slice(rank * local, (rank + 1) * local)


def rank_experts(slots: Sequence[int], ep: int, rank: int) -> Sequence[int]:
    """Return the experts of one rank's slots."""
    return slots[rank_slots(slots, ep, rank)]


def rows_for_slot(count: int, slots: int, source: int, slot: int) -> int:
    """Return how many of an expert's `count` rows rank `source` sends to one of its `slots` slots.

    The source deals them in turn and starts at slot source % slots, so that the remainders of all
    sources do not go to the same slot.
    """
    # The rows r of 0 .. count - 1 with (r + source) mod slots = slot (docs/formulas.md 3).
    return (count - (slot - source) % slots + slots - 1) // slots


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaExchange:
    """The weights of experts that one rank sends and receives so that spare slots hold replicas.

    `sent_slots` lists the slots of its own experts whose weights it sends, ordered by the rank that
    they go to; the two counts [ep] are experts per rank of the group. The received experts fill the
    spare slots in order.
    """

    sent_slots: tuple[int, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]


def plan_replica_exchange(slots: Sequence[int], ep: int, rank: int, spare: int) -> ReplicaExchange:
    """Return what a rank exchanges where `spare` slots of each rank are for replicas."""
    own = len(slots) // ep - spare
    own_experts = [list(rank_experts(slots, ep, other)[:own]) for other in range(ep)]
    replicas = [rank_experts(slots, ep, other)[own:] for other in range(ep)]
    owners = {expert: other for other in range(ep) for expert in own_experts[other]}
    sent = [
        [own_experts[rank].index(expert) for expert in experts if owners[expert] == rank]
        for experts in replicas
    ]
    sources = [owners[expert] for expert in replicas[rank]]
    return ReplicaExchange(
        sent_slots=tuple(slot for to_rank in sent for slot in to_rank),
        send_counts=tuple(map(len, sent)),
        receive_counts=tuple(sources.count(other) for other in range(ep)),
    )


@lru_cache(maxsize=512)
def place_balanced(counts: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """Return the expert of every slot such that the ranks have about equal loads.

    All ranks hold equally many experts: the next hottest expert goes to the least loaded rank that
    has room. The placement is never worse than contiguous blocks.
    """
    room = len(counts) // ep
    placed: list[list[int]] = [[] for _ in range(ep)]
    loads = [0] * ep
    # Ties go to the lower number here and below: every process has to find the same placement.
    for expert in sorted(range(len(counts)), key=lambda index: (-counts[index], index)):
        rank = min((r for r in range(ep) if len(placed[r]) < room), key=lambda r: (loads[r], r))
        placed[rank].append(expert)
        loads[rank] += counts[expert]
    if max(loads) >= max(rank_loads(counts, ep)):
        return tuple(range(len(counts)))
    return tuple(expert for experts in placed for expert in sorted(experts))


class _ReplicaPacking:
    """A balanced placement while replicas are added to it one by one."""

    def __init__(self, counts: Sequence[int], ep: int, spare: int) -> None:
        blocks = place_balanced(tuple(counts), ep)
        self.counts = counts
        self.spare = spare
        self.own = [list(rank_experts(blocks, ep, rank)) for rank in range(ep)]
        self.replicas: list[list[int]] = [[] for _ in range(ep)]
        self.owner = {expert: rank for rank, experts in enumerate(self.own) for expert in experts}
        self.holders = {expert: [rank] for expert, rank in self.owner.items()}
        self.loads = [float(sum(counts[expert] for expert in experts)) for experts in self.own]

    def add(self, expert: int, rank: int) -> None:
        """Give `rank` a replica of `expert`, which spreads its load over one more slot."""
        holders = self.holders[expert]
        for holder in holders:
            self.loads[holder] -= self.counts[expert] / len(holders)
        holders.append(rank)
        for holder in holders:
            self.loads[holder] += self.counts[expert] / len(holders)
        self.replicas[rank].append(expert)

    def choose_next(self) -> tuple[int, int]:
        """Return the expert that gets the next replica, and the rank that holds it.

        The replica is of an expert of the hottest rank that has one to share. Of the choices that
        make no rank hotter than that one, it lowers the sum of squared loads the most.
        """
        free_ranks = [rank for rank in range(len(self.own)) if self._has_room(rank)]
        for hot_rank in sorted(range(len(self.loads)), key=lambda r: (-self.loads[r], r)):
            candidates = [
                candidate
                for expert in sorted({*self.own[hot_rank], *self.replicas[hot_rank]})
                if (candidate := self._best_rank(expert, hot_rank, free_ranks))
            ]
            if candidates:
                _, expert, rank = min(candidates)
                return expert, rank
        # No replica would even out the load any more: take the one that adds the least to its rank.
        rank = free_ranks[0]
        expert = min(
            range(len(self.counts)), key=lambda index: (self._added_load(index, rank), index)
        )
        return expert, rank

    def _has_room(self, rank: int) -> bool:
        return len(self.replicas[rank]) < self.spare

    def _best_rank(
        self, expert: int, hot_rank: int, free_ranks: Sequence[int]
    ) -> tuple[float, int, int] | None:
        """Return the change of the sum of squared loads, the expert, and the best rank for it.

        None where a replica would not lower the sum, or would make a rank hotter than `hot_rank`.
        """
        holders = self.holders[expert]
        others = [rank for rank in free_ranks if rank not in holders]
        if not others:
            return None
        rank = min(others, key=lambda other: (self.loads[other], other))
        share = self.counts[expert] / (len(holders) + 1)
        relief = self.counts[expert] / len(holders) - share
        # (l + d)^2 - l^2 = d (2 l + d), for the rank that is added and for the holders it relieves.
        change = share * (2 * self.loads[rank] + share)
        change += sum(relief * (relief - 2 * self.loads[holder]) for holder in holders)
        if change < 0 and self.loads[rank] + share <= self.loads[hot_rank]:
            return change, expert, rank
        return None

    def _added_load(self, expert: int, rank: int) -> float:
        """Return what one more replica of an expert adds to the load of a rank."""
        slots = len(self.holders[expert])
        rank_share = self.holders[expert].count(rank)
        return self.counts[expert] * ((rank_share + 1) / (slots + 1) - rank_share / slots)


@lru_cache(maxsize=512)
def place_with_replicas(counts: tuple[int, ...], ep: int, spare: int) -> ReplicaPlacement:
    """Return the balanced placement with `spare` more slots on each rank for replicas.

    Each replica goes to an expert of the hottest rank that has one to share, on the least loaded
    rank with room that does not hold it yet. Where none would even out the load any more, a rank
    takes the one that adds the least to its own.
    """
    packing = _ReplicaPacking(counts, ep, spare)
    for _ in range(spare * ep):
        expert, rank = packing.choose_next()
        packing.add(expert, rank)
    slots: list[int] = []
    for experts, replicas in zip(packing.own, packing.replicas, strict=True):
        slots += experts
        # By owner: what a rank receives of one other rank fills its slots without a permutation.
        slots += sorted(replicas, key=lambda expert: (packing.owner[expert], expert))
    share = [counts[expert] / len(packing.holders[expert]) for expert in range(len(counts))]
    hottest = max(
        sum(share[expert] for expert in rank_experts(slots, ep, rank)) for rank in range(ep)
    )
    total = sum(counts)
    load_factor = divide(hottest * ep, total, otherwise=1.0)
    return ReplicaPlacement(slots=tuple(slots), load_factor=load_factor)


def balanced_slot_loads(counts: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """Return the tokens of every slot of the balanced placement."""
    return tuple(counts[expert] for expert in place_balanced(counts, ep))


def rank_loads(counts: Sequence[Tokens], ep: int) -> tuple[Tokens, ...]:
    """Return the tokens of each EP rank with experts in contiguous blocks."""
    local = len(counts) // ep
    return tuple(sum(counts[rank * local : (rank + 1) * local]) for rank in range(ep))


def rank_load_factor(counts: Sequence[int], ep: int) -> float:
    """Return the load of the hottest EP rank over the mean with experts in contiguous blocks.

    It is 1 when nothing was routed.
    """
    total = sum(counts)
    if not total:
        return 1.0
    return max(rank_loads(counts, ep)) * ep / total


def describe_placements(workload: Workload, ep: int) -> str:
    """Return, in words, the load factors of the placements under the measured load.

    They are of the hottest rank over the mean, averaged over the layers.
    """
    histogram = workload.load_histogram
    blocks = fmean(rank_load_factor(counts, ep) for counts in histogram)
    packed = fmean(rank_load_factor(balanced_slot_loads(counts, ep), ep) for counts in histogram)
    spare = fmean(place_with_replicas(counts, ep, 1).load_factor for counts in histogram)
    return (
        f"{blocks:.3g} x the mean in contiguous blocks, {packed:.3g} balanced, "
        f"{spare:.3g} with a replica more a rank"
    )


def check_placement(job: Job) -> tuple[Reason, ...]:
    """Return what the expert placement of the layout lacks.

    A balanced placement needs several ranks and a measured load. Replicas need a balanced placement
    and experts of other ranks.
    """
    model = job.model
    layout = job.layout
    is_balanced = layout.expert_placement is ExpertPlacement.BALANCED
    others = model.expert_count - job.local_experts
    if layout.spare and not is_balanced:
        rule = f"goes with expert_placement={ExpertPlacement.BALANCED}"
        return (_spare_reason(layout, rule, "0"),)
    if layout.spare > others and layout.ep > 1:
        rule = f"a rank of ep={layout.ep} has {others} experts to replicate that are not its own"
        return (_spare_reason(layout, rule, str(others)),)
    if not is_balanced:
        return ()
    if model.moe is None or layout.ep == 1:
        rule = "needs ep > 1"
    elif not job.workload.load_histogram:
        rule = "is made from train.load_histogram, which is not given"
    else:
        return ()
    return (
        Reason(
            field="layout.expert_placement",
            value=layout.expert_placement,
            rule=rule,
            nearest=ExpertPlacement.CONTIGUOUS,
        ),
    )


def _spare_reason(layout: Layout, rule: str, nearest: str) -> Reason:
    return Reason(field="layout.spare", value=str(layout.spare), rule=rule, nearest=nearest)
