"""Which expert-parallel rank holds which expert, from a measured load: even by packing, or by replicas of hot experts.

Greedy packing and replication as in DeepSeek's EPLB (github.com/deepseek-ai/EPLB). A slot is a place for one expert; a
rank's slots follow each other. A load is the tokens of each expert of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from moewright.spec.errors import Reason
from moewright.spec.layout import ExpertPlacement, Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """The expert of every slot, `slots`, more slots than experts; an expert's tokens are dealt evenly to its slots."""

    slots: tuple[int, ...]
    load_factor: float  # of the hottest rank, over the mean


def slots_of(model: ModelSpec, workload: Workload, layout: Layout, layer: int) -> tuple[int, ...]:
    """The expert of every slot of a layer with experts; MTP depths, whose load no histogram counts, keep theirs."""
    experts = model.moe.experts if model.moe else 0
    place = model.routed_layers.index(layer)
    if layout.expert_placement is ExpertPlacement.CONTIGUOUS or place >= len(workload.load_histogram):
        return tuple(range(experts))
    return balanced(workload.load_histogram[place], layout.ep)


@lru_cache(maxsize=512)
def balanced(counts: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """The expert of every slot such that ranks with equally many experts have about equal loads: the next hottest
    expert goes to the least loaded rank that has room. Never worse than contiguous blocks.
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


def replicated(counts: Sequence[int], ep: int, spare: int) -> Replicas:
    """`spare` slots more on each rank, for replicas: each goes to the expert whose slots carry the most and that has
    less than a slot a rank; slots are packed like experts, no two of an expert on one rank where that can be helped.
    """
    experts = len(counts)
    copies = [1] * experts
    for _ in range(spare * ep):
        few = [one for one in range(experts) if copies[one] < ep] or range(experts)
        copies[max(few, key=lambda one: (counts[one] / copies[one], -one))] += 1
    each = [counts[one] / copies[one] for one in range(experts)]
    room = experts // ep + spare
    held: list[list[int]] = [[] for _ in range(ep)]
    loads = [0.0] * ep
    slots = (one for one in sorted(range(experts), key=lambda one: (-each[one], one)) for _ in range(copies[one]))
    for expert in slots:
        free = [r for r in range(ep) if len(held[r]) < room]
        rank = min(free, key=lambda r: (expert in held[r], loads[r], r))
        held[rank].append(expert)
        loads[rank] += each[expert]
    total = sum(counts)
    factor = max(loads) * ep / total if total else 1.0
    return Replicas(slots=tuple(expert for mine in held for expert in sorted(mine)), load_factor=factor)


def placed(counts: tuple[int, ...], ep: int) -> tuple[int, ...]:
    """Tokens of every slot of the balanced placement."""
    return tuple(counts[expert] for expert in balanced(counts, ep))


def rank_loads(counts: Sequence[int], ep: int) -> tuple[int, ...]:
    """Tokens of each EP rank, experts in contiguous blocks."""
    local = len(counts) // ep
    return tuple(sum(counts[rank * local : (rank + 1) * local]) for rank in range(ep))


def rank_load_factor(counts: Sequence[int], ep: int) -> float:
    """Load of the hottest EP rank over the mean, experts in contiguous blocks. 1 when nothing was routed."""
    total = sum(counts)
    return max(rank_loads(counts, ep)) * ep / total if total else 1.0


def even_loads(workload: Workload, ep: int) -> str:
    """What placements make of the measured load, mean over layers: the hottest rank over the mean, in words."""
    histogram = workload.load_histogram
    blocks, packed = (fmean(loads) for loads in zip(*(_two(counts, ep) for counts in histogram), strict=True))
    spare = fmean(replicated(counts, ep, 1).load_factor for counts in histogram)
    return (
        f"{blocks:.3g} x the mean in contiguous blocks, {packed:.3g} balanced, {spare:.3g} with a replica more a rank"
    )


def _two(counts: tuple[int, ...], ep: int) -> tuple[float, float]:
    return rank_load_factor(counts, ep), rank_load_factor(placed(counts, ep), ep)


def placement_reasons(model: ModelSpec, workload: Workload, layout: Layout) -> tuple[Reason, ...]:
    """What an even placement lacks: ranks to place on, and the load that it is made from."""
    if layout.expert_placement is ExpertPlacement.CONTIGUOUS:
        return ()
    if model.moe is None or layout.ep == 1:
        rule = "needs ep > 1"
    elif not workload.load_histogram:
        rule = "is made from train.load_histogram, which is not given"
    else:
        return ()
    field, value = "layout.expert_placement", layout.expert_placement
    return (Reason(field=field, value=value, rule=rule, nearest=ExpertPlacement.CONTIGUOUS),)
