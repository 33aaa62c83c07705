"""Pictures of who holds what and who speaks with whom: the two grids over the same devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moewright.rules.context_parallel import rank_positions
from moewright.rules.grid import all_groups, coordinate, group_ranks, group_size
from moewright.spec.layout import Layout
from moewright.spec.units import format_bytes, format_figures
from moewright.view.course.drawing import CoursePicture, Drawing, picture
from moewright.view.course.job_figures import peak_ledger, whole_group
from moewright.view.course.lesson import Lesson

_MOST_RANKS = 8  # that are drawn; the others repeat them
_GROUP_COLOURS = (
    "#4878b8",
    "#e07b39",
    "#2f9e83",
    "#b562b8",
    "#c39a2b",
    "#cf5050",
    "#4fa3c7",
    "#7fa843",
)
_DENSE_GROUPS = ("tp", "cp", "dp_cp")
_ALL_GROUPS = ("tp", "dp_cp", "etp", "ep", "edp")
_CELL = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldParts:
    """The parts of a thing that a rank holds, each (start, end) as shares of the whole."""

    ranges: tuple[tuple[float, float], ...]

    @property
    def share(self) -> float:
        """How much of the whole it is."""
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRow:
    """A thing that ranks hold parts of: its name, its colour, and the parts of each rank."""

    name: str
    colour: str
    parts: tuple[HeldParts, ...]


def _slice(whole: tuple[float, float], index: int, count: int) -> tuple[float, float]:
    start, end = whole
    size = (end - start) / count
    return start + index * size, start + (index + 1) * size


def _place(layout: Layout, group: str, rank: int) -> tuple[int, int]:
    """Return the index of a rank in its group, and the ranks of the group."""
    return group_ranks(layout, group, rank).index(rank), group_size(layout, group)


def _matrix(layout: Layout, rank: int, level: int) -> HeldParts:
    """Return what a rank holds of a dense matrix, cut over the copies from a level of ZeRO on."""
    whole = _slice((0.0, 1.0), *_place(layout, "tp", rank))
    if layout.zero >= level:
        whole = _slice(whole, *_place(layout, "dp_cp", rank))
    return HeldParts(ranges=(whole,))


def _sequences(layout: Layout, rank: int) -> HeldParts:
    return HeldParts(ranges=(_slice((0.0, 1.0), *_place(layout, "dp", rank)),))


def _tokens(layout: Layout, rank: int) -> HeldParts:
    """Return the positions of a sequence: the blocks of cp, cut over tp between products."""
    unit = 2 * layout.cp * layout.tp
    blocks = rank_positions(unit, layout.cp, coordinate(layout, rank, "cp"))
    own = [position / unit for block in blocks for position in block]
    if layout.sp:
        index, count = _place(layout, "tp", rank)
        own = own[index * len(own) // count : (index + 1) * len(own) // count]
    return HeldParts(ranges=tuple((start, start + 1 / unit) for start in own))


def _experts(layout: Layout, rank: int) -> HeldParts:
    return HeldParts(ranges=(_slice((0.0, 1.0), *_place(layout, "ep", rank)),))


def _expert_matrix(layout: Layout, rank: int) -> HeldParts:
    return HeldParts(ranges=(_slice((0.0, 1.0), *_place(layout, "etp", rank)),))


def _expert_moments(layout: Layout, rank: int) -> HeldParts:
    whole = _slice((0.0, 1.0), *_place(layout, "etp", rank))
    if layout.zero >= 1:
        whole = _slice(whole, *_place(layout, "edp", rank))
    return HeldParts(ranges=(whole,))


def _row(
    name: str, colour: str, layout: Layout, hold: Callable[[Layout, int], HeldParts]
) -> HeldRow:
    ranks = range(min(layout.world_size, _MOST_RANKS))
    return HeldRow(name=name, colour=colour, parts=tuple(hold(layout, rank) for rank in ranks))


def draw_dense_shards(lesson: Lesson) -> CoursePicture:
    """Draw what every rank holds of a dense matrix, its moments, the batch and a sequence."""
    layout = lesson.plan.layout
    rows = [
        _row("a matrix", "#4878b8", layout, lambda layout, rank: _matrix(layout, rank, 3)),
        _row("its gradient", "#4fa3c7", layout, lambda layout, rank: _matrix(layout, rank, 2)),
        _row("its moments", "#b562b8", layout, lambda layout, rank: _matrix(layout, rank, 1)),
        _row("sequences of the batch", "#e07b39", layout, _sequences),
        _row("tokens of a sequence", "#c39a2b", layout, _tokens),
    ]
    return _draw_held(rows, "device")


def draw_expert_shards(lesson: Lesson) -> CoursePicture:
    """Draw what every rank holds of attention's matrices, of the experts and of one expert."""
    layout = lesson.plan.layout
    rows = [
        _row(
            "attention's matrix", "#4878b8", layout, lambda layout, rank: _matrix(layout, rank, 3)
        ),
        _row("which experts", "#2f9e83", layout, _experts),
        _row("of each expert", "#7fa843", layout, _expert_matrix),
        _row("of its moments", "#b562b8", layout, _expert_moments),
        _row("sequences of the batch", "#e07b39", layout, _sequences),
    ]
    return _draw_held(rows, "device")


def _draw_held(rows: Sequence[HeldRow], noun: str) -> CoursePicture:
    ranks = len(rows[0].parts)

    def draw(drawing: Drawing) -> None:
        names = drawing.choose(narrow=0.0, wide=165.0)
        step = (drawing.width - names) / ranks
        for rank in range(ranks):
            drawing.text(names + (rank + 0.5) * step, 12, str(rank), "quiet", anchor="middle")
        if not drawing.is_narrow:
            drawing.text(0, 12, noun, "quiet")
        y = 20.0
        for row in rows:
            y = _draw_held_row(drawing, row, y, (names, step)) + 9

    table = [(row.name, *(f"{_say_ranges(parts)}" for parts in row.parts)) for row in rows]
    told = "; ".join(f"{row.name} {_say_share(row.parts[0].share)}" for row in rows)
    columns = ("part", *(f"{noun} {rank}" for rank in range(ranks)))
    return picture(f"The first {noun} holds: {told}.", draw, columns, table)


def _draw_held_row(drawing: Drawing, row: HeldRow, y: float, columns: tuple[float, float]) -> float:
    names, step = columns
    if drawing.is_narrow:
        drawing.text(0, y + 12, row.name, "quiet")
        y += 17
    else:
        drawing.text(0, y + 15, row.name, "quiet")
    for rank, parts in enumerate(row.parts):
        x = names + rank * step + 2
        width = step - 5
        drawing.box(x, y, (width, _CELL), "", kind="empty")
        for start, end in parts.ranges:
            hint = f"device {rank}: {_say_ranges(parts)} of {row.name}"
            drawing.box(x + start * width, y, ((end - start) * width, _CELL), row.colour, hint=hint)
    return y + _CELL


def _say_ranges(parts: HeldParts) -> str:
    joined: list[tuple[float, float]] = []
    for start, end in parts.ranges:
        if joined and abs(joined[-1][1] - start) < 1e-9:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return " and ".join(f"{start:.0%} to {end:.0%}" for start, end in joined)


def _say_share(share: float) -> str:
    return "whole" if share > 1 - 1e-9 else f"1/{format_figures(1 / share)}"


def draw_dense_groups(lesson: Lesson) -> CoursePicture:
    """Draw the groups of the dense grid, with what a rank hands to each in a step."""
    return _draw_groups(lesson, _DENSE_GROUPS)


def draw_all_groups(lesson: Lesson) -> CoursePicture:
    """Draw the groups of both grids, with what a rank hands to each in a step."""
    return _draw_groups(lesson, _ALL_GROUPS)


def _list_sent(lesson: Lesson, groups: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    rows = peak_ledger(lesson).comm
    for group in groups:
        own = [row for row in rows if whole_group(row.group) == group]
        yield group, sum(row.bytes for row in own), sum(row.calls for row in own)


def _draw_groups(lesson: Lesson, groups: Sequence[str]) -> CoursePicture:
    layout = lesson.plan.layout
    sent = list(_list_sent(lesson, groups))
    ranks = min(layout.world_size, _MOST_RANKS)

    def draw(drawing: Drawing) -> None:
        names, figures = drawing.choose(narrow=(0.0, 0.0), wide=(62.0, 190.0))
        step = (drawing.width - names - figures) / ranks
        for rank in range(ranks):
            drawing.text(names + (rank + 0.5) * step, 12, str(rank), "quiet", anchor="middle")
        y = 20.0
        for group, nbytes, calls in sent:
            told = _say_sent(layout, group, nbytes, calls)
            if drawing.is_narrow:
                drawing.text(0, y + 12, f"{group}: {told}", "quiet")
                y += 17
            else:
                drawing.text(0, y + 15, group, "strong")
                drawing.text(drawing.width - figures + 8, y + 15, told, "quiet")
            for index, members in enumerate(all_groups(layout, group)):
                colour = _GROUP_COLOURS[index % len(_GROUP_COLOURS)]
                for rank in members:
                    if rank < ranks:
                        hint = f"{group} {index}: devices {', '.join(map(str, members))}"
                        x = names + rank * step + 2
                        drawing.box(x, y, (step - 5, _CELL), colour, hint=hint)
            y += _CELL + 9

    rows = [
        (
            group,
            " | ".join(" ".join(map(str, members)) for members in all_groups(layout, group)),
            format_bytes(nbytes),
            f"{calls:,}",
        )
        for group, nbytes, calls in sent
    ]
    summary = "; ".join(f"{group}: {_say_sent(layout, group, *rest)}" for group, *rest in sent)
    columns = ("group", "devices that speak with each other", "bytes a step", "calls a step")
    return picture(f"Devices of one colour speak with each other. {summary}.", draw, columns, rows)


def _say_sent(layout: Layout, group: str, nbytes: int, calls: int) -> str:
    if group_size(layout, group) == 1:
        return "nobody to speak with"
    if not calls:
        return "silent"
    return f"{format_bytes(nbytes)} in {calls:,} calls"
