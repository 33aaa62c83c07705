"""Experts that change their ranks while a run goes on: which, what is sent, and whether it pays.

Only experts in the same slot of two ranks change places. The ranks of an expert group lay out
their weights and states alike, so whatever lies at a place of one goes to that place of the other,
however ETP, ZeRO and pipelines cut them: a move is a permutation of what the group holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moewright.rules.delayed_scaling import is_delayed
from moewright.rules.expert_placement import rank_loads, slot_experts
from moewright.rules.grid import group_size
from moewright.rules.job import Job
from moewright.rules.optimizers import is_muon_matrix, is_scaled, stored_nbytes
from moewright.rules.shapes.fsdp import momentum_group
from moewright.rules.shapes.parameters import parameters
from moewright.rules.shapes.shards import gradient_group
from moewright.spec.errors import Reason
from moewright.spec.plan import Plan, TimePart
from moewright.spec.units import FP32_BYTES
from moewright.spec.workload import MatrixUpdate, RouterForce, Task

Placement = Mapping[int, tuple[int, ...]]  # by layer, the expert of every slot of all ranks

_LEAST_RELIEF = 0.01  # of the mean load of a rank: what a swap must take off the hotter of the two


@dataclass(frozen=True, kw_only=True, slots=True)
class MovePrice:
    """What a placement gains and costs: seconds of load and of bytes.

    `experts_s` are the seconds of a step that a stage's products of experts take under an even
    load; layers of the other stages compute and move beside it. `expert_bytes` are of the weights
    and states that a group of ranks sends of one expert, by layer; each rank sends `shares` of
    them. `steps` are those that a placement is used for.
    """

    experts_s: float
    expert_bytes: Mapping[int, int]
    shares: float
    bytes_per_s: float
    steps: int
    stages: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMoves:
    """A new placement, of all layers, and what it is expected to gain a step and to take."""

    placement: Placement
    experts: int
    sent_bytes: int  # by all ranks
    gain_s: float
    move_s: float


def job_placement(job: Job) -> Placement:
    """Return the placement that a job begins with, of the layers whose loads are counted.

    The layers of MTP depths keep theirs.
    """
    return {layer: slot_experts(job, layer) for layer in job.model.routed_layers}


def swap_experts(
    counts: Sequence[float], slots: tuple[int, ...], ep: int
) -> tuple[tuple[int, ...], int]:
    """Return the slots with an evener load, and how many experts change their rank.

    Again and again the hottest rank and another swap the experts in one of their slots, so that the
    hotter of both becomes as cool as it can, until no swap takes enough off.
    """
    local = len(slots) // ep
    placed = [list(slots[rank * local : (rank + 1) * local]) for rank in range(ep)]
    loads = list(rank_loads([counts[expert] for expert in slots], ep))
    least = _LEAST_RELIEF * sum(loads) / ep
    while True:
        hot = max(range(ep), key=lambda rank: loads[rank])
        swaps = (
            (max(loads[hot] - shift, loads[rank] + shift), rank, place)
            for rank in range(ep)
            for place in range(local)
            if (shift := counts[placed[hot][place]] - counts[placed[rank][place]]) > 0
        )
        # Equal loads are ordered by rank and place: every rank of the group plans the same moves.
        load, rank, place = min(swaps, default=(loads[hot], hot, 0))
        if loads[hot] - load <= least:
            break
        shift = counts[placed[hot][place]] - counts[placed[rank][place]]
        placed[hot][place], placed[rank][place] = placed[rank][place], placed[hot][place]
        loads[hot] -= shift
        loads[rank] += shift
    new = tuple(expert for experts in placed for expert in experts)
    return new, sum(old != expert for old, expert in zip(slots, new, strict=True))


def plan_moves(
    placement: Placement, counts: Mapping[int, Sequence[float]], ep: int, price: MovePrice
) -> PlannedMoves:
    """Return the moves that gain more than they take, for loads like those of `counts`, by layer.

    A layer whose own moves do not pay keeps its placement.
    """
    new = dict(placement)
    experts = 0
    gain_s = sent_bytes = move_s = 0.0
    for layer, tokens in counts.items():
        slots, moved = swap_experts(tokens, placement[layer], ep)
        if not moved or not sum(tokens):
            continue
        hottest = [
            max(rank_loads([tokens[expert] for expert in order], ep))
            for order in (placement[layer], slots)
        ]
        relief = (hottest[0] - hottest[1]) * ep / sum(tokens)
        # experts_s is of one stage, which has len(counts) / stages of these layers.
        layer_gain_s = price.experts_s * price.stages / len(counts) * relief
        nbytes = _most_moved(placement[layer], slots, ep) * price.expert_bytes[layer]
        layer_move_s = nbytes * price.shares / price.bytes_per_s
        if layer_gain_s * price.steps <= layer_move_s:
            continue
        new[layer] = slots
        experts += moved
        sent_bytes += moved * price.expert_bytes[layer]
        gain_s += layer_gain_s / price.stages
        move_s += layer_move_s / price.stages
    return PlannedMoves(
        placement=new, experts=experts, sent_bytes=int(sent_bytes), gain_s=gain_s, move_s=move_s
    )


def _most_moved(before: Sequence[int], after: Sequence[int], ep: int) -> int:
    """Return the experts that the rank gets which gets the most."""
    moved = [int(old != new) for old, new in zip(before, after, strict=True)]
    return max(rank_loads(moved, ep))


def expert_nbytes(job: Job) -> Mapping[int, int]:
    """Return the bytes that move with one expert, by layer, of all ranks that hold a part of it.

    They are the master weights and moments, as checkpoints hold them, of each rank that has them.
    The weights are rounded anew, and gathered as after an update.
    """
    optimizer = job.workload.optimizer
    layout = job.layout
    nbytes = dict.fromkeys(job.model.routed_layers, 0)
    for param in parameters(job.model):
        if not param.is_expert or param.layer not in nbytes:
            continue
        element_nbytes = FP32_BYTES + stored_nbytes(optimizer)
        is_muon = optimizer.matrix_update is MatrixUpdate.MUON
        if is_muon and is_muon_matrix(param.name, len(param.shape), param.module):
            # Muon has no second moment; its momentum is not narrowed.
            element_nbytes = 2 * FP32_BYTES  # with one momentum in fp32
        group = gradient_group(param.sharded_dims, layout)
        shards = 1
        if (state_group := momentum_group(layout, group)) is not None:
            shards = group_size(layout, state_group)
        copies = group_size(layout, group) // shards
        nbytes[param.layer] += param.numel // param.shape[0] * element_nbytes * copies
    return nbytes


def price_moves(plan: Plan, job: Job) -> MovePrice:
    """Return what moves of a plan's experts gain and cost, by its estimate and its links."""
    layout = job.layout
    estimate = plan.estimate
    experts_s = sum(s.seconds for s in estimate.shares if s.part is TimePart.EXPERTS)
    fabric = plan.hardware.fabric
    crosses = layout.ep * layout.etp > fabric.domain_size
    link = fabric.network_Bps if crosses else fabric.domain_Bps
    return MovePrice(
        # The estimate's seconds are those of the hottest rank, moves are priced from an even load.
        experts_s=experts_s / estimate.imbalance.load,
        expert_bytes=expert_nbytes(job),
        shares=1 / (layout.etp * group_size(layout, "edp")),
        bytes_per_s=link.value,
        steps=job.workload.rebalance_every,
        stages=layout.pp,
    )


def check_rebalancing(job: Job) -> Iterator[Reason]:
    """Yield what experts that are moved while a run goes on do not go with."""
    workload, layout = job.workload, job.layout
    if not workload.rebalance_every:
        return
    value = str(workload.rebalance_every)
    if job.model.moe is None or layout.ep == 1:
        rule = "moves experts between ranks: needs ep > 1"
        yield Reason(field="train.rebalance_every", value=value, rule=rule, nearest="0")
        return
    tuning = workload.fine_tuning
    moments = workload.optimizer.moment_dtypes
    blocked = "+".join(moment for moment in moments if is_scaled(moment))
    choices = (
        ("layout.spare", str(layout.spare), layout.spare > 0, "0"),
        ("layout.graphs", "+".join(layout.graphs), bool(layout.graphs), "none"),
        ("train.force", workload.router.force, workload.router.force is not RouterForce.NONE,
         RouterForce.NONE),
        ("train.tensor_scaling", workload.tensor_scaling, is_delayed(workload), "current"),
        ("train.moment_dtype", blocked, bool(blocked), "bf16"),
        ("train.task", tuning.task, tuning.task is Task.LORA, Task.SFT),
        ("train.freeze", "+".join(tuning.freeze), bool(tuning.freeze), "[]"),
        ("model.mtp_shared", "true", job.model.mtp_shared, "false"),
        ("checkpoint.peer_every_steps", str(workload.checkpoint.peer_every_steps),
         workload.checkpoint.peer_every_steps > 0, "0"),
    )  # fmt: skip
    for field, chosen, is_refused, nearest in choices:
        if is_refused:
            rule = "the engine does not move experts beside it: not with rebalance_every"
            yield Reason(field=field, value=chosen, rule=rule, nearest=nearest)
