"""What the dispatcher knows of a forced load without looking is what it would have counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAll
from moewright.engine.dispatch.dedup import Dedup, first_of_each
from moewright.engine.kernels.fused.reference import Plain
from moewright.engine.model.moe import Slots
from moewright.engine.observe.counters import Books
from moewright.rules.routing import in_turn, slot_rows


@pytest.mark.parametrize("rank", [0, 2])
def test_rows_of_an_expert_are_dealt_to_its_slots(rank: int) -> None:
    """As the planner counts them, from what each source has for an expert; a dropped row goes
    nowhere."""
    slots = (0, 1, 2, 4, 2, 3, 0, 2)
    here = SimpleNamespace(
        mesh=SimpleNamespace(coordinate=lambda axis: rank), device=torch.device("cpu")
    )
    dealer = Slots(here, slots, 5)  # type: ignore[arg-type]
    chosen = torch.tensor([[2, 5], [0, 2], [2, 3], [5, 0], [2, 4], [0, 2]])
    counts = torch.bincount(chosen.flatten(), minlength=6)[:5].tolist()
    went = dealer.of(chosen)
    assert went.shape == chosen.shape
    rows = torch.bincount(went.flatten(), minlength=9)
    assert rows[8] == 2  # dropped
    sources = [[0] * 5] * rank + [counts]
    assert tuple(rows[:8].tolist()) == slot_rows(sources, slots)
    assert [slots[slot] for slot in went[went < 8].tolist()] == chosen[chosen < 5].tolist()
    sent = torch.cat((rows[:8], torch.tensor([7, 9])))
    assert dealer.by_expert(sent).tolist() == [*counts, 7, 9]


@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize("tokens", [32, 31, 2])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_known_sizes_are_those_of_experts_in_turn(rank: int, tokens: int, most: int) -> None:
    ep = Group(name="ep", ranks=(0, 1, 2, 3), index=rank, handle=None, books=Books())
    etp = Group(name="etp", ranks=(0, 1), index=0, handle=None, books=Books())
    chosen = (torch.arange(tokens * 2) % 8).view(tokens, 2)
    for expert in range(8):
        places = (chosen.flatten() == expert).nonzero().flatten()[most:]
        chosen.view(-1)[places] = 8
    counts = torch.bincount(chosen.flatten(), minlength=9)[:8].view(4, 2).sum(1).tolist()
    copies = torch.bincount(first_of_each(chosen // 2, 4).flatten(), minlength=5)[:4].tolist()
    nodes = torch.bincount(first_of_each(chosen // 4, 2).flatten(), minlength=3)[:2].tolist()
    sent = in_turn(tokens, 2, 8, most=most, ranks=4, nodes=2)
    send, receive, parts = AllToAll(ep, etp, 8, Plain(), known=None, drops=True)._known_sizes(
        sent.rows
    )
    assert list(send) == counts
    assert receive == (counts[rank],) * 4
    assert parts == (4 * counts[rank],) * 2
    sizes = Dedup([ep], etp, 8, Plain(), known=None)._known_sizes(sent)
    assert sizes.legs == ((tuple(copies), (copies[rank],) * 4),)
    assert (sizes.parts, sizes.rows) == ((4 * copies[rank],) * 2, 8 * counts[rank])
    node, place = divmod(rank, 2)
    far = Group(name="ep_far", ranks=(place, 2 + place), index=node, handle=None, books=Books())
    near = Group(
        name="ep_near", ranks=(2 * node, 2 * node + 1), index=place, handle=None, books=Books()
    )
    over = Dedup([far, near], etp, 8, Plain(), known=None)._known_sizes(sent)
    to_ranks = tuple(2 * copies[2 * node + other] for other in range(2))
    assert over.legs == ((tuple(nodes), (nodes[node],) * 2), (to_ranks, (2 * copies[rank],) * 2))
    assert (over.parts, over.rows) == (sizes.parts, sizes.rows)
