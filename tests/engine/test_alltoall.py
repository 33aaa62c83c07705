"""What the dispatcher knows of a forced load without looking is what it would have counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAllDispatcher
from moewright.engine.dispatch.dedup import DedupDispatcher, mask_repeats
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.model.moe import SlotAssigner
from moewright.engine.observe.counters import Counters
from moewright.rules.routing import round_robin_counts, slot_rows


def build_group(name: str, ranks: tuple[int, ...], index: int) -> Group:
    return Group(name=name, ranks=ranks, index=index, handle=None, counters=Counters())


@pytest.mark.parametrize("rank", [0, 2])
def test_rows_of_an_expert_are_dealt_to_its_slots(rank: int) -> None:
    """Rows are dealt as the planner counts them, from what each source has.

    A dropped row goes nowhere.
    """
    slots = (0, 1, 2, 4, 2, 3, 0, 2)
    runtime = SimpleNamespace(
        mesh=SimpleNamespace(coordinate=lambda axis: rank), device=torch.device("cpu")
    )
    assigner = SlotAssigner(runtime, slots, 5)  # type: ignore[arg-type]
    experts = torch.tensor([[2, 5], [0, 2], [2, 3], [5, 0], [2, 4], [0, 2]])
    counts = torch.bincount(experts.flatten(), minlength=6)[:5].tolist()
    assigned = assigner.assign(experts)
    assert assigned.shape == experts.shape
    rows = torch.bincount(assigned.flatten(), minlength=9)
    assert rows[8] == 2  # dropped
    sources = [[0] * 5] * rank + [counts]
    assert tuple(rows[:8].tolist()) == slot_rows(sources, slots)
    assigned_experts = [slots[slot] for slot in assigned[assigned < 8].tolist()]
    assert assigned_experts == experts[experts < 5].tolist()
    sent_counts = torch.cat((rows[:8], torch.tensor([7, 9])))
    assert assigner.sum_by_expert(sent_counts).tolist() == [*counts, 7, 9]


@pytest.mark.parametrize("capacity", [1, 3, 100])
@pytest.mark.parametrize("tokens", [32, 31, 2])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_forced_sizes_are_those_of_experts_in_turn(rank: int, tokens: int, capacity: int) -> None:
    """Each source has tokens of its own places in their sequences."""
    generator = torch.Generator().manual_seed(tokens)
    sources = [
        [torch.randint(64, (tokens,), generator=generator) for _ in range(4)] for _ in range(2)
    ]
    sent = tuple(
        tuple(
            round_robin_counts(tuple(positions.tolist()), 2, 8, max_rows=capacity, ranks=4, nodes=2)
            for positions in group
        )
        for group in sources
    )
    taken = [[_take_in_turn(positions, capacity) for positions in group] for group in sources]

    def count(experts: torch.Tensor, size: int) -> list[int]:
        """Count the tokens of each block of `size` experts."""
        places = 8 // size
        return torch.bincount(
            mask_repeats(experts // size, places).flatten(), minlength=places + 1
        )[:places].tolist()

    def rows(experts: torch.Tensor, to: int) -> int:
        return int((experts // 2 == to).sum())

    ep_group = build_group("ep", (0, 1, 2, 3), rank)
    etp_group = build_group("etp", (0, 1), 1)
    own = taken[1]
    received = [sum(rows(experts, rank) for experts in group) for group in taken]
    alltoall = AllToAllDispatcher(
        ep_group, etp_group, 8, torch_kernels(), forced_counts=None, may_drop=True
    )
    send, receive, etp_rows = alltoall._forced_sizes(sent)
    assert list(send) == [rows(own[rank], to) for to in range(4)]
    assert list(receive) == [rows(experts, rank) for experts in own]
    assert list(etp_rows) == received
    dedup = DedupDispatcher([ep_group], etp_group, 8, torch_kernels(), forced_counts=None)
    sizes = dedup._forced_sizes(sent)
    copies = [[count(experts, 2) for experts in group] for group in taken]
    assert sizes.hops == ((tuple(copies[1][rank]), tuple(c[rank] for c in copies[1])),)
    assert list(sizes.received_copies) == [sum(c[rank] for c in group) for group in copies]
    assert sizes.local_rows == sum(received)
    node, place = divmod(rank, 2)
    far = build_group("ep_far", (place, 2 + place), node)
    near = build_group("ep_near", (2 * node, 2 * node + 1), place)
    two_hops = DedupDispatcher([far, near], etp_group, 8, torch_kernels(), forced_counts=None)
    node_sizes = two_hops._forced_sizes(sent)
    to_nodes = tuple(count(own[rank], 4))
    from_nodes = tuple(count(own[peer], 4)[node] for peer in (place, 2 + place))
    forwarded = [
        [copies[1][other][2 * node + to] + copies[1][2 + other][2 * node + to] for to in range(2)]
        for other in range(2)
    ]
    came = tuple(forwarded[other][place] for other in range(2))
    assert node_sizes.hops == ((to_nodes, from_nodes), (tuple(forwarded[place]), came))
    assert node_sizes.received_copies == sizes.received_copies
    assert node_sizes.local_rows == sizes.local_rows


def _take_in_turn(positions: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return two of eight experts in turn for each position; 8 where one is over its capacity."""
    experts = (2 * positions[:, None] + torch.arange(2)) % 8
    for expert in range(8):
        dropped = (experts.flatten() == expert).nonzero().flatten()[capacity:]
        experts.view(-1)[dropped] = 8
    return experts
