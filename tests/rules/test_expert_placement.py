"""Expert placements: balanced packing, replicas, and what plans and layouts tell of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moewright.codec import parse_layout
from moewright.rules import expert_placement, routing
from moewright.rules.expert_load import expected_load
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.spec.workload import Routing, Workload
from tiny_jobs import MODEL

HOT = (900, 10, 500, 20, 700, 30, 5, 600)
WORK = Workload(seq_len=32, global_batch=8, load_histogram=(HOT, (1,) * 8))


@st.composite
def loads(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    ep = draw(st.sampled_from((1, 2, 4, 8)))
    local = draw(st.integers(1, 8))
    experts = ep * local
    counts = draw(st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts))
    return tuple(counts), ep


@given(loads())
def test_a_balanced_placement_holds_every_expert_once_and_is_never_worse_than_blocks(
    load: tuple[tuple[int, ...], int],
) -> None:
    counts, ep = load
    slots = expert_placement.place_balanced(counts, ep)
    assert sorted(slots) == list(range(len(counts)))
    slot_loads = expert_placement.balanced_slot_loads(counts, ep)
    contiguous = expert_placement.rank_load_factor(counts, ep)
    assert expert_placement.rank_load_factor(slot_loads, ep) <= contiguous
    if sum(counts):
        # Greedy by size: the hottest rank is over the mean by no more than one expert's load,
        # unless contiguous blocks were better.
        bound = sum(counts) / ep + max(counts)
        if slots == tuple(range(len(counts))):
            bound = max(bound, max(counts) * len(counts))
        assert max(expert_placement.rank_loads(slot_loads, ep)) <= bound


@given(loads(), st.integers(1, 3))
def test_replicas_fill_every_slot_and_leave_no_expert_out(
    load: tuple[tuple[int, ...], int], spare: int
) -> None:
    counts, ep = load
    placement = expert_placement.place_with_replicas(counts, ep, spare)
    slots = placement.slots
    assert len(slots) == len(counts) + spare * ep
    assert set(slots) == set(range(len(counts)))
    if sum(counts):
        local = len(slots) // ep
        share = [counts[expert] / slots.count(expert) for expert in slots]
        rank_loads = [sum(share[rank * local : (rank + 1) * local]) for rank in range(ep)]
        assert abs(placement.load_factor - max(rank_loads) * ep / sum(counts)) < 1e-9


@given(loads(), st.integers(1, 3), st.data())
def test_every_replica_gets_what_its_owner_sends_and_every_row_one_slot(
    load: tuple[tuple[int, ...], int], spare: int, data: st.DataObject
) -> None:
    counts, ep = load
    slots = expert_placement.place_with_replicas(counts, ep, spare).slots
    own = len(counts) // ep
    sent = []
    for rank in range(ep):
        exchange = expert_placement.plan_replica_exchange(slots, ep, rank, spare)
        assert all(slot < own for slot in exchange.sent_slots)
        experts = expert_placement.rank_experts(slots, ep, rank)
        sent.append(iter([experts[slot] for slot in exchange.sent_slots]))
        assert exchange.receive_counts == tuple(
            expert_placement.plan_replica_exchange(slots, ep, other, spare).send_counts[rank]
            for other in range(ep)
        )
    # What comes is in the order of owners, and fills the slots in order.
    for rank in range(ep):
        receive = expert_placement.plan_replica_exchange(slots, ep, rank, spare).receive_counts
        assert [next(sent[other]) for other in range(ep) for _ in range(receive[other])] == list(
            expert_placement.rank_experts(slots, ep, rank)[own:]
        )
    sources = [
        data.draw(st.lists(st.integers(0, 50), min_size=len(counts), max_size=len(counts)))
        for _ in range(ep)
    ]
    rows = routing.slot_rows(sources, slots)
    for expert in range(len(counts)):
        slot_rows = [count for slot, count in zip(slots, rows, strict=True) if slot == expert]
        assert sum(slot_rows) == sum(counts[expert] for counts in sources)
        assert max(slot_rows) - min(slot_rows) <= ep  # each source is even but for one row


def test_one_flooded_expert_is_beyond_packing_and_shared_by_replicas() -> None:
    flooded = (1000, 0, 0, 0, 0, 0, 0, 0)
    packed = expert_placement.balanced_slot_loads(flooded, 4)
    assert expert_placement.rank_load_factor(packed, 4) == 4.0
    assert expert_placement.place_with_replicas(flooded, 4, 1).load_factor == 1.0
    assert expert_placement.place_with_replicas((0,) * 8, 4, 1).load_factor == 1.0


def test_a_plan_expects_the_load_of_the_placement_and_says_what_one_would_gain() -> None:
    work = replace(WORK, routing=Routing.MEASURED)
    contiguous = parse_layout("ep2", world_size=2)
    even = parse_layout("ep2,expert_placement=balanced", world_size=2)
    replicas = replace(even, spare=2)
    load_factors = [
        expected_load(Job(model=MODEL, workload=work, layout=layout)).step
        for layout in (replicas, even, contiguous)
    ]
    assert load_factors[0] < load_factors[1] < load_factors[2]
    assert load_factors[2] == (1430 / 1382.5 + 1) / 2
    # The first rank's own experts come first; then two replicas of the other rank's.
    assert expert_placement.slot_experts(Job(model=MODEL, workload=WORK, layout=replicas), 2)[
        :4
    ] == (0, 1, 2, 3)
    assert expert_placement.slot_experts(Job(model=MODEL, workload=WORK, layout=even), 2) == tuple(
        range(8)
    )  # even already
    assert "1.02 x the mean in contiguous blocks" in expert_placement.describe_placements(WORK, 2)


def test_a_placement_needs_ranks_and_a_load() -> None:
    even = parse_layout("ep2,expert_placement=balanced", world_size=2)
    assert check_legality(Job(model=MODEL, workload=WORK, layout=even)) == ()
    (reason,) = check_legality(
        Job(model=MODEL, workload=replace(WORK, load_histogram=()), layout=even)
    )
    assert "load_histogram" in reason.rule
    (reason,) = check_legality(
        Job(model=MODEL, workload=replace(WORK, load_histogram=(HOT,)), layout=even)
    )
    assert reason.field == "workload.load_histogram"
    (reason,) = check_legality(Job(model=MODEL, workload=WORK, layout=replace(even, ep=1)))
    assert reason.rule == "needs ep > 1"
    assert check_legality(Job(model=MODEL, workload=WORK, layout=replace(even, spare=4))) == ()
    (reason,) = check_legality(Job(model=MODEL, workload=WORK, layout=replace(even, spare=5)))
    assert (reason.field, reason.nearest) == ("layout.spare", "4")
    (reason,) = check_legality(
        Job(model=MODEL, workload=WORK, layout=parse_layout("ep2,spare1", world_size=2))
    )
    assert (reason.rule, reason.nearest) == ("goes with expert_placement=balanced", "0")
