"""How torch's fully_shard shards the parameters of a rank, and when it moves them (ZeRO-2 and -3).

A unit is gathered and reduced at once: the experts of a layer over EDP, the rest of a layer over DP
x CP, and what belongs to no layer. A parameter is sharded along its first dim into parts of
ceil(rows / ranks), of which the last are shorter or empty but padded to the size of the others.
Ranks that hold the same part sum its gradient once a step: those of a TP group for what TP does not
shard, and with shard=N (hybrid sharding: sharded inside blocks of tp * N ranks, replicated across)
those of the other blocks. What would be sharded over one rank lies in flat buffers instead, as
under ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from moewright.rules import grid
from moewright.rules.shapes import shards
from moewright.rules.shapes.param import Param
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout, Offload
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpGroups:
    """The groups over which a parameter is sharded, and over which its shards are replicated."""

    shard_group: str
    replica_group: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardElements:
    """Elements of a parameter that so many ranks share: a rank's own, its padded part, all."""

    ranks: int
    own: int
    padded: int
    whole: int  # before it is sharded

    @property
    def padding(self) -> int:
        """Elements that all ranks' parts have more than the parameter."""
        return self.ranks * self.padded - self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpShard:
    """A rank's part of a parameter."""

    param: Param
    module: Module
    elements: ShardElements
    replica_group: str
    holders: tuple[int, ...]  # pipeline ranks that hold the parameter, where there are several
    chunks: tuple[int, ...]  # the rank's model chunks that use it


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpUnit:
    """Parameters that are gathered and reduced at once.

    The root belongs to no layer. Under zero=3 it is gathered for every pass of the rank, whatever
    chunk it is of, and freed after a backward; any other unit is gathered for each pass through it.
    """

    group: str
    ranks: int
    shards: tuple[FsdpShard, ...]
    is_root: bool

    @property
    def padded_numel(self) -> int:
        return sum(shard.elements.padded for shard in self.shards)

    @property
    def filled_numel(self) -> int:
        """Elements of all ranks' parts, filled up to one size: what is gathered or scattered."""
        return self.ranks * self.padded_numel

    @property
    def replicated_numel(self) -> dict[str, int]:
        """Elements of this rank's parts by the group that replicates them."""
        sums: dict[str, int] = {}
        for shard in self.shards:
            sums[shard.replica_group] = sums.get(shard.replica_group, 0) + shard.elements.own
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
    """Return the groups of a parameter whose gradients `group` sums (rules.shapes.shards)."""
    groups = _HYBRID_GROUPS if layout.shard else _GROUPS
    return groups[group]


def is_fsdp_sharded(layout: Layout, group: str) -> bool:
    """Return whether parameters whose gradients `group` sums are sharded at all."""
    group_size = grid.group_size(layout, fsdp_groups(layout, group).shard_group)
    return layout.zero >= 2 and group_size > 1


def state_group(layout: Layout, group: str) -> str:
    """Return the group that shares the states of parameters whose gradients `group` sums.

    It is the same whether fully_shard or flat buffers hold them.
    """
    if layout.shard:
        return fsdp_groups(layout, group).shard_group
    return group


def momentum_group(layout: Layout, group: str) -> str | None:
    """Return the group that shards the optimizer state of matrices whose gradients `group` sums.

    None where every rank has all of it.
    """
    if layout.zero == 0:
        return None
    is_sharded = is_fsdp_sharded(layout, group)
    if is_sharded:
        return fsdp_groups(layout, group).shard_group
    return state_group(flat_buffer_layout(layout), group)


def flat_buffer_layout(layout: Layout) -> Layout:
    """Return the layout of flat buffers: what fully_shard leaves stays at zero=1."""
    if layout.zero >= 2:
        return replace(layout, zero=1, shard=0)
    return layout


def offloaded_names(layout: Layout, units: Sequence[FsdpUnit]) -> frozenset[str]:
    """Return the parameters whose sharded weights, gradients and moments lie in host memory.

    With a part of the optimizer offloaded they are those of the first units that make it up: a unit
    is moved whole.
    """
    if Offload.OPTIMIZER not in layout.offload:
        return frozenset()
    wanted = layout.offload_fraction * sum(unit.padded_numel for unit in units)
    names: set[str] = set()
    moved = 0
    for unit in units:
        if moved >= wanted:
            break
        moved += unit.padded_numel
        names |= {shard.param.name for shard in unit.shards}
    return frozenset(names)


def fsdp_units(model: ModelSpec, layout: Layout, rank: int) -> tuple[FsdpUnit, ...]:
    """Return the units of a rank; () unless zero is 2 or 3."""
    members: dict[tuple[str, int], list[FsdpShard]] = {}
    pp_rank = grid.coordinate(layout, rank, "pp")
    groups_of = {
        name: fsdp_groups(layout, name)
        for name in shards.GRADIENT_GROUPS
        if is_fsdp_sharded(layout, name)
    }
    sharing = {
        groups.shard_group: grid.group_ranks(layout, groups.shard_group, rank)
        for groups in groups_of.values()
    }
    elements: dict[object, ShardElements] = {}  # layers are alike
    params = shards.stage_parameters(model, layout, pp_rank)
    chunks = shards.holding_chunks(params, model, layout, pp_rank)
    for param, param_chunks in zip(params, chunks, strict=True):
        groups = groups_of.get(shards.gradient_group(param.sharded_dims, layout))
        if groups is not None:
            unit = (groups.shard_group, _param_layer(model, param))
            form = param.shape, param.sharded_dims
            if form not in elements:
                sharers = sharing[groups.shard_group]
                elements[form] = count_elements(
                    param, layout, ranks=len(sharers), place=sharers.index(rank)
                )
            shard = FsdpShard(
                param=param,
                module=param.module,
                elements=elements[form],
                replica_group=groups.replica_group,
                holders=shards.holding_pp_ranks(param.name, model, layout),
                chunks=param_chunks,
            )
            members.setdefault(unit, []).append(shard)
    return tuple(
        FsdpUnit(
            group=group,
            ranks=len(sharing[group]),
            shards=tuple(unit_shards),
            is_root=layer < 0,
        )
        for (group, layer), unit_shards in members.items()
    )


def _param_layer(model: ModelSpec, param: Param) -> int:
    """Return the layer that a parameter is a part of; -1 for none.

    An MTP depth has a layer beside its norms and projection.
    """
    is_in_depth_layer = param.layer > model.layers and ".layer." in param.name
    is_in_layer = 0 <= param.layer < model.layers or is_in_depth_layer
    return param.layer if is_in_layer else -1


def count_gathers(layout: Layout, unit: FsdpUnit, table: Sequence[TimetableRow]) -> int:
    """Return how often a unit is gathered in a step, in which its rank runs `table`."""
    if layout.zero == 2:
        return 1  # after the update
    if not unit.is_root:
        chunks = {chunk for shard in unit.shards for chunk in shard.chunks}
        return sum(row.chunk in chunks for row in table)
    gathers = 0
    is_gathered = False
    for row in table:
        gathers += not is_gathered
        # fully_shard leaves its root gathered behind a forward, for the backward that follows.
        is_gathered = row.kind is RowKind.F
    return gathers


def count_elements(param: Param, layout: Layout, *, ranks: int, place: int) -> ShardElements:
    """Return the elements of a parameter that so many ranks share, for the rank at a place."""
    rows, *rest = shards.local_shape(param, layout)
    columns = prod(rest)
    part = shards.shard_size(rows, ranks)
    # fully_shard cuts as torch.chunk does: the last parts may be short or empty.
    own = max(0, min(part, rows - place * part))
    return ShardElements(
        ranks=ranks, own=own * columns, padded=part * columns, whole=rows * columns
    )
