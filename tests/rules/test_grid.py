from dataclasses import replace

import pytest

from moewright.rules.grid import (
    DENSE_AXES,
    EXPERT_AXES,
    all_groups,
    axis_size,
    coordinate,
    group_ranks,
    group_size,
    min_world_size,
    stage_index,
    stage_rank,
    with_fabric_nodes,
)
from moewright.spec.errors import BadInput
from moewright.spec.layout import DispatcherKind, Layout, RankOrder

FOLDED = Layout(world_size=16, tp=2, sp=True, pp=2, ep=4)  # docs/formulas.md 1, worked example


def shifted(groups: list[tuple[int, ...]], by: int) -> tuple[tuple[int, ...], ...]:
    return (*groups, *(tuple(rank + by for rank in group) for group in groups))


@pytest.mark.parametrize(
    ("group", "first_stage"),
    [
        ("tp", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("dp", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("ep", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("edp", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("tp_cp_dp", [tuple(range(8))]),
    ],
)
def test_worked_example(group: str, first_stage: list[tuple[int, ...]]) -> None:
    assert all_groups(FOLDED, group) == shifted(first_stage, 8)


def test_pipeline_groups_are_the_same_in_both_grids() -> None:
    assert all_groups(FOLDED, "pp") == tuple((rank, rank + 8) for rank in range(8))
    for rank in range(16):
        assert coordinate(FOLDED, rank, "pp") == rank // 8
    # The stride of pp is the product of the faster axes; both grids must give the ranks of a stage.
    for axes in (DENSE_AXES, EXPERT_AXES):
        size = 1
        for axis in axes[:-1]:
            size *= getattr(FOLDED, axis)
        assert size == 8


def test_a_group_of_two_axes_lists_the_first_axis_fastest() -> None:
    layout = Layout(world_size=16, tp=2, cp=2)
    assert group_ranks(layout, "dp_cp", 1) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert group_ranks(layout, "cp", 5) == (5, 7)
    assert group_ranks(layout, "dp", 6) == (2, 6, 10, 14)
    assert group_size(layout, "dp_cp") == 8


@pytest.mark.parametrize(
    ("degrees", "group", "expected"),
    [
        ("2,1,2,2,1", "pp", [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)]),
        ("2,1,2,2,1", "dp_cp", [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]),
        ("2,1,2,2,1", "tp_cp_dp", [(0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)]),
        ("2,1,2,2,1", "edp", [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]),
        ("1,2,3,1,2", "pp", [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]),
        ("1,2,3,1,2", "dp_cp", [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]),
        ("1,2,3,1,2", "etp_ep", [(2 * rank, 2 * rank + 1) for rank in range(6)]),
        ("1,2,3,1,2", "world", [tuple(range(12))]),
    ],
)
def test_groups_with_data_parallelism_last_are_those_of_megatron(
    degrees: str, group: str, expected: list[tuple[int, ...]]
) -> None:
    """As Megatron-LM's RankGenerator lists them for the order tp-cp-ep-pp-dp."""
    tp, cp, pp, ep, etp = map(int, degrees.split(","))
    layout = Layout(world_size=12, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=RankOrder.DP_LAST)
    assert all_groups(layout, group) == tuple(expected)
    stages = [
        [rank for rank in range(12) if coordinate(layout, rank, "pp") == pp_rank]
        for pp_rank in range(pp)
    ]
    for pp_rank, ranks in enumerate(stages):
        assert ranks[0] == stage_rank(layout, pp_rank)
        assert [stage_index(layout, rank) for rank in ranks] == list(range(12 // pp))


def test_expert_tensor_parallel_is_the_fastest_expert_axis() -> None:
    layout = Layout(world_size=8, etp=2, ep=2)
    assert all_groups(layout, "etp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert all_groups(layout, "ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert all_groups(layout, "etp_ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [coordinate(layout, rank, "edp") for rank in range(8)] == [0] * 4 + [1] * 4


def test_nodes_cut_the_expert_axis() -> None:
    layout = Layout(world_size=16, etp=2, ep=8, ep_node=4)
    assert group_ranks(layout, "ep_near", 11) == (9, 11, 13, 15)
    assert group_ranks(layout, "ep_far", 11) == (3, 11)
    alone = Layout(world_size=16, etp=2, ep=8)
    assert (group_size(alone, "ep_far"), group_ranks(alone, "ep_near", 3)) == (
        1,
        group_ranks(alone, "ep", 3),
    )


@pytest.mark.parametrize(
    ("domain", "etp", "ep", "node"),
    [
        (8, 1, 16, 8),
        (8, 2, 16, 4),
        (8, 1, 8, 0),
        (8, 1, 4, 0),
        (1, 1, 8, 0),
        (72, 1, 64, 0),
        (72, 1, 144, 72),
        (8, 1, 12, 4),
        (4, 8, 4, 0),
    ],
)
def test_a_fabric_gives_the_nodes_of_the_expert_axis(
    domain: int, etp: int, ep: int, node: int
) -> None:
    """A node is the ranks in one fast domain; there are no nodes where a group spans no two."""
    layout = Layout(world_size=etp * ep, etp=etp, ep=ep, dispatcher=DispatcherKind.DEDUP)
    assert with_fabric_nodes(layout, domain).ep_node == node
    named = replace(layout, ep_node=2)
    assert with_fabric_nodes(named, domain) == named
    plain = replace(layout, dispatcher=DispatcherKind.ALL_TO_ALL)
    assert with_fabric_nodes(plain, domain) == plain


def test_min_world_is_a_least_common_multiple() -> None:
    assert min_world_size(Layout(world_size=1, tp=2, cp=1, pp=1, ep=8, etp=1)) == 8
    assert min_world_size(Layout(world_size=1, tp=2, cp=4, pp=1, ep=8, etp=1)) == 8
    assert min_world_size(Layout(world_size=1, tp=2, cp=1, pp=2, ep=8, etp=1)) == 16
    assert min_world_size(Layout(world_size=1, tp=1, cp=8, pp=1, ep=8, etp=1)) == 8
    assert min_world_size(Layout(world_size=1, tp=2, cp=3, pp=1, ep=8, etp=1)) == 24
    unfolded = 8 * 8  # before folding, EP cut attention's data parallelism and CP multiplied on top
    assert unfolded == 8 * min_world_size(Layout(world_size=1, tp=1, cp=8, pp=1, ep=8, etp=1))


def test_a_world_of_100_000_ranks() -> None:
    layout = Layout(world_size=102_400, tp=8, pp=16, ep=64)
    assert len(all_groups(layout, "dp")) == 102_400 // layout.dp
    assert group_ranks(layout, "edp", 102_399)[-1] == 102_399


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(BadInput, match="ranks are 0 to 15"):
        coordinate(FOLDED, rank, "tp")


def test_an_axis_is_not_any_attribute() -> None:
    with pytest.raises(KeyError):
        axis_size(FOLDED, "mbs")
