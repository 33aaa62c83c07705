"""What the dispatcher knows of a forced load without looking is what it would have counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAllDispatcher
from moewright.engine.dispatch.dedup import DedupDispatcher, mask_repeats
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.model.moe import SlotAssigner
from moewright.engine.observe.counters import Counters
from moewright.rules.routing import round_robin_counts, slot_rows


@pytest.mark.parametrize("rank", [0, 2])
def test_rows_of_an_expert_are_dealt_to_its_slots(rank: int) -> None:
    """As the planner counts them, from what each source has for an expert; a dropped row goes
    nowhere."""
    slots = (0, 1, 2, 4, 2, 3, 0, 2)
    here = SimpleNamespace(
        mesh=SimpleNamespace(coordinate=lambda axis: rank), device=torch.device("cpu")
    )
    dealer = SlotAssigner(here, slots, 5)  # type: ignore[arg-type]
    chosen = torch.tensor([[2, 5], [0, 2], [2, 3], [5, 0], [2, 4], [0, 2]])
    counts = torch.bincount(chosen.flatten(), minlength=6)[:5].tolist()
    went = dealer.assign(chosen)
    assert went.shape == chosen.shape
    rows = torch.bincount(went.flatten(), minlength=9)
    assert rows[8] == 2  # dropped
    sources = [[0] * 5] * rank + [counts]
    assert tuple(rows[:8].tolist()) == slot_rows(sources, slots)
    assert [slots[slot] for slot in went[went < 8].tolist()] == chosen[chosen < 5].tolist()
    sent = torch.cat((rows[:8], torch.tensor([7, 9])))
    assert dealer.sum_by_expert(sent).tolist() == [*counts, 7, 9]


@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize("tokens", [32, 31, 2])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_known_sizes_are_those_of_experts_in_turn(rank: int, tokens: int, most: int) -> None:
    ep = Group(name="ep", ranks=(0, 1, 2, 3), index=rank, handle=None, counters=Counters())
    etp = Group(name="etp", ranks=(0, 1), index=0, handle=None, counters=Counters())
    chosen = (torch.arange(tokens * 2) % 8).view(tokens, 2)
    for expert in range(8):
        places = (chosen.flatten() == expert).nonzero().flatten()[most:]
        chosen.view(-1)[places] = 8
    counts = torch.bincount(chosen.flatten(), minlength=9)[:8].view(4, 2).sum(1).tolist()
    copies = torch.bincount(mask_repeats(chosen // 2, 4).flatten(), minlength=5)[:4].tolist()
    nodes = torch.bincount(mask_repeats(chosen // 4, 2).flatten(), minlength=3)[:2].tolist()
    sent = round_robin_counts(tokens, 2, 8, most=most, ranks=4, nodes=2)
    send, receive, parts = AllToAllDispatcher(
        ep, etp, 8, TorchKernels(), forced_counts=None, may_drop=True
    )._forced_sizes(sent.rows)
    assert list(send) == counts
    assert receive == (counts[rank],) * 4
    assert parts == (4 * counts[rank],) * 2
    sizes = DedupDispatcher([ep], etp, 8, TorchKernels(), forced_counts=None)._forced_sizes(sent)
    assert sizes.hops == ((tuple(copies), (copies[rank],) * 4),)
    assert (sizes.received_copies, sizes.local_rows) == ((4 * copies[rank],) * 2, 8 * counts[rank])
    node, place = divmod(rank, 2)
    far = Group(
        name="ep_far", ranks=(place, 2 + place), index=node, handle=None, counters=Counters()
    )
    near = Group(
        name="ep_near",
        ranks=(2 * node, 2 * node + 1),
        index=place,
        handle=None,
        counters=Counters(),
    )
    over = DedupDispatcher([far, near], etp, 8, TorchKernels(), forced_counts=None)._forced_sizes(
        sent
    )
    to_ranks = tuple(2 * copies[2 * node + other] for other in range(2))
    assert over.hops == ((tuple(nodes), (nodes[node],) * 2), (to_ranks, (2 * copies[rank],) * 2))
    assert (over.received_copies, over.local_rows) == (sizes.received_copies, sizes.local_rows)
