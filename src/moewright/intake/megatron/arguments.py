"""The options of a command, asked for one after another."""

from __future__ import annotations

from collections.abc import Mapping

from moewright.intake.megatron.bash import MISSING
from moewright.spec.errors import BadInput, Reason


class Given:
    """The options of a command; remembers which were asked for, so that the others can be named."""

    def __init__(self, options: Mapping[str, tuple[str, ...]]) -> None:
        self.options = options
        self.asked: set[str] = set()

    def has(self, name: str) -> bool:
        self.asked.add(name)
        return name in self.options

    def many(self, name: str, *otherwise: str) -> tuple[str, ...]:
        """Its values; BadInput where one of them is only known when the script runs."""
        if not self.has(name):
            return otherwise
        for value in self.options[name]:
            if lacking := MISSING.search(value):
                rule = f"takes the value of {lacking[1]}, which only running the script tells; set it in the environment"
                raise BadInput(
                    Reason(field=name, rule=rule, nearest=f"{lacking[1]}=... before this command")
                )
        return self.options[name]

    def text(self, name: str, otherwise: str = "") -> str:
        return next(iter(self.many(name)), otherwise)

    def whole(self, name: str, otherwise: int = 0) -> int:
        return int(self.text(name)) if self.has(name) else otherwise

    def real(self, name: str, otherwise: float = 0.0) -> float:
        return float(self.text(name)) if self.has(name) else otherwise

    @property
    def past(self) -> tuple[str, ...]:
        """Options that nothing here asked for."""
        return tuple(name for name in self.options if name not in self.asked)
