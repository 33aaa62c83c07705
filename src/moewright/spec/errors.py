"""What is said when something cannot be: a Reason for a rule, BadInput for the user who broke
it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a value is not legal: the field, what it was, the rule, and the nearest value that is."""

    field: str
    rule: str
    value: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        given = f"{self.field}={self.value}" if self.value else self.field
        tail = f"; nearest legal value: {self.nearest}" if self.nearest else ""
        return f"{given}: {self.rule}{tail}"


class BadInput(Exception):
    """Input a user can mend. Its text is one line; the command line prints it and exits with 2."""

    def __init__(self, *reasons: Reason) -> None:
        if not reasons:
            raise ValueError("BadInput needs at least one Reason")
        self.reasons = reasons
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        super().__init__(" ".join(str(reasons[0]).split()) + more)
