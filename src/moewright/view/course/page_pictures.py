"""Pictures of pages that no chapter has: bars of a page's own table, and mixers by the sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from moewright.intake import catalogue
from moewright.rules.shapes.flops import RankShare, forward_flop_rows
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import MixerKind, ModelSpec
from moewright.spec.units import format_count
from moewright.view.course.drawing import (
    BarPart,
    CoursePicture,
    Drawing,
    StackedBar,
    draw_bars,
    picture,
)
from moewright.view.course.route_pictures import DEVICE_COLOURS

_NUMBER = re.compile(r"-?[\d,]*\.?\d+")
_MODEL = "Qwen/Qwen3-Next-80B-A3B"
_SEQUENCES = (4096, 16384, 65536, 262144)
_MIXERS = ((MixerKind.RECURRENT, "gated delta net"), (MixerKind.ATTENTION, "attention"))


def draw_table(lines: Sequence[str], amount: str, name: str, group: str) -> CoursePicture:
    """Draw a column of a Markdown table as bars, which two other columns name and group.

    Raises:
        BadInput: the table has no such column, or a cell of it has no number.
    """
    columns, _, *rows = (tuple(map(str.strip, line.strip("| \n").split("|"))) for line in lines)
    for column in (amount, name, group):
        if column not in columns:
            rule = f"the table has {', '.join(columns)}"
            raise BadInput(Reason(field="bars", value=column, rule=rule))
    places = [columns.index(column) for column in (group, name, amount)]
    cells = [tuple(row[place] for place in places) for row in rows]
    names = list(dict.fromkeys(row[1] for row in cells))
    bars = [
        _draw_bar(row, _read_amount(row[2]), names.index(row[1]), title)
        for row, title in zip(cells, _title_groups(cells), strict=True)
    ]
    return _picture_bars(f"{amount[0].upper()}{amount[1:]}", bars, (group, name, amount), cells)


def _read_amount(text: str) -> float:
    number = _NUMBER.search(text)
    if number is None:
        raise BadInput(Reason(field="bars", value=text, rule="has no number"))
    return float(number[0].replace(",", ""))


def _title_groups(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the group of each row that begins one, and nothing for the rest."""
    before = ("", *(row[0] for row in cells))
    return ["" if row[0] == last else row[0] for row, last in zip(cells, before, strict=False)]


def _draw_bar(row: Sequence[str], amount: float, place: int, title: str) -> StackedBar:
    _, name, text = row
    colour = DEVICE_COLOURS[place % len(DEVICE_COLOURS)]
    part = BarPart(name=name, amount=amount, colour=colour, text=text)
    return StackedBar(name=name, parts=(part,), text=text, title=title)


def _picture_bars(
    what: str,
    bars: Sequence[StackedBar],
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
) -> CoursePicture:
    told = "; ".join(", ".join(row) for row in cells)

    def draw(drawing: Drawing) -> None:
        draw_bars(drawing, 0, bars)

    return picture(f"{what}: {told}.", draw, columns, cells)


def draw_mixers() -> CoursePicture:
    """Draw the forward FLOPs of a token in two mixers of one model, by the sequence's length."""
    amounts = list(_count_mixers(catalogue.model(_MODEL)))
    cells = [(title, name, format_count(flops)) for title, name, flops in amounts]
    bars = [
        _draw_bar(cell, flops, place % len(_MIXERS), title)
        for place, (cell, (*_, flops), title) in enumerate(
            zip(cells, amounts, _title_groups(cells), strict=True)
        )
    ]
    what = f"Forward FLOPs of a token in one layer's mixer of {_MODEL}"
    return _picture_bars(what, bars, ("sequence", "mixer", "FLOPs a token"), cells)


def _count_mixers(model: ModelSpec) -> Iterator[tuple[str, str, float]]:
    layout = Layout(world_size=1)
    for seq_len in _SEQUENCES:
        for kind, name in _MIXERS:
            layer = next(place for place in range(model.layers) if model.mixer(place) is kind)
            share = RankShare(layers=(layer,), tokens=seq_len, routed_rows=0, head=False)
            rows = forward_flop_rows(model, layout, share, seq_len=seq_len)
            flops = sum(row.flops for row in rows if row.module is Module.ATTENTION)
            yield f"{seq_len:,} tokens", name, flops / seq_len


PAGE_PICTURES: Mapping[str, Callable[[], CoursePicture]] = MappingProxyType({"mixers": draw_mixers})
