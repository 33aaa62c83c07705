"""Placement: which box of a global tensor lies on this rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moewright.engine.comm.mesh import Mesh
from moewright.rules.grid import axis_size
from moewright.rules.shards import even_part

Cuts = tuple[
    tuple[str, int], ...
]  # (mesh axis, tensor dim) pairs; an axis that is not named holds a full copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A tensor of shape `local` holds the box at `offsets` of one of shape `whole`, and after it
    padding.

    With `rows` it holds these rows of the first dim instead of those from offsets[0] on.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    local: tuple[int, ...]
    cuts: Cuts
    rows: tuple[int, ...] = ()

    def apart(self) -> tuple[Placement, ...]:
        """A tensor of given rows as tensors of one row each."""
        local = (1, *self.local[1:])
        return tuple(
            replace(self, offsets=(row, *self.offsets[1:]), local=local, rows=())
            for row in self.rows
        )

    @property
    def inside(self) -> tuple[int, ...]:
        """Shape of the part that is not padding; a dim may be 0."""
        bounds = zip(self.whole, self.offsets, self.local, strict=True)
        return tuple(max(0, min(size, extent - offset)) for extent, offset, size in bounds)


def place(mesh: Mesh, whole: tuple[int, ...], cuts: Cuts) -> Placement:
    """Equal parts of each cut dim, the last ones padded where the axis does not divide it."""
    local, offsets = list(whole), [0] * len(whole)
    for axis, dim in cuts:
        local[dim] = even_part(whole[dim], axis_size(mesh.layout, axis))
        offsets[dim] = mesh.coordinate(axis) * local[dim]
    return Placement(whole=whole, offsets=tuple(offsets), local=tuple(local), cuts=cuts)
