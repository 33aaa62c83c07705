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
class FsdpGroups:
    """Over which groups a parameter lies: in parts over `cut`, each part the same on the ranks of
    `copies`."""

    shard_group: str
    replica_group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpShard:
    """Elements of a parameter that a rank owns, and that its part has room for; `copies` as in
    Spread."""

    module: Module
    own_numel: int
    padded_numel: int
    replica_group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpUnit:
    """`stays`: gathered once a micro-batch, for forward and backward, instead of once for each."""

    group: str
    ranks: int
    shards: tuple[FsdpShard, ...]
    stays_gathered: bool

    @property
    def padded_numel(self) -> int:
        return sum(cut.padded_numel for cut in self.shards)

    @property
    def replicated_numel(self) -> dict[str, int]:
        """Elements of this rank's parts by the group that holds them in copies."""
        sums: dict[str, int] = {}
        for cut in self.shards:
            sums[cut.replica_group] = sums.get(cut.replica_group, 0) + cut.own_numel
        return sums


_SPREADS: Mapping[str, FsdpGroups] = MappingProxyType(
    {
        "dp_cp": FsdpGroups(shard_group="dp_cp", replica_group="copies"),
        "tp_cp_dp": FsdpGroups(shard_group="dp_cp", replica_group="tp"),
        "edp": FsdpGroups(shard_group="edp", replica_group="edp_copies"),
    }
)
_HYBRID_SPREADS: Mapping[str, FsdpGroups] = MappingProxyType(
    {
        "dp_cp": FsdpGroups(shard_group="shard", replica_group="copies"),
        "tp_cp_dp": FsdpGroups(shard_group="shard", replica_group="tp_copies"),
        "edp": FsdpGroups(shard_group="edp_shard", replica_group="edp_copies"),
    }
)


def fsdp_groups(layout: Layout, group: str) -> FsdpGroups:
    """How a parameter lies whose gradients `group` sums (rules.shards)."""
    return (_HYBRID_SPREADS if layout.shard else _SPREADS)[group]


def is_fsdp_sharded(layout: Layout, group: str) -> bool:
    """Whether it is cut at all."""
    return layout.zero == 3 and grid.group_size(layout, fsdp_groups(layout, group).shard_group) > 1


def state_group(layout: Layout, group: str) -> str:
    """The group that shares the states of parameters whose gradients `group` sums, whatever engine
    holds them."""
    return fsdp_groups(layout, group).shard_group if layout.shard else group


def flat_buffer_layout(layout: Layout) -> Layout:
    """The layout as the parameters in flat buffers see it."""
    return replace(layout, zero=1, shard=0) if layout.zero == 3 else layout


def fsdp_units(model: ModelSpec, layout: Layout, rank: int) -> tuple[FsdpUnit, ...]:
    """The units of a rank; () unless zero=3."""
    members: dict[tuple[str, int], list[tuple[Param, FsdpGroups]]] = {}
    for param in shards.stage_parameters(model, layout, grid.coordinate(layout, rank, "pp")):
        group = shards.gradient_group(param.sharded_dims, layout)
        if is_fsdp_sharded(layout, group):
            lies = fsdp_groups(layout, group)
            members.setdefault((lies.shard_group, _layer(model, param)), []).append((param, lies))
    return tuple(
        FsdpUnit(
            group=group,
            ranks=grid.group_size(layout, group),
            shards=tuple(_cut(param, layout, lies, rank) for param, lies in params),
            stays_gathered=layer < 0,
        )
        for (group, layer), params in members.items()
    )


def _layer(model: ModelSpec, param: Param) -> int:
    """The layer that a parameter is a part of, -1 for none; an MTP depth has one beside its norms
    and projection."""
    in_depth = param.layer > model.layers and ".layer." in param.name
    return param.layer if 0 <= param.layer < model.layers or in_depth else -1


def _cut(param: Param, layout: Layout, lies: FsdpGroups, rank: int) -> FsdpShard:
    rows, *rest = shards.local_shape(param, layout)
    part = shards.shard_size(rows, grid.group_size(layout, lies.shard_group))
    first = grid.group_ranks(layout, lies.shard_group, rank).index(rank) * part
    own = max(0, min(part, rows - first))
    return FsdpShard(
        module=param.module,
        own_numel=own * prod(rest),
        padded_numel=part * prod(rest),
        replica_group=lies.replica_group,
    )
