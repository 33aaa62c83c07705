"""A layout as pages show it: in words, as labels, as a drawing of its ranks, and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moewright.codec import format_layout
from moewright.codec.layout_words import describe_layout
from moewright.report.rank_grid import MOST_RANKS, RankGrid, build_rank_grid
from moewright.spec.layout import Layout
from moewright.spec.quoting import Html

SHOWN_NAMES: Final = ("layout", "words", "labels", "grid")
"""The fields of a LayoutView, which records that hold a layout are written with."""

STAGE_STEP = 14  # points from a drawn stage to the next
_RANK_STEP = 12  # points from a drawn rank to the next, two of them between
_GROUP_GAP = 6  # between expert groups
_MOST_STAGES = 4  # that are drawn: a card is not a page
_BADGE = "border:1px solid #8884;border-radius:9px;padding:0 .5em;margin-right:.3em"
# One click marks the whole text, so that it can be copied.
_COPIED = "user-select:all"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutView:
    """A layout as text and in words; `grid` has the sizes of its groups, for a drawing."""

    layout: str
    words: str
    labels: tuple[str, ...]
    grid: RankGrid


def build_layout_view(layout: Layout, node: int) -> LayoutView:
    """Return a layout as pages show it, on nodes of so many devices."""
    words = describe_layout(layout)
    return LayoutView(
        layout=format_layout(layout),
        words=words.sentence,
        labels=words.labels,
        grid=build_rank_grid(layout, node),
    )


def count_drawn_stages(grid: RankGrid) -> int:
    """Return how many stages `draw_grid` draws."""
    return min(grid.stages, _MOST_STAGES)


def draw_grid(grid: RankGrid, left: int, top: int) -> Html:
    """Return ranks as squares: a row a pipeline stage, a block the ranks that share the experts."""
    return Html.concat(
        (
            Html.write(
                '<rect class="rank" x="{}" y="{}" width="10" height="10" rx="2" opacity="{}"/>',
                left + _place_rank(rank, grid),
                top + STAGE_STEP * stage,
                0.45 if grid.is_shaded(rank) else 0.85,
            )
            for stage in range(count_drawn_stages(grid))
            for rank in range(min(grid.ranks, MOST_RANKS))
        ),
        "\n",
    )


def measure_grid(grid: RankGrid) -> tuple[int, int]:
    """Return width and height of what `draw_grid` draws, in points."""
    last = min(grid.ranks, MOST_RANKS) - 1
    return _place_rank(last, grid) + _RANK_STEP, STAGE_STEP * count_drawn_stages(grid)


def _place_rank(rank: int, grid: RankGrid) -> int:
    return _RANK_STEP * rank + _GROUP_GAP * (rank // grid.ep)


def render_layout(shown: LayoutView) -> Html:
    """Return a layout for a notebook, which runs no scripts: words, labels, ranks, and its text."""
    width, height = measure_grid(shown.grid)
    return Html.write(
        """<b>{}</b><br>
{}<br>
<svg xmlns="http://www.w3.org/2000/svg" width="{}" height="{}" fill="#4878b8" role="img" \
aria-label="{}">{}</svg><br>
<code style="{}">{}</code>
""",
        shown.words,
        Html.concat(
            Html.write('<span style="{}">{}</span>', _BADGE, label) for label in shown.labels
        ),
        *(width, height, shown.words, draw_grid(shown.grid, 0, 2)),
        *(_COPIED, shown.layout),
    )
