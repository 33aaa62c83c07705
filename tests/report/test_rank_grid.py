"""The ranks of a layout on one line: every rank once, groups apart, within a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moewright.report.rank_grid import RankGrid, draw_ranks

COLUMNS = 80
INDENT = 4  # of the line in an answer
powers = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128])
grids = st.builds(RankGrid, stages=powers, ranks=powers, ep=powers, tp=powers, node=powers)


@given(grids)
def test_every_rank_that_is_drawn_stands_in_its_groups(grid: RankGrid) -> None:
    text = draw_ranks(grid)
    squares = text.rpartition(" of ")[2].partition(" (")[0].partition(" and ")[0]
    assert squares.count("■") + squares.count("□") == min(grid.ranks, 32)
    ranks = []
    apart = ""
    for letter in squares:
        if letter in " |":
            apart += letter
            continue
        ranks.append((apart, letter))
        apart = ""
    for rank, (apart, letter) in enumerate(ranks[1:], 1):
        assert ("|" in apart) == (rank % grid.node == 0)
        assert (" " in apart) == (grid.ep > 1 and rank % grid.ep == 0)
        if grid.tp > 1:
            assert (letter == ranks[rank - 1][1]) == (rank % grid.tp != 0)
    more = grid.ranks - 32
    assert (f"and {more} more" in text) == (more > 0)


@given(grids)
def test_words_explain_what_is_drawn_and_no_more(grid: RankGrid) -> None:
    text = draw_ranks(grid)
    squares, _, words = text.partition(" (")
    assert ("parts nodes" in words) == ("|" in squares)
    assert ("tensors" in words) == (grid.tp > 1)


def test_a_layout_of_two_nodes() -> None:
    grid = RankGrid(stages=2, ranks=16, ep=4, tp=2, node=8)
    assert draw_ranks(grid) == (
        "2 stages of ■■□□ ■■□□ | ■■□□ ■■□□ (a block shares the experts, a shade its tensors, "
        "| parts nodes)"
    )
