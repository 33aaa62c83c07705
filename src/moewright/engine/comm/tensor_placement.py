"""The placement of tensors: which box of a global tensor lies on this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moewright.engine.comm.mesh import Mesh
from moewright.rules.grid import axis_size
from moewright.rules.shapes.shards import shard_size

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
    for axis, dim in sharding:
        local_shape[dim] = shard_size(global_shape[dim], axis_size(mesh.layout, axis))
        offsets[dim] = mesh.coordinate(axis) * local_shape[dim]
    return TensorPlacement(
        global_shape=global_shape,
        offsets=tuple(offsets),
        local_shape=tuple(local_shape),
        sharding=sharding,
    )
