"""What torch's fully_shard cuts of the parameters of a rank, and when it moves them (ZeRO-3).

A unit is gathered and reduced at once: the experts of a layer over EDP, the rest of a layer over DP
x CP, and what belongs to no layer. A parameter is cut along its first dim into parts of ceil(rows /
ranks), of which the last are shorter or empty but take the room of a whole one. Ranks that hold the
same part sum its gradient once a step: those of a TP group for what TP does not cut, and with
shard=N (hybrid sharding: cut inside blocks of tp * N ranks, copied across) those of the other
blocks. What would be cut over one rank lies in flat buffers instead, as under ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from moewright.rules import grid, shards
from moewright.rules.parameters import Param
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Over which groups a parameter lies: in parts over `cut`, each part the same on the ranks of
    `copies`."""

    cut: str
    copies: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Elements of a parameter that a rank owns, and that its part has room for; `copies` as in
    Spread."""

    module: Module
    own: int
    room: int
    copies: str


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

    @property
    def copied(self) -> dict[str, int]:
        """Elements of this rank's parts by the group that holds them in copies."""
        sums: dict[str, int] = {}
        for cut in self.cuts:
            sums[cut.copies] = sums.get(cut.copies, 0) + cut.own
        return sums


_SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
        "dp_cp": Spread(cut="dp_cp", copies="copies"),
        "tp_cp_dp": Spread(cut="dp_cp", copies="tp"),
        "edp": Spread(cut="edp", copies="edp_copies"),
    }
)
_HYBRID_SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
        "dp_cp": Spread(cut="shard", copies="copies"),
        "tp_cp_dp": Spread(cut="shard", copies="tp_copies"),
        "edp": Spread(cut="edp_shard", copies="edp_copies"),
    }
)


def spread(layout: Layout, group: str) -> Spread:
    """How a parameter lies whose gradients `group` sums (rules.shards)."""
    return (_HYBRID_SPREADS if layout.shard else _SPREADS)[group]


def cuts(layout: Layout, group: str) -> bool:
    """Whether it is cut at all."""
    return layout.zero == 3 and grid.group_size(layout, spread(layout, group).cut) > 1


def states_group(layout: Layout, group: str) -> str:
    """The group that shares the states of parameters whose gradients `group` sums, whatever engine
    holds them."""
    return spread(layout, group).cut if layout.shard else group


def flat_layout(layout: Layout) -> Layout:
    """The layout as the parameters in flat buffers see it."""
    return replace(layout, zero=1, shard=0) if layout.zero == 3 else layout


def units(model: ModelSpec, layout: Layout, rank: int) -> tuple[Unit, ...]:
    """The units of a rank; () unless zero=3."""
    members: dict[tuple[str, int], list[tuple[Param, Spread]]] = {}
    for param in shards.parameters_of(model, layout, grid.coordinate(layout, rank, "pp")):
        group = shards.gradient_group(param.shard, layout)
        if cuts(layout, group):
            lies = spread(layout, group)
            members.setdefault((lies.cut, _layer(model, param)), []).append((param, lies))
    return tuple(
        Unit(
            group=group,
            ranks=grid.group_size(layout, group),
            cuts=tuple(_cut(param, layout, lies, rank) for param, lies in params),
            stays=layer < 0,
        )
        for (group, layer), params in members.items()
    )


def _layer(model: ModelSpec, param: Param) -> int:
    """The layer that a parameter is a part of, -1 for none; an MTP depth has one beside its norms
    and projection."""
    in_depth = param.layer > model.layers and ".layer." in param.name
    return param.layer if 0 <= param.layer < model.layers or in_depth else -1


def _cut(param: Param, layout: Layout, lies: Spread, rank: int) -> Cut:
    rows, *rest = shards.local_shape(param, layout)
    part = shards.even_part(rows, grid.group_size(layout, lies.cut))
    first = grid.group_ranks(layout, lies.cut, rank).index(rank) * part
    own = max(0, min(part, rows - first))
    return Cut(
        module=param.module, own=own * prod(rest), room=part * prod(rest), copies=lies.copies
    )
