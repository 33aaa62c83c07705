"""The ranks of a layout as a drawing: sizes of its groups, and their squares on one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moewright.spec.layout import Layout
from moewright.spec.units import plural

MOST_RANKS = 32  # that are drawn of a stage: the rest repeats them, and a line has 80 columns
_SQUARES = "■□"  # of tensor groups in turns


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGrid:
    """How many ranks a stage, an expert group, a tensor group and a node have, for a drawing."""

    stages: int
    ranks: int  # of a stage
    ep: int  # ranks that share a set of experts
    tp: int
    node: int  # devices of a node

    def is_shaded(self, rank: int) -> bool:
        """Whether a rank has the shade of every second tensor group."""
        return self.tp > 1 and rank // self.tp % 2 == 1


def build_rank_grid(layout: Layout, node: int) -> RankGrid:
    """Return the sizes of a layout's groups on nodes of so many devices."""
    return RankGrid(
        stages=layout.pp,
        ranks=layout.world_size // layout.pp,
        ep=layout.ep * layout.etp,
        tp=layout.tp,
        node=node,
    )


def draw_ranks(grid: RankGrid) -> str:
    """Return the ranks of the first stage as squares, and what their order says.

    That is "2 stages of ■■■■ ■■■■ | ■■■■ ■■■■ (a block shares the experts, | parts nodes)".
    """
    squares = "".join(_draw_squares(grid))
    text = f"{grid.stages} stages of {squares}" if grid.stages > 1 else squares
    if grid.ranks > MOST_RANKS:
        text += f" and {grid.ranks - MOST_RANKS:,} more"
    words = []
    if " " in squares or "|" in squares:
        words.append("a block shares the experts" if grid.ep > 1 else "")
    if grid.tp > 1:
        words.append("a shade its tensors")
    if "|" in squares:
        words.append("| parts nodes")
    elif grid.stages > 1 and grid.ranks < grid.node:
        words.append(f"{plural(grid.node // grid.ranks, 'stage')} a node")
    words = [word for word in words if word]
    return f"{text} ({', '.join(words)})" if words else text


def _draw_squares(grid: RankGrid) -> Iterator[str]:
    """Yield squares with a space between expert groups, and a bar between nodes."""
    for rank in range(min(grid.ranks, MOST_RANKS)):
        if rank:
            space = " " if rank % grid.ep == 0 and grid.ep > 1 else ""
            yield f"{space}|{space}" if rank % grid.node == 0 else space
        yield _SQUARES[grid.is_shaded(rank)]
