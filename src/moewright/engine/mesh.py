"""Mesh: the two rank grids of parallel folding as named process groups, passed explicitly."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from moewright.engine.books import Books
from moewright.engine.collectives import Group, TensorParallel, new_handles
from moewright.rules.grid import GROUPS, all_groups, coordinate, group_ranks
from moewright.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This rank's place in both grids. `groups` are in the order of rules.grid.GROUPS."""

    layout: Layout
    rank: int
    groups: tuple[Group, ...]

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    @property
    def tensor(self) -> TensorParallel:
        return TensorParallel(group=self.group("tp"), sequence=self.layout.sp)

    def coordinate(self, axis: str) -> int:
        return coordinate(self.layout, self.rank, axis)


def build_mesh(layout: Layout, rank: int, books: Books) -> Mesh:
    """Make every group of more than one rank; names over the same ranks share one process group."""
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
    groups = []
    for name in GROUPS:
        ranks = group_ranks(layout, name, rank)
        handle = None
        if len(ranks) > 1:
            partition = all_groups(layout, name)
            if partition not in made:
                made[partition] = new_handles(partition, rank)
            handle = made[partition]
        groups.append(Group(name=name, ranks=ranks, index=ranks.index(rank), handle=handle, books=books))
    return Mesh(layout=layout, rank=rank, groups=tuple(groups))
