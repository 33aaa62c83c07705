"""The options of a launch command, and which of them were read."""

from __future__ import annotations

from collections.abc import Mapping

from moewright.intake.megatron.bash import UNKNOWN_VALUE
from moewright.intake.megatron.bash_expansion import OUTPUT_PREFIX
from moewright.spec.errors import BadInput, Reason


class Arguments:
    """A command's options; it remembers which were read, so that the others can be named.

    The values were checked against the parser's types before (launch.find_launch). To read a value
    that is only known when the script runs raises BadInput.
    """

    def __init__(self, options: Mapping[str, tuple[str, ...]]) -> None:
        self.options = options
        self.read_names: set[str] = set()

    def has(self, name: str) -> bool:
        self.read_names.add(name)
        return name in self.options

    def ignore(self, *names: str) -> None:
        """Count options as read that change nothing by themselves."""
        self.read_names.update(names)

    def refuse_unplanned(self, meanings: Mapping[str, str]) -> None:
        """Refuse the options in `meanings`, which says what each asks for.

        Raises:
            BadInput: one of them is there.
        """
        for name, meaning in meanings.items():
            if self.has(name):
                raise BadInput(Reason(field=name, rule=f"{meaning} cannot be planned here"))

    def values(self, name: str, *default: str) -> tuple[str, ...]:
        """Return all values of an option.

        Raises:
            BadInput: one of them is only known when the script runs.
        """
        if not self.has(name):
            return default
        for value in self.options[name]:
            if unknown := UNKNOWN_VALUE.search(value):
                variable = unknown[1]
                if variable.startswith(OUTPUT_PREFIX):
                    program = variable.removeprefix(OUTPUT_PREFIX)
                    rule = f"follows from what {program} prints, which only running tells"
                    nearest = "a number in the script in its place"
                    raise BadInput(Reason(field=name, rule=rule, nearest=nearest))
                rule = (
                    f"takes the value of {variable}, which only running the script tells; "
                    "set it in the environment"
                )
                nearest = f"{variable}=... before this command"
                raise BadInput(Reason(field=name, rule=rule, nearest=nearest))
        return self.options[name]

    def text(self, name: str, default: str = "") -> str:
        return next(iter(self.values(name)), default)

    def integer(self, name: str, default: int = 0) -> int:
        return int(self.text(name)) if self.has(name) else default

    def size(self, name: str, default: int = 1) -> int:
        """Return a whole number from 1.

        Raises:
            BadInput: it is smaller.
        """
        size = self.integer(name, default)
        if size < 1:
            raise BadInput(
                Reason(field=name, value=str(size), rule="must be at least 1", nearest="1")
            )
        return size

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.text(name)) if self.has(name) else default

    @property
    def unread_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.options if name not in self.read_names)
