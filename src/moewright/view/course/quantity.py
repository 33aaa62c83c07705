"""Quantities: numbers with a unit, as a page writes them, their sums and their ratios."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.units import format_bytes, format_count, format_seconds


class Unit(StrEnum):
    """The ways in which a number is written."""

    BYTES = "bytes"
    SECONDS = "seconds"
    COUNT = "count"  # 4,096
    SHORT = "short"  # 30.5B
    NUMBER = "number"  # three significant figures
    PERCENT = "percent"
    TIMES = "times"  # a ratio
    TEXT = "text"  # a word, as an answer gives it


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A number with its unit; a word has the number 0."""

    number: float
    unit: Unit
    word: str = ""

    def __str__(self) -> str:
        match self.unit:
            case Unit.BYTES:
                return format_bytes(self.number)
            case Unit.SECONDS:
                return format_seconds(self.number).replace(" us", " µs")
            case Unit.COUNT:
                return f"{self.number:,.0f}"
            case Unit.SHORT:
                return format_count(self.number)
            case Unit.PERCENT:
                return f"{self.number:.{_percent_decimals(self.number)}%}"
            case Unit.TEXT:
                return self.word
        return _format_number(self.number)

    def plus(self, other: Quantity, sign: int) -> Quantity:
        """Return the sum, or with a sign of -1 the difference, in this unit."""
        return Quantity(number=self.number + sign * other.number, unit=self.unit)

    def times(self, other: Quantity) -> Quantity:
        """Return the product, in the unit of the factor that has one."""
        unit = other.unit if self.unit in _BARE else self.unit
        return Quantity(number=self.number * other.number, unit=unit)

    def over(self, other: Quantity) -> Quantity:
        """Return the quotient; of two like quantities a ratio."""
        unit = self.unit if other.unit in _BARE else Unit.TIMES
        if self.unit is Unit.COUNT:
            unit = Unit.NUMBER
        return Quantity(number=self.number / other.number, unit=unit)


_BARE = (Unit.COUNT, Unit.NUMBER, Unit.TIMES, Unit.PERCENT, Unit.SHORT)


def _percent_decimals(share: float) -> int:
    return 0 if abs(share) >= 0.1 or share == 0 else 1


def _format_number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
