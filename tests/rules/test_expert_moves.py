"""Which experts change their ranks, and what that gains and takes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from layout_proof import WORKLOAD
from moewright.codec import parse_layout
from moewright.rules.expert_moves import MovePrice, expert_nbytes, plan_moves, swap_experts
from moewright.rules.expert_placement import place_balanced, rank_experts, rank_load_factor
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.spec.workload import (
    Dtype,
    FineTuningSpec,
    FrozenPart,
    RouterForce,
    RouterTraining,
    Task,
)
from tiny_jobs import MODEL


def _draw_loads(random: Random) -> tuple[tuple[int, ...], int]:
    ep = random.choice((2, 4, 8, 16))
    experts = ep * random.choice((1, 2, 4, 16))
    return tuple(int(1000 * random.lognormvariate(0, 1)) for _ in range(experts)), ep


def _factor(counts: tuple[int, ...], slots: tuple[int, ...], ep: int) -> float:
    return rank_load_factor([counts[expert] for expert in slots], ep)


@pytest.mark.parametrize("seed", range(40))
def test_swaps_change_ranks_and_no_slots_and_never_heat_the_hottest_rank(seed: int) -> None:
    random = Random(seed)
    counts, ep = _draw_loads(random)
    start = list(range(len(counts)))
    random.shuffle(start)
    slots, moved = swap_experts(counts, tuple(start), ep)
    local = len(counts) // ep
    for place in range(local):
        before = {rank_experts(start, ep, rank)[place] for rank in range(ep)}
        assert {rank_experts(slots, ep, rank)[place] for rank in range(ep)} == before
    assert moved == sum(old != new for old, new in zip(start, slots, strict=True))
    assert _factor(counts, slots, ep) <= _factor(counts, tuple(start), ep)


def test_swaps_are_nearly_as_even_as_a_placement_made_anew() -> None:
    """Of 200 draws of 128 experts on 8 ranks, the median is within 3 % of packing all anew."""
    ratios = []
    for seed in range(200):
        random = Random(seed)
        counts = tuple(int(1000 * random.lognormvariate(0, 0.7)) for _ in range(128))
        slots, _ = swap_experts(counts, tuple(range(128)), 8)
        packed = _factor(counts, place_balanced(counts, 8), 8)
        ratios.append(_factor(counts, slots, 8) / packed)
    assert sorted(ratios)[100] < 1.03


def test_only_layers_whose_moves_gain_more_than_they_take_change() -> None:
    even, uneven = (10.0,) * 8, (40.0, 30.0, 10.0, 10.0, 5.0, 5.0, 5.0, 5.0)
    placement = {0: tuple(range(8)), 2: tuple(range(8))}
    price = MovePrice(
        experts_s=1.0, expert_bytes={0: 1000, 2: 1000}, shares=1.0, bytes_per_s=1e4, steps=10
    )
    planned = plan_moves(placement, {0: even, 2: uneven}, 2, price)
    assert planned.placement[0] == placement[0] != planned.placement[2]
    assert planned.sent_bytes == 1000 * planned.experts
    # From 90 of 110 rows to 55: the excess of a half layer's second falls by 35 / 55.
    assert planned.gain_s == pytest.approx(0.5 * 35 / 55, rel=0.15)
    dear = plan_moves(placement, {0: even, 2: uneven}, 2, replace(price, bytes_per_s=1e2))
    assert dear.placement == placement
    assert dear.experts == 0
    # A stage of one layer spends on it all the seconds that a stage of both spends on two.
    alone = plan_moves(placement, {0: even, 2: uneven}, 2, replace(price, stages=2))
    assert alone.placement == planned.placement
    assert (alone.gain_s, alone.move_s) == (planned.gain_s, planned.move_s / 2)
    # Ten steps of 0.31 s do not pay for 5 s, those of 0.62 s do.
    slow = replace(price, bytes_per_s=1000 * planned.experts / 2 / 5.0)
    assert not plan_moves(placement, {0: even, 2: uneven}, 2, slow).experts
    assert plan_moves(placement, {0: even, 2: uneven}, 2, replace(slow, stages=2)).experts


def test_an_expert_moves_with_its_master_weights_and_moments() -> None:
    """Three matrices of 16 x 32, 4 bytes and twice 2 an element; twice where two ranks hold it."""
    workload = replace(WORKLOAD, optimizer=replace(WORKLOAD.optimizer, moment_dtype=Dtype.BF16))
    layouts = {"ep2": 1, "ep2,zero0": 2, "ep2,zero3": 1, "ep2,etp2": 1}
    for text, copies in layouts.items():
        job = Job(model=MODEL, workload=workload, layout=parse_layout(text, world_size=4))
        assert expert_nbytes(job) == dict.fromkeys((0, 2), 3 * 16 * 32 * 8 * copies)


@pytest.mark.parametrize(
    ("text", "workload", "field"),
    [
        ("mbs2", WORKLOAD, "train.rebalance_every"),
        ("ep2,graphs=full", WORKLOAD, "layout.graphs"),
        ("ep2,expert_placement=balanced,spare1", WORKLOAD, "layout.spare"),
        (
            "ep2",
            replace(WORKLOAD, router=RouterTraining(force=RouterForce.BALANCED)),
            "train.force",
        ),
        (
            "ep2",
            replace(WORKLOAD, optimizer=replace(WORKLOAD.optimizer, moment_dtype=Dtype.FP8)),
            "train.moment_dtype",
        ),
        (
            "ep2",
            replace(WORKLOAD, checkpoint=replace(WORKLOAD.checkpoint, peer_every_steps=2)),
            "checkpoint.peer_every_steps",
        ),
        (
            "ep2",
            replace(WORKLOAD, fine_tuning=FineTuningSpec(freeze=(FrozenPart.ATTENTION,))),
            "train.freeze",
        ),
        ("ep2", replace(WORKLOAD, fine_tuning=FineTuningSpec(task=Task.LORA)), "train.task"),
    ],
)
def test_what_experts_do_not_move_beside_is_refused_by_name(
    text: str, workload: object, field: str
) -> None:
    layout = parse_layout(text, world_size=2)
    moving = replace(workload, rebalance_every=5)  # type: ignore[type-var]
    reasons = unsupported_layout(Job(model=MODEL, workload=moving, layout=layout))
    assert field in {reason.field for reason in reasons}
    assert all(reason.nearest != reason.value for reason in reasons)
