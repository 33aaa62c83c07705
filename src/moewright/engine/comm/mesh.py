"""The mesh: the two rank grids of parallel folding as named process groups, passed explicitly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from moewright.engine.comm.collectives import Group, TensorParallel, create_process_groups
from moewright.engine.comm.tape import Tape
from moewright.engine.observe.counters import Counters
from moewright.rules.grid import GROUPS, all_groups, axis_size, coordinate, group_ranks
from moewright.rules.shapes.shards import shard_size
from moewright.spec.layout import Layout, Overlap

# The placement of tensors: which box of a global tensor lies on this rank.

# (mesh axis, tensor dim) pairs; over an axis that is not named every rank has a full copy.
Sharding = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlacement:
    """The box of a global tensor that a local one holds: the box at `offsets`, then padding.

    With `row_indices` the local tensor holds these rows of the first dim, instead of the rows from
    offsets[0] on.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    sharding: Sharding
    row_indices: tuple[int, ...] = ()

    def split_rows(self) -> tuple[TensorPlacement, ...]:
        """Split a placement that has `row_indices` into placements of one row each."""
        local = (1, *self.local_shape[1:])
        return tuple(
            replace(self, offsets=(row, *self.offsets[1:]), local_shape=local, row_indices=())
            for row in self.row_indices
        )

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """The shape of the part that is not padding; a dim may be 0."""
        dims = zip(self.global_shape, self.offsets, self.local_shape, strict=True)
        return tuple(max(0, min(size, extent - offset)) for extent, offset, size in dims)


def place_tensor(mesh: Mesh, global_shape: tuple[int, ...], sharding: Sharding) -> TensorPlacement:
    """Place a tensor in equal shards, the last ones padded where an axis does not divide a dim."""
    local_shape = list(global_shape)
    offsets = [0] * len(global_shape)
    # Each axis cuts a whole dim, so that a sharding names a dim once at most.
    for axis, dim in sharding:
        local_shape[dim] = shard_size(global_shape[dim], axis_size(mesh.layout, axis))
        offsets[dim] = mesh.coordinate(axis) * local_shape[dim]
    return TensorPlacement(
        global_shape=global_shape,
        offsets=tuple(offsets),
        local_shape=tuple(local_shape),
        sharding=sharding,
    )


# The groups over which dispatchers exchange rows.
_ROW_GROUPS = ("ep", "ep_near", "ep_far")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This rank's place in both grids.

    `groups` are in the order of rules.grid.GROUPS. `upstream` is the pipeline group once more, for
    messages to lower ranks: on NCCL the messages of a pair of ranks over one group run in order,
    whichever direction they go, so each direction has a group of its own. `row_groups` are the
    expert groups once more where rows travel beside other work, so that no other call over the
    same ranks waits for them; else they are the same groups. `shared_table_groups`
    maps the pipeline ranks that hold a table in common to the group of those ranks in this rank's
    pipeline, or of this rank alone where it is not among them.
    """

    layout: Layout
    rank: int
    groups: tuple[Group, ...]
    upstream: Group
    row_groups: tuple[Group, ...]
    shared_table_groups: Mapping[tuple[int, ...], Group]
    tape: Tape  # of all groups

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def row_group(self, name: str) -> Group:
        """Return the group over which rows travel to experts and back."""
        return next(group for group in self.row_groups if group.name == name)

    @property
    def tensor_parallel(self) -> TensorParallel:
        return TensorParallel(
            group=self.group("tp"),
            sequence_parallel=self.layout.sp,
            is_pipelined=Overlap.TP in self.layout.overlap,
        )

    def coordinate(self, axis: str) -> int:
        return coordinate(self.layout, self.rank, axis)


CreateGroups = Callable[[Sequence[tuple[int, ...]], int], dist.ProcessGroup | None]


def build_mesh(
    layout: Layout,
    rank: int,
    counters: Counters,
    tables: Collection[tuple[int, ...]] = (),
    create_groups: CreateGroups = create_process_groups,
) -> Mesh:
    """Create every group of more than one rank; names over the same ranks share a process group.

    `tables`: pipeline ranks that hold some table in common (rules.shapes.shards).
    """
    tape = Tape()
    handles: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def group(name: str, ranks: tuple[int, ...], partition: tuple[tuple[int, ...], ...]) -> Group:
        # It is the same on all ranks, which have to create the same groups in the same order.
        if max(map(len, partition)) > 1 and partition not in handles:
            handles[partition] = create_groups(partition, rank)
        return Group(
            name=name,
            ranks=ranks,
            index=ranks.index(rank),
            handle=handles.get(partition),
            counters=counters,
            tape=tape,
        )

    groups = [
        group(name, group_ranks(layout, name, rank), all_groups(layout, name)) for name in GROUPS
    ]
    pipelines = all_groups(layout, "pp")
    pipeline = next(ranks for ranks in pipelines if rank in ranks)
    # Not by `group`, which would take the handle of the pipeline group again.
    upstream = Group(
        name="pp",
        ranks=pipeline,
        index=pipeline.index(rank),
        handle=create_groups(pipelines, rank) if layout.pp > 1 else None,
        counters=counters,
        tape=tape,
    )
    row_groups = [group for group in groups if group.name in _ROW_GROUPS]
    if Overlap.EP in layout.overlap:
        row_groups = [
            replace(group, handle=create_groups(all_groups(layout, group.name), rank))
            for group in row_groups
            if group.size > 1
        ]
    shared_table_groups = {}
    # Sorted: creating a process group is a call of all ranks, in one order.
    for pp_ranks in sorted(set(tables)):
        partition = tuple(tuple(ranks[pp_rank] for pp_rank in pp_ranks) for ranks in pipelines)
        own_ranks = next((ranks for ranks in partition if rank in ranks), (rank,))
        # All ranks create it, also those that are in none of its parts.
        shared_table_groups[pp_ranks] = group("pp", own_ranks, partition)
    return Mesh(
        layout=layout,
        rank=rank,
        groups=tuple(groups),
        upstream=upstream,
        row_groups=tuple(row_groups),
        shared_table_groups=shared_table_groups,
        tape=tape,
    )
