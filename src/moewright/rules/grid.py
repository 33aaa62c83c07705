"""The two rank grids: ranks to coordinates and back, and the ranks of a named group.

Attention and dense layers use the dense grid, routed experts the expert grid, over the same ranks
(parallel folding). Both end in `pp`, so a pipeline stage is the same block of ranks in both. Under
layout.order=tp-cp-ep-pp-dp both end in data parallelism; then tp * cp and etp * ep are equal, and a
stage is the same ranks in both again.

A rank is the sum of coordinate * stride over the axes of a grid. Strides are the prefix products of
the axis sizes, the fastest axis first. All functions expect a world that divides by both grids,
which rules.limits.legality checks, and take constant time apart from the ranks that they list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd, lcm, prod
from types import MappingProxyType

from moewright.rules.context_parallel import cp_factors
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, RankOrder

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
_DP_LAST_AXES = ("tp", "cp", "pp", "dp")
_EDP_LAST_AXES = ("etp", "ep", "pp", "edp")
# The parts of the cp axis, fastest first (rules.context_parallel).
_CP_AXES = ("cp_a2a", "cp_kv")
# The parts of the ep axis: the ranks of one node, and the nodes.
_EP_AXES = ("ep_near", "ep_far")
# The parts of cp and dp together, and of edp, under hybrid sharding: inside a block of tp * shard
# ranks, and across blocks.
_HYBRID_AXES = ("shard", "copies", "edp_shard", "edp_copies")

# The axes that each named group spans, all of one grid, fastest first.
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
    """Return the ranks along an axis of either grid, or along a part of an axis."""
    if axis in _CP_AXES:
        return cp_factors(layout)[_CP_AXES.index(axis)]
    if axis in _EP_AXES:
        node_ranks = layout.ep_node or layout.ep
        if axis == "ep_near":
            return node_ranks
        return layout.ep // node_ranks
    if axis in _HYBRID_AXES:
        return _hybrid_sizes(layout)[_HYBRID_AXES.index(axis)]
    if axis not in DENSE_AXES and axis not in EXPERT_AXES:
        raise KeyError(axis)
    size: int = getattr(layout, axis)
    return size


def _hybrid_sizes(layout: Layout) -> tuple[int, int, int, int]:
    """Return the sizes of _HYBRID_AXES.

    Experts are sharded over the ranks of edp that lie in one block; where a block holds them only
    once, that is one rank.
    """
    dense_ranks = layout.dp * layout.cp
    if not layout.shard:
        return dense_ranks, 1, layout.edp, 1
    # Of the tp * shard ranks of a block, etp * ep hold all experts once: the rest are copies.
    expert_shard = max(1, layout.tp * layout.shard // (layout.etp * layout.ep))
    return layout.shard, dense_ranks // layout.shard, expert_shard, layout.edp // expert_shard


def group_size(layout: Layout, group: str) -> int:
    """Return the number of ranks in one group of that name."""
    return prod(axis_size(layout, axis) for axis in GROUPS[group])


def stride(layout: Layout, axis: str) -> int:
    """Return what one step along the axis adds to the rank."""
    if axis in _CP_AXES:
        return stride(layout, "cp") * prod(cp_factors(layout)[: _CP_AXES.index(axis)])
    if axis in _EP_AXES:
        ep_stride = stride(layout, "ep")
        if axis == "ep_near":
            return ep_stride
        return ep_stride * axis_size(layout, "ep_near")
    if axis in _HYBRID_AXES:
        index = _HYBRID_AXES.index(axis)
        first = index // 2 * 2  # index of the inner axis of the pair that this one is part of
        pair_axis = "edp" if first else "cp"
        return stride(layout, pair_axis) * prod(_hybrid_sizes(layout)[first:index])
    if layout.order is RankOrder.DP_LAST:
        axes = _EDP_LAST_AXES if axis in EXPERT_AXES else _DP_LAST_AXES
    else:
        axes = EXPERT_AXES if axis in EXPERT_AXES else DENSE_AXES
    return prod(axis_size(layout, faster) for faster in axes[: axes.index(axis)])


def stage_rank(layout: Layout, pp_rank: int) -> int:
    """Return the first rank of a pipeline stage."""
    return pp_rank * stride(layout, "pp")


def stage_index(layout: Layout, rank: int) -> int:
    """Return the place of a rank among the ranks of its pipeline stage, in ascending order."""
    step = stride(layout, "pp")
    # Under order=dp_last the ranks of a stage are blocks, between which lie those of other stages.
    return rank // (step * layout.pp) * step + rank % step


def coordinate(layout: Layout, rank: int, axis: str) -> int:
    """Return the coordinate of a rank on an axis, 0 .. axis_size - 1.

    Raises:
        BadInput: There is no such rank.
    """
    if not 0 <= rank < layout.world_size:
        nearest = str(min(max(rank, 0), layout.world_size - 1))
        rule = f"ranks are 0 to {layout.world_size - 1}"
        raise BadInput(Reason(field="rank", value=str(rank), rule=rule, nearest=nearest))
    # Mixed radix: the digit of the rank at this axis.
    return rank // stride(layout, axis) % axis_size(layout, axis)


def _offsets(layout: Layout, group: str) -> tuple[int, ...]:
    """Return the ranks of the group of rank 0, the first axis fastest."""
    offsets = [0]
    # By stride, as order=dp_last changes which axis of a group is the fastest.
    for axis in sorted(GROUPS[group], key=lambda axis: stride(layout, axis)):
        step = stride(layout, axis)
        size = axis_size(layout, axis)
        offsets = [index * step + offset for index in range(size) for offset in offsets]
    return tuple(offsets)


def group_ranks(layout: Layout, group: str, rank: int) -> tuple[int, ...]:
    """Return the ranks of the group that `rank` is in, in group order, the first axis fastest."""
    axes = GROUPS[group]
    first = rank - sum(coordinate(layout, rank, axis) * stride(layout, axis) for axis in axes)
    return tuple(first + offset for offset in _offsets(layout, group))


def all_groups(layout: Layout, group: str) -> tuple[tuple[int, ...], ...]:
    """Return every group of that name, sorted by lowest rank; each rank is in one group.

    Takes time linear in the world size.
    """
    axes = [(stride(layout, axis), axis_size(layout, axis)) for axis in GROUPS[group]]
    offsets = _offsets(layout, group)
    return tuple(
        tuple(first + offset for offset in offsets)
        for first in range(layout.world_size)
        if not any(first // step % size for step, size in axes)
    )


def min_world_size(layout: Layout) -> int:
    """Return the fewest ranks on which both grids fit; legal world sizes are its multiples."""
    return layout.pp * lcm(layout.tp * layout.cp, layout.etp * layout.ep)


def with_fabric_nodes(layout: Layout, domain_size: int) -> Layout:
    """Return the layout with `ep_node` set to the fast domains of the fabric.

    It is the number of ranks of ep that lie in one domain of `domain_size` ranks, where ep spans
    several domains. A layout that sets `ep_node`, or whose dispatcher knows no nodes, is unchanged,
    and so is one whose expert ranks find room in one domain: 64 of them take 64 devices of an
    NVL72's 72.
    """
    if (
        not layout.dispatcher.facts.knows_nodes
        or layout.ep_node
        or domain_size % layout.etp
        or layout.ep * layout.etp <= domain_size
    ):
        return layout
    node_ranks = gcd(layout.ep, domain_size // layout.etp)
    if not 1 < node_ranks < layout.ep:
        return layout
    return replace(layout, ep_node=node_ranks)
