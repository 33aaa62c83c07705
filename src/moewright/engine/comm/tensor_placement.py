"""Placement: which box of a global tensor lies on this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moewright.engine.comm.mesh import Mesh
from moewright.rules.grid import axis_size
from moewright.rules.shards import shard_size

Sharding = tuple[
    tuple[str, int], ...
]  # (mesh axis, tensor dim) pairs; an axis that is not named holds a full copy


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlacement:
    """A tensor of shape `local` holds the box at `offsets` of one of shape `whole`, and after it
    padding.

    With `rows` it holds these rows of the first dim instead of those from offsets[0] on.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    sharding: Sharding
    row_indices: tuple[int, ...] = ()

    def split_rows(self) -> tuple[TensorPlacement, ...]:
        """A tensor of given rows as tensors of one row each."""
        local = (1, *self.local_shape[1:])
        return tuple(
            replace(self, offsets=(row, *self.offsets[1:]), local_shape=local, row_indices=())
            for row in self.row_indices
        )

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """Shape of the part that is not padding; a dim may be 0."""
        bounds = zip(self.global_shape, self.offsets, self.local_shape, strict=True)
        return tuple(max(0, min(size, extent - offset)) for extent, offset, size in bounds)


def place_tensor(mesh: Mesh, whole: tuple[int, ...], cuts: Sharding) -> TensorPlacement:
    """Equal parts of each cut dim, the last ones padded where the axis does not divide it."""
    local, offsets = list(whole), [0] * len(whole)
    for axis, dim in cuts:
        local[dim] = shard_size(whole[dim], axis_size(mesh.layout, axis))
        offsets[dim] = mesh.coordinate(axis) * local[dim]
    return TensorPlacement(
        global_shape=whole, offsets=tuple(offsets), local_shape=tuple(local), sharding=cuts
    )
