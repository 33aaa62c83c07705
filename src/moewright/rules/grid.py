"""Rank <-> coordinates. Two grids over the same ranks (parallel folding): attention and dense
layers use the dense grid, routed experts the expert grid; both end in `pp`, so a pipeline stage is
the same block of ranks in both.

rank = sum of coordinate * stride, strides being the prefix products of the axis sizes, fastest axis
first. Everything here expects the world to divide by both grids (rules.legality says so) and is
O(1) a query but for the ranks it lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd, lcm, prod
from types import MappingProxyType

from moewright.rules.context_parallel import cp_factors
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import DispatcherKind, Layout

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
_CP_AXES = ("cp_a2a", "cp_kv")  # what the cp axis consists of, fastest first (rules.context)
NODE_AWARE_DISPATCHERS = (DispatcherKind.DEDUP, DispatcherKind.HYBRIDEP)
_EP_AXES = ("ep_near", "ep_far")  # what the ep axis consists of: ranks of one node, and nodes
# What cp and dp together, and edp, consist of under hybrid sharding: inside a block of tp * shard
# ranks, and across.
_HYBRID_AXES = ("shard", "copies", "edp_shard", "edp_copies")

# Group name -> the axes it spans, all of one grid, fastest first.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp": ("tp",),
        "cp": ("cp",),
        "cp_a2a": ("cp_a2a",),
        "cp_kv": ("cp_kv",),
        "dp": ("dp",),
        "pp": ("pp",),
        "dp_cp": ("cp", "dp"),
        "tp_cp": ("tp", "cp"),
        "tp_cp_dp": ("tp", "cp", "dp"),
        "etp": ("etp",),
        "ep": ("ep",),
        "ep_near": ("ep_near",),
        "ep_far": ("ep_far",),
        "edp": ("edp",),
        "etp_ep": ("etp", "ep"),
        "shard": ("shard",),
        "edp_shard": ("edp_shard",),
        "copies": ("copies",),
        "tp_copies": ("tp", "copies"),
        "edp_copies": ("edp_copies",),
        "world": DENSE_AXES,
    }
)


def axis_size(layout: Layout, axis: str) -> int:
    """Ranks along one axis of either grid, or along a part of the cp or the ep axis."""
    if axis in _CP_AXES:
        return cp_factors(layout)[_CP_AXES.index(axis)]
    if axis in _EP_AXES:
        near = layout.ep_node or layout.ep
        return near if axis == "ep_near" else layout.ep // near
    if axis in _HYBRID_AXES:
        return _hybrid(layout)[_HYBRID_AXES.index(axis)]
    if axis not in DENSE_AXES and axis not in EXPERT_AXES:
        raise KeyError(axis)
    size: int = getattr(layout, axis)
    return size


def _hybrid(layout: Layout) -> tuple[int, int, int, int]:
    """Sizes of _HYBRID_AXES. Experts are cut over the ranks of edp that lie in one block: over one
    where a block holds no two copies of them.
    """
    dense, inside, expert = layout.dp * layout.cp, layout.shard, layout.edp
    if not inside:
        return dense, 1, expert, 1
    expert_inside = max(1, layout.tp * inside // (layout.etp * layout.ep))
    return inside, dense // inside, expert_inside, expert // expert_inside


def group_size(layout: Layout, group: str) -> int:
    """Ranks in one group of that name."""
    return prod(axis_size(layout, axis) for axis in GROUPS[group])


def stride(layout: Layout, axis: str) -> int:
    """What one step along the axis adds to the rank."""
    if axis in _CP_AXES:
        return stride(layout, "cp") * prod(cp_factors(layout)[: _CP_AXES.index(axis)])
    if axis in _EP_AXES:
        return stride(layout, "ep") * (1 if axis == "ep_near" else axis_size(layout, "ep_near"))
    if axis in _HYBRID_AXES:
        place = _HYBRID_AXES.index(axis)
        first = place // 2 * 2  # of the two that make up one run of ranks
        return stride(layout, "edp" if first else "cp") * prod(_hybrid(layout)[first:place])
    axes = EXPERT_AXES if axis in EXPERT_AXES else DENSE_AXES
    return prod(axis_size(layout, faster) for faster in axes[: axes.index(axis)])


def coordinate(layout: Layout, rank: int, axis: str) -> int:
    """Where `rank` stands on `axis`, 0 .. axis_size - 1."""
    if not 0 <= rank < layout.world_size:
        nearest = str(min(max(rank, 0), layout.world_size - 1))
        rule = f"ranks are 0 to {layout.world_size - 1}"
        raise BadInput(Reason(field="rank", value=str(rank), rule=rule, nearest=nearest))
    return rank // stride(layout, axis) % axis_size(layout, axis)


def _offsets(layout: Layout, group: str) -> tuple[int, ...]:
    """Ranks of the group of rank 0, first axis fastest."""
    offsets = [0]
    for axis in GROUPS[group]:
        step, size = stride(layout, axis), axis_size(layout, axis)
        offsets = [place * step + offset for place in range(size) for offset in offsets]
    return tuple(offsets)


def group_ranks(layout: Layout, group: str, rank: int) -> tuple[int, ...]:
    """The ranks of `rank`'s group in group order: the other coordinates held fixed, the first axis
    fastest."""
    axes = GROUPS[group]
    first = rank - sum(coordinate(layout, rank, axis) * stride(layout, axis) for axis in axes)
    return tuple(first + offset for offset in _offsets(layout, group))


def all_groups(layout: Layout, group: str) -> tuple[tuple[int, ...], ...]:
    """Every group of that name, by lowest rank; together they hold each rank once. Linear in the
    world size."""
    axes = [(stride(layout, axis), axis_size(layout, axis)) for axis in GROUPS[group]]
    offsets = _offsets(layout, group)
    return tuple(
        tuple(first + offset for offset in offsets)
        for first in range(layout.world_size)
        if not any(first // step % size for step, size in axes)
    )


def min_world_size(*, tp: int, cp: int, pp: int, ep: int, etp: int) -> int:
    """Fewest ranks on which both grids fit; legal world sizes are its multiples."""
    return pp * lcm(tp * cp, etp * ep)


def with_fabric_nodes(layout: Layout, domain_size: int) -> Layout:
    """The layout with the nodes that fast domains of `domain_size` ranks are to a dispatcher that
    is told of nodes, unless it names them: as many ranks of ep as lie in one domain, where ep spans
    several.
    """
    if (
        layout.dispatcher not in NODE_AWARE_DISPATCHERS
        or layout.ep_node
        or domain_size % layout.etp
    ):
        return layout
    near = gcd(layout.ep, domain_size // layout.etp)
    return replace(layout, ep_node=near) if 1 < near < layout.ep else layout
