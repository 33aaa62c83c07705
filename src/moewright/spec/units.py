"""Units and sources of numbers: SI inside, readable text only where it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from enum import StrEnum
from math import isfinite
from typing import TypeVar

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
GIGA = 10**9
TERA = 10**12

MINUTE_S = 60.0
HOUR_S = 3600.0
DAY_S = 86400.0
US_PER_S = 1e6

# Bytes of a number.
BF16_BYTES = 2
FP32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = 8

_Value = TypeVar("_Value")

_THREE_FIGURES = Context(prec=3, rounding=ROUND_HALF_UP)
_MOST_DIGITS = 18  # of a number that somebody wrote: below 2^63
_MOST_LETTERS = 60  # of a value in a refusal


def format_figures(value: float) -> str:
    """Return a number with three significant figures, from 1,000 on whole with thousands apart.

    Halves are rounded away from zero. Pages have the same function in JavaScript.
    """
    if not isfinite(value):
        return "–"
    rounded = _THREE_FIGURES.create_decimal(Decimal(value))
    if abs(rounded) >= 1000:
        return f"{_round_half_up(value):,}"
    return f"{rounded.normalize():f}"


def _round_half_up(value: float) -> int:
    return int(Decimal(value).quantize(Decimal(1), ROUND_HALF_UP))


def format_bytes(value_bytes: float) -> str:
    """Return bytes as B, KiB, MiB or GiB with three significant figures."""
    size = abs(value_bytes)
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return f"{format_figures(value_bytes / scale)} {unit}"
    return f"{_round_half_up(value_bytes):,} B"


def format_seconds(value_s: float) -> str:
    """Return seconds as s, ms or us with three significant figures."""
    size = abs(value_s)
    if size >= 1 or size == 0:
        return f"{format_figures(value_s)} s"
    if size >= 1e-3:
        return f"{format_figures(value_s * 1e3)} ms"
    return f"{format_figures(value_s * 1e6)} us"


def format_change(change: float, form: Callable[[float], str]) -> str:
    """Return a change with its sign, as `form` writes its size."""
    sign = "-" if change < 0 else "+"
    return sign + form(abs(change))


def format_given(value: _Value | None, form: Callable[[_Value], str], instead: str = "") -> str:
    """Return a value as `form` writes it; `instead` where there is none, or nothing of it."""
    return form(value) if value else instead


def mention(template: str, value: object) -> str:
    """Return a clause that names a value, in braces; no clause where there is none."""
    return format_given(value, template.format)


def shorten(text: str) -> str:
    """Return the beginning of a text, as a refusal shows it."""
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def divide(value: float, by: float, otherwise: float = 0.0) -> float:
    """Return a quotient; `otherwise` where there is nothing to divide by."""
    return value / by if by else otherwise


def format_count(value: float) -> str:
    """Return a count with k, M, B, T or P, like 235093634560 as 235.1B."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def is_whole_number(text: str) -> bool:
    """Return whether a text is a whole number in plain digits, of a size that numbers have."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def whole_number(text: str, otherwise: int = 0) -> int:
    """Return the whole number that a text is; `otherwise` where it is none."""
    return int(text) if is_whole_number(text) else otherwise


def plural(count: float, noun: str) -> str:
    """Return a count with its noun: 1 step, 2 steps, 1,258 launches; nouns take s, or es."""
    number = f"{count:,.0f}"
    if number == "1":
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


class SourceKind(StrEnum):
    """How far a number may be trusted, best first."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATASHEET = "datasheet"
    ASSUMED = "assumed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sourced:
    """A value in SI units, the kind of evidence for it, and the evidence itself in words."""

    value: float
    kind: SourceKind
    source: str
