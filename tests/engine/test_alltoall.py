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
    ep_group = build_group("ep", (0, 1, 2, 3), rank)
    etp_group = build_group("etp", (0, 1), 0)
    experts = (torch.arange(tokens * 2) % 8).view(tokens, 2)
    for expert in range(8):
        dropped = (experts.flatten() == expert).nonzero().flatten()[capacity:]
        experts.view(-1)[dropped] = 8
    counts = torch.bincount(experts.flatten(), minlength=9)[:8].view(4, 2).sum(1).tolist()
    copies = torch.bincount(mask_repeats(experts // 2, 4).flatten(), minlength=5)[:4].tolist()
    nodes = torch.bincount(mask_repeats(experts // 4, 2).flatten(), minlength=3)[:2].tolist()
    sent = round_robin_counts(tokens, 2, 8, max_rows=capacity, ranks=4, nodes=2)
    alltoall = AllToAllDispatcher(
        ep_group, etp_group, 8, torch_kernels(), forced_counts=None, may_drop=True
    )
    send, receive, etp_rows = alltoall._forced_sizes(sent.rows)
    assert list(send) == counts
    assert receive == (counts[rank],) * 4
    assert etp_rows == (4 * counts[rank],) * 2
    dedup = DedupDispatcher([ep_group], etp_group, 8, torch_kernels(), forced_counts=None)
    sizes = dedup._forced_sizes(sent)
    assert sizes.hops == ((tuple(copies), (copies[rank],) * 4),)
    assert sizes.received_copies == (4 * copies[rank],) * 2
    assert sizes.local_rows == 8 * counts[rank]
    node, place = divmod(rank, 2)
    far = build_group("ep_far", (place, 2 + place), node)
    near = build_group("ep_near", (2 * node, 2 * node + 1), place)
    two_hops = DedupDispatcher([far, near], etp_group, 8, torch_kernels(), forced_counts=None)
    node_sizes = two_hops._forced_sizes(sent)
    near_send = tuple(2 * copies[2 * node + other] for other in range(2))
    assert node_sizes.hops == (
        (tuple(nodes), (nodes[node],) * 2),
        (near_send, (2 * copies[rank],) * 2),
    )
    assert node_sizes.received_copies == sizes.received_copies
    assert node_sizes.local_rows == sizes.local_rows
