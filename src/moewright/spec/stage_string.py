"""Layout strings: the grammar in which the letters of each pipeline stage are spelt.

A layout string spells each stage with the letters E (embedding), t (layer), m (MTP layer) and L
(final norm, head and loss), ends stages with `|`, and repeats with `x*n` or `(...)*n`; commas and
spaces are ignored; stages may be empty.
"""

from __future__ import annotations

from typing import NewType

from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import shorten

StageString = NewType("StageString", str)
EVEN_SPLIT = StageString("")  # no layout string: layers are split evenly
Stages = tuple[tuple[str, ...], ...]  # the letters of each virtual stage

_MAX_SYMBOLS = 100_000  # of a layout string, also when expanded; stops t*1000000000


def parse_stages(text: str) -> Stages:
    """Return the letters of each virtual stage of a layout string.

    Raises:
        BadInput: The text is against the grammar, which is all that is checked.
    """
    if len(text) > _MAX_SYMBOLS:
        raise _bad_string(text, f"has more than {_MAX_SYMBOLS} symbols")
    symbols = text.replace(",", "").replace(" ", "")
    open_groups: list[list[str]] = [[]]
    position = 0
    while position < len(symbols):
        symbol = symbols[position]
        position += 1
        if symbol == "(":
            open_groups.append([])
            continue
        if symbol == ")":
            if len(open_groups) == 1:
                raise _bad_string(text, f"`)` without `(` at symbol {position}")
            item = open_groups.pop()
        elif symbol in "EtmL|":
            item = [symbol]
        else:
            raise _bad_string(text, f"`{symbol}` is none of E t m L | ( ) *n")
        times, position = _parse_times(text, symbols, position)
        if len(open_groups[-1]) + len(item) * times > _MAX_SYMBOLS:
            raise _bad_string(text, f"spells out more than {_MAX_SYMBOLS} symbols")
        open_groups[-1].extend(item * times)
    if not symbols:
        raise _bad_string(text, "spells no stage")
    if len(open_groups) > 1:
        raise _bad_string(text, "`(` is not closed")
    return tuple(tuple(stage) for stage in "".join(open_groups[0]).split("|"))


def _parse_times(text: str, symbols: str, start: int) -> tuple[int, int]:
    """Return the count of a `*n` that may begin at `start` (1 without one), and where it ends."""
    if start == len(symbols) or symbols[start] != "*":
        return 1, start
    end = start + 1
    while end < len(symbols) and symbols[end] in "0123456789":
        end += 1
    digits = symbols[start + 1 : end]
    if not digits or len(digits) > 6 or int(digits) == 0:
        raise _bad_string(text, f"`*` needs a count of 1 to {_MAX_SYMBOLS} after it")
    return int(digits), end


def _bad_string(text: str, rule: str) -> BadInput:
    return BadInput(Reason(field="layout.stages", value=shorten(text), rule=rule))


def shorten_stages(text: str) -> str:
    """Return the beginning of a layout string, as a refusal shows it."""
    return text if len(text) <= 60 else f"{text[:57]}..."
