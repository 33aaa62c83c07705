"""A strict reader of a table of fields.

Every refusal names the field ("config.json: rope_scaling.factor"), its value, the rule and the
nearest legal value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

# Largest sizes that are read as meant; a config beyond them is a mistake or an attack.
MAX_LAYERS = 1024
MAX_HIDDEN = 2**17
MAX_FFN = 2**20
MAX_HEADS = 4096
MAX_HEAD_DIM = 8192
MAX_EXPERTS = 2**16
MAX_VOCAB = 2**24
MAX_POSITION = 2**30

_SHOWN_LENGTH = 60  # of a value in a refusal of one line

T = TypeVar("T")


class FieldReader:
    """A table that remembers which of its fields were read, so that the others can be named.

    `where` locates the table ("config.json"). Several names in one read are spellings of one field;
    two of them that are there must agree. Every method that reads raises BadInput for a value it
    cannot take, and for a field that is missing and has no default.
    """

    __slots__ = ("_data", "_read_names", "where")

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self._read_names: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def has_value(self, *names: str) -> bool:
        """Whether one of the spellings is there and not null."""
        return any(self._data.get(name) is not None for name in names)

    def integer(
        self, *names: str, low: int, high: int, default: int | None = None, bound: str = ""
    ) -> int:
        """Read a whole number in low..high; `bound` says in words what `high` stands for."""
        name, value = self._read(names)
        if value is None:
            return self._default(name, default)
        if _is_whole_float(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            nearest = ""
            if _is_number(value):
                nearest = str(_clamp(round(value), low, high))
            raise self.refusal(name, f"must be a whole number in {low}..{high}", nearest)
        if not low <= value <= high:
            rule = f"must be in {low}..{high}"
            if bound and value > high:
                rule = f"must be at most {bound}={high}"
            raise self.refusal(name, rule, str(_clamp(value, low, high)))
        return value

    def number(self, *names: str, low: float, high: float, default: float | None = None) -> float:
        """Read a finite number in low..high."""
        name, value = self._read(names)
        if value is None:
            return self._default(name, default)
        if not _is_number(value):
            nearest = "" if default is None else f"{default:g}"
            raise self.refusal(name, "must be a finite number", nearest)
        if not low <= value <= high:
            rule = f"must be in {low:g}..{high:g}"
            raise self.refusal(name, rule, f"{_clamp(value, low, high):g}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Read true or false."""
        _, value = self._read((name,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "must be true or false", str(bool(value)).lower())
        return value

    def choice(self, *names: str, choices: Sequence[str], default: str | None = None) -> str:
        """Read one of `choices`."""
        name, value = self._read(names)
        if value is None:
            return self._default(name, default)
        if not isinstance(value, str) or value not in choices:
            nearest = ""
            if isinstance(value, str):
                nearest = closest_match(value, choices)
            raise self.refusal(
                name, f"must be one of {', '.join(choices)}", nearest or (default or "")
            )
        return value

    def table(self, name: str) -> FieldReader | None:
        """Read a table inside this one, located as "where: name"; None when absent or null."""
        _, value = self._read((name,))
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(name, "must be a table", "null")
        return FieldReader(value, f"{self.where}: {name}")

    def sequence(self, name: str, *, max_length: int) -> tuple[Any, ...] | None:
        """Read a list of at most `max_length` entries; None when absent or null."""
        _, value = self._read((name,))
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.refusal(name, "must be a list", "[]")
        if len(value) > max_length:
            raise self.refusal(name, f"must have at most {max_length} entries", str(max_length))
        return tuple(value)

    def require_neutral(self, name: str, *allowed: Any) -> None:
        """Refuse a field that changes the model: it must be absent, null or one of `allowed`."""
        _, value = self._read((name,))
        if value is None or any(_is_same(value, legal) for legal in allowed):
            return
        legal_values = " or ".join(_format(legal) for legal in allowed or (None,))
        raise self.refusal(name, "asks for what moewright does not model", legal_values)

    def ignore(self, *names: str) -> None:
        """Count fields as read that say nothing about the shape of the model."""
        self._read_names.update(names)

    def unread_names(self) -> tuple[str, ...]:
        """Return the names in the table that were not read, sorted."""
        return tuple(sorted(set(self._data) - self._read_names))

    def raw_value(self, name: str) -> Any:
        """Return a value as it is, without counting it as read."""
        return self._data.get(name)

    def refusal(self, name: str, rule: str, nearest: str = "") -> BadInput:
        """Build the error that refuses the field's value."""
        joint = "." if ": " in self.where else ": "
        value = ""
        if name in self._data:
            value = _format(self._data[name])
        field = f"{self.where}{joint}{_clip(name)}"
        return BadInput(Reason(field=field, value=value, rule=rule, nearest=nearest))

    def _read(self, names: Sequence[str]) -> tuple[str, Any]:
        """Return the spelling that is there and its value."""
        self._read_names.update(names)
        present = [name for name in names if self._data.get(name) is not None]
        if not present:
            return names[0], None
        first = present[0]
        for other in present[1:]:
            if self._data[other] != self._data[first]:
                raise self.refusal(other, f"disagrees with {first}", _format(self._data[first]))
        return first, self._data[first]

    def _default(self, name: str, default: T | None) -> T:
        if default is None:
            raise self.refusal(name, "is missing")
        return default


def nearest_divisor(total: int, target: int) -> str:
    """Return the divisor of `total` nearest to `target`."""
    divisors = [n for n in range(1, min(total, MAX_FFN) + 1) if total % n == 0]
    return str(min(divisors, key=lambda n: abs(n - target)))


def _clamp(value: Any, low: Any, high: Any) -> Any:
    return min(max(value, low), high)


def _is_whole_float(value: object) -> bool:
    # Beyond 2^53 a float is no exact whole number.
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**53


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # The bound first: isfinite of an int beyond the largest float raises OverflowError.
    return abs(value) < 2**63 and math.isfinite(value)


def _is_same(value: Any, legal: Any) -> bool:
    """Whether the values are equal; 1 and true are not."""
    return bool(value == legal) and isinstance(value, bool) == isinstance(legal, bool)


def _format(value: object) -> str:
    if isinstance(value, dict):  # its values may be nested without end
        return f"a table of {len(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return _clip(f'"{value}"')  # "4" is no number, and should not look like one
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    # Python 3.11 refuses to write an int of more than 4,300 digits.
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a huge integer"
    return _clip(str(value))


def _clip(text: str) -> str:
    if len(text) <= _SHOWN_LENGTH:
        return text
    return f"{text[: _SHOWN_LENGTH - 3]}..."
