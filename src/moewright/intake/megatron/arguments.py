"""The options of a command, asked for one after another."""

from __future__ import annotations

from collections.abc import Mapping

from moewright.intake.megatron.bash import UNKNOWN_VALUE
from moewright.spec.errors import BadInput, Reason


class Arguments:
    """The options of a command; remembers which were asked for, so that the others can be named."""

    def __init__(self, options: Mapping[str, tuple[str, ...]]) -> None:
        self.options = options
        self.read_names: set[str] = set()

    def has(self, name: str) -> bool:
        self.read_names.add(name)
        return name in self.options

    def values(self, name: str, *default: str) -> tuple[str, ...]:
        """Its values; BadInput where one of them is only known when the script runs."""
        if not self.has(name):
            return default
        for value in self.options[name]:
            if lacking := UNKNOWN_VALUE.search(value):
                rule = f"takes the value of {lacking[1]}, which only running the script tells; set it in the environment"
                raise BadInput(
                    Reason(field=name, rule=rule, nearest=f"{lacking[1]}=... before this command")
                )
        return self.options[name]

    def text(self, name: str, default: str = "") -> str:
        return next(iter(self.values(name)), default)

    def integer(self, name: str, default: int = 0) -> int:
        return int(self.text(name)) if self.has(name) else default

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.text(name)) if self.has(name) else default

    @property
    def unread_names(self) -> tuple[str, ...]:
        """Options that nothing here asked for."""
        return tuple(name for name in self.options if name not in self.read_names)
