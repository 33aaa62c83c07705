"""The settings of a configuration as leaves that readers take; what nobody took is unread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from moewright.intake.megatron.settings import Value


class SettingTree:
    """Leaves by their dotted names; a reader cannot look at a value without taking it."""

    def __init__(self, settings: Mapping[str, Value]) -> None:
        self._settings = dict(settings)
        self._taken: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all leaves; a name alone tells no value."""
        return tuple(self._settings)

    @property
    def taken_count(self) -> int:
        """Return how many leaves readers took."""
        return len(self._taken)

    def matches(self, pattern: str) -> bool:
        """Whether a leaf has a name of this pattern, in which * stands for anything."""
        return any(fnmatchcase(name, pattern) for name in self._settings)

    def take(self, name: str, default: Value = "") -> Value:
        """Return the value of a leaf."""
        if name not in self._settings:
            return default
        self._taken.add(name)
        return self._settings[name]

    def take_text(self, name: str, default: str = "") -> str:
        """Return the text of a leaf; the items of a list with commas between them."""
        value = self.take(name, default)
        return value if isinstance(value, str) else ",".join(value)

    def take_section(self, section: str, others: Iterable[str]) -> Iterator[tuple[str, Value]]:
        """Yield the leaves right in a section but those that match one of `others`.

        In a section's name * is one part of a name.
        """
        pattern = re.compile(re.escape(section).replace(r"\*", "[^.]+"))
        for name in self._settings:
            is_inside = pattern.fullmatch(name.rpartition(".")[0])
            is_other = any(fnmatchcase(name, other) for other in others)
            if is_inside and not is_other and name not in self._taken:
                yield name, self.take(name)

    def take_below(self, prefix: str) -> dict[str, str]:
        """Return the texts of the leaves below a section, by the rest of their names."""
        names = [name for name in self._settings if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.take_text(name) for name in names}

    def left(self) -> dict[str, Value]:
        """Return the leaves that nobody took."""
        return {name: value for name, value in self._settings.items() if name not in self._taken}
