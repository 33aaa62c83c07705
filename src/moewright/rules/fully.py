"""What torch's fully_shard cuts of the parameters of a rank, and when it moves them (ZeRO-3).

A unit is gathered and reduced at once: the experts of a layer over EDP, the rest of a layer over DP x CP, and what
belongs to no layer. A parameter is cut along its first dim into parts of ceil(rows / ranks), of which the last are
shorter or empty but take the room of a whole one. A group of one rank cuts nothing: those parameters are in flat
buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moewright.rules import grid, shards
from moewright.rules.inventory import Param
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Elements of a parameter that a rank owns, and that its part has room for."""

    module: Module
    own: int
    room: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """`stays`: gathered once a micro-batch, for forward and backward, instead of once for each."""

    group: str
    ranks: int
    cuts: tuple[Cut, ...]
    stays: bool

    @property
    def room(self) -> int:
        return sum(cut.room for cut in self.cuts)


def units(model: ModelSpec, layout: Layout, rank: int) -> tuple[Unit, ...]:
    """The units of a rank; () unless zero=3."""
    if layout.zero != 3:
        return ()
    members: dict[tuple[str, int], list[Param]] = {}
    for param in shards.parameters_of(model, layout, grid.coordinate(layout, rank, "pp")):
        group = shards.gradient_group(param.shard, layout)
        if grid.group_size(layout, group) > 1:
            layer = param.layer if 0 <= param.layer < model.layers else -1
            members.setdefault((group, layer), []).append(param)
    return tuple(
        Unit(
            group=group,
            ranks=grid.group_size(layout, group),
            cuts=tuple(_cut(param, layout, group, rank) for param in params),
            stays=layer < 0,
        )
        for (group, layer), params in members.items()
    )


def _cut(param: Param, layout: Layout, group: str, rank: int) -> Cut:
    rows, *rest = shards.local_shape(param, layout)
    part = shards.even_part(rows, grid.group_size(layout, group))
    first = grid.group_ranks(layout, group, rank).index(rank) * part
    own = max(0, min(part, rows - first))
    return Cut(module=param.module, own=own * prod(rest), room=part * prod(rest))
