"""Reading a table of fields strictly: every refusal names the field, what it was, the rule and the
nearest value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from moewright.codec import closest_match
from moewright.spec.errors import BadInput, Reason

# Largest sizes that are read as meant; a config beyond them is a mistake or an attack.
MAX_LAYERS = 1024
MAX_HIDDEN = 2**17
MAX_FFN = 2**20
MAX_HEADS = 4096
MAX_HEAD_DIM = 8192
MAX_EXPERTS = 2**16
MAX_VOCAB = 2**24
MAX_POSITION = 2**30

_SHOWN_LENGTH = 60

T = TypeVar("T")


class FieldReader:
    """A table whose reads are remembered, so that what nobody asked for can be named at the end.

    `where` locates the table ("config.json"). Several names in one read are spellings of one field.
    """

    __slots__ = ("_data", "_used", "where")

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self._used: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def has_value(self, *names: str) -> bool:
        """Whether one of the spellings is there and not null."""
        return any(self._data.get(name) is not None for name in names)

    def integer(
        self, *names: str, low: int, high: int, default: int | None = None, bound: str = ""
    ) -> int:
        """A whole number in low..high; `bound` says in words what `high` stands for. No default:
        required."""
        name, value = self._read(names)
        if value is None:
            return self._default(name, default)
        if (
            isinstance(value, float)
            and value.is_integer()
            and math.isfinite(value)
            and abs(value) < 2**53
        ):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            close = str(min(max(round(value), low), high)) if _is_number(value) else ""
            raise self.refusal(name, f"must be a whole number in {low}..{high}", close)
        if not low <= value <= high:
            rule = (
                f"must be at most {bound}={high}"
                if bound and value > high
                else f"must be in {low}..{high}"
            )
            raise self.refusal(name, rule, str(min(max(value, low), high)))
        return value

    def number(self, *names: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in low..high."""
        name, value = self._read(names)
        if value is None:
            return self._default(name, default)
        if not _is_number(value):
            raise self.refusal(
                name, "must be a finite number", "" if default is None else f"{default:g}"
            )
        if not low <= value <= high:
            raise self.refusal(
                name, f"must be in {low:g}..{high:g}", f"{min(max(value, low), high):g}"
            )
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        _, value = self._read((name,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "must be true or false", str(bool(value)).lower())
        return value

    def choice(self, *names: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of `choices`."""
        name, value = self._read(names)
        if value is None:
            return self._default(name, default)
        if not isinstance(value, str) or value not in choices:
            close = closest_match(value, choices) if isinstance(value, str) else ""
            raise self.refusal(
                name, f"must be one of {', '.join(choices)}", close or (default or "")
            )
        return value

    def table(self, name: str) -> FieldReader | None:
        """A table inside this one, located as "where: name"; None when absent or null."""
        _, value = self._read((name,))
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(name, "must be a table", "null")
        return FieldReader(value, f"{self.where}: {name}")

    def sequence(self, name: str, *, max_length: int) -> tuple[Any, ...] | None:
        """A list of at most `most` entries; None when absent or null."""
        _, value = self._read((name,))
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.refusal(name, "must be a list", "[]")
        if len(value) > max_length:
            raise self.refusal(name, f"must have at most {max_length} entries", str(max_length))
        return tuple(value)

    def require_neutral(self, name: str, *allowed: Any) -> None:
        """A field that must be absent, null, or one of the values that leave the model as it is."""
        _, value = self._read((name,))
        if value is None:
            return
        if not any(
            value == legal and isinstance(value, bool) == isinstance(legal, bool)
            for legal in allowed
        ):
            shown = " or ".join(_text(legal) for legal in (*allowed, None)[: max(1, len(allowed))])
            raise self.refusal(name, "asks for what moewright does not model", shown)

    def ignore(self, *names: str) -> None:
        """Known fields that say nothing about the shape of the model."""
        self._used.update(names)

    def unread_names(self) -> tuple[str, ...]:
        """Names in the table that no read asked for, sorted."""
        return tuple(sorted(set(self._data) - self._used))

    def raw_value(self, name: str) -> Any:
        """The raw value, not counted as a read."""
        return self._data.get(name)

    def refusal(self, name: str, rule: str, closest: str = "") -> BadInput:
        joint = "." if ": " in self.where else ": "
        given = _text(self._data[name]) if name in self._data else ""
        return BadInput(
            Reason(
                field=f"{self.where}{joint}{_clip(name)}", value=given, rule=rule, nearest=closest
            )
        )

    def _read(self, names: Sequence[str]) -> tuple[str, Any]:
        """The spelling that is there and its value; two spellings must agree."""
        self._used.update(names)
        there = [name for name in names if self._data.get(name) is not None]
        if not there:
            return names[0], None
        for other in there[1:]:
            if self._data[other] != self._data[there[0]]:
                raise self.refusal(other, f"disagrees with {there[0]}", _text(self._data[there[0]]))
        return there[0], self._data[there[0]]

    def _default(self, name: str, default: T | None) -> T:
        if default is None:
            raise self.refusal(name, "is missing")
        return default


def nearest_divisor(total: int, target: int) -> str:
    """The divisor of `total` nearest to `wish`."""
    divisors = [n for n in range(1, min(total, MAX_FFN) + 1) if total % n == 0]
    return str(min(divisors, key=lambda n: abs(n - target)))


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 and math.isfinite(value)


def _text(value: object) -> str:
    if isinstance(value, list | tuple | dict):  # may be nested without end
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return "a huge integer"
    if isinstance(value, str):
        return _clip(f'"{value}"')  # "4" is no number, and should not look like one
    words = {None: "null", True: "true", False: "false"}
    return _clip(words[value] if value is None or isinstance(value, bool) else str(value))


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."
