"""How torch's fully_shard shards the parameters of a rank, and when it moves them (ZeRO-3).

A unit is gathered and reduced at once: the experts of a layer over EDP, the rest of a layer over DP
x CP, and what belongs to no layer. A parameter is sharded along its first dim into parts of
ceil(rows / ranks), of which the last are shorter or empty but padded to the size of the others.
Ranks that hold the same part sum its gradient once a step: those of a TP group for what TP does not
shard, and with shard=N (hybrid sharding: sharded inside blocks of tp * N ranks, replicated across)
those of the other blocks. What would be sharded over one rank lies in flat buffers instead, as
under ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from moewright.rules import grid, shards
from moewright.rules.param import Param
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpGroups:
    """The groups over which a parameter is sharded, and over which its shards are replicated."""

    shard_group: str
    replica_group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpShard:
    """The elements of a parameter that a rank owns, and the padded size of its part."""

    param: Param
    module: Module
    own_numel: int
    padded_numel: int
    replica_group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpUnit:
    """Parameters that are gathered and reduced at once.

    A unit whose `stays_gathered` is set is gathered once a micro-batch, for forward and backward
    together; any other is gathered once for each.
    """

    group: str
    ranks: int
    shards: tuple[FsdpShard, ...]
    stays_gathered: bool

    @property
    def padded_numel(self) -> int:
        return sum(shard.padded_numel for shard in self.shards)

    @property
    def replicated_numel(self) -> dict[str, int]:
        """Elements of this rank's parts by the group that replicates them."""
        sums: dict[str, int] = {}
        for shard in self.shards:
            sums[shard.replica_group] = sums.get(shard.replica_group, 0) + shard.own_numel
        return sums


_GROUPS: Mapping[str, FsdpGroups] = MappingProxyType(
    {
        "dp_cp": FsdpGroups(shard_group="dp_cp", replica_group="copies"),
        "tp_cp_dp": FsdpGroups(shard_group="dp_cp", replica_group="tp"),
        "edp": FsdpGroups(shard_group="edp", replica_group="edp_copies"),
    }
)
_HYBRID_GROUPS: Mapping[str, FsdpGroups] = MappingProxyType(
    {
        "dp_cp": FsdpGroups(shard_group="shard", replica_group="copies"),
        "tp_cp_dp": FsdpGroups(shard_group="shard", replica_group="tp_copies"),
        "edp": FsdpGroups(shard_group="edp_shard", replica_group="edp_copies"),
    }
)


def fsdp_groups(layout: Layout, group: str) -> FsdpGroups:
    """Return the groups of a parameter whose gradients `group` sums (rules.shards)."""
    groups = _HYBRID_GROUPS if layout.shard else _GROUPS
    return groups[group]


def is_fsdp_sharded(layout: Layout, group: str) -> bool:
    """Return whether parameters whose gradients `group` sums are sharded at all."""
    return layout.zero == 3 and grid.group_size(layout, fsdp_groups(layout, group).shard_group) > 1


def state_group(layout: Layout, group: str) -> str:
    """Return the group that shares the states of parameters whose gradients `group` sums.

    It is the same whether fully_shard or flat buffers hold them.
    """
    return fsdp_groups(layout, group).shard_group if layout.shard else group


def momentum_group(layout: Layout, group: str) -> str | None:
    """Return the group that shards the optimizer state of matrices whose gradients `group` sums.

    None where every rank has all of it.
    """
    if layout.zero == 0:
        return None
    return fsdp_groups(layout, group).shard_group if is_fsdp_sharded(layout, group) else group


def flat_buffer_layout(layout: Layout) -> Layout:
    """Return the layout that governs parameters in flat buffers: zero=3 leaves these at zero=1."""
    return replace(layout, zero=1, shard=0) if layout.zero == 3 else layout


def fsdp_units(model: ModelSpec, layout: Layout, rank: int) -> tuple[FsdpUnit, ...]:
    """Return the units of a rank; () unless zero=3."""
    members: dict[tuple[str, int], list[tuple[Param, FsdpGroups]]] = {}
    for param in shards.stage_parameters(model, layout, grid.coordinate(layout, rank, "pp")):
        group = shards.gradient_group(param.sharded_dims, layout)
        if is_fsdp_sharded(layout, group):
            groups = fsdp_groups(layout, group)
            unit = (groups.shard_group, _param_layer(model, param))
            members.setdefault(unit, []).append((param, groups))
    return tuple(
        FsdpUnit(
            group=group,
            ranks=grid.group_size(layout, group),
            shards=tuple(_local_shard(param, layout, groups, rank) for param, groups in params),
            stays_gathered=layer < 0,
        )
        for (group, layer), params in members.items()
    )


def _param_layer(model: ModelSpec, param: Param) -> int:
    """Return the layer that a parameter is a part of; -1 for none.

    An MTP depth has a layer beside its norms and projection.
    """
    is_in_depth_layer = param.layer > model.layers and ".layer." in param.name
    is_in_layer = 0 <= param.layer < model.layers or is_in_depth_layer
    return param.layer if is_in_layer else -1


def _local_shard(param: Param, layout: Layout, groups: FsdpGroups, rank: int) -> FsdpShard:
    rows, *rest = shards.local_shape(param, layout)
    part = shards.shard_size(rows, grid.group_size(layout, groups.shard_group))
    first = grid.group_ranks(layout, groups.shard_group, rank).index(rank) * part
    own = max(0, min(part, rows - first))
    return FsdpShard(
        param=param,
        module=param.module,
        own_numel=own * prod(rest),
        padded_numel=part * prod(rest),
        replica_group=groups.replica_group,
    )
