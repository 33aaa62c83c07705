"""What the dispatcher knows of a forced load without looking is what it would have counted."""

from __future__ import annotations

import pytest
import torch

from moewright.engine.books import Books
from moewright.engine.collectives import Group
from moewright.engine.dispatch.alltoall import AllToAll


@pytest.mark.parametrize("rows", [64, 61, 3, 0])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_even_sizes_are_those_of_experts_in_turn(rank: int, rows: int) -> None:
    ep = Group(name="ep", ranks=(0, 1, 2, 3), index=rank, handle=None, books=Books())
    etp = Group(name="etp", ranks=(0, 1), index=0, handle=None, books=Books())
    counts = torch.bincount(torch.arange(rows) % 8, minlength=8).view(4, 2).sum(1).tolist()
    send, receive, parts = AllToAll(ep, etp, 8, even=True, drops=False)._even_sizes(rows)
    assert list(send) == counts
    assert receive == (counts[rank],) * 4
    assert parts == (4 * counts[rank],) * 2
