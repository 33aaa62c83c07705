"""How a refusal is told: a Reason names a broken rule, BadInput tells the user who broke it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a value is not legal: the field, its value, the rule, and the nearest legal value."""

    field: str
    rule: str
    value: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        text = self.field
        if self.value:
            text += f"={self.value}"
        text += f": {self.rule}"
        if self.nearest:
            text += f"; nearest legal value: {self.nearest}"
        return text


class BadInput(Exception):
    """Input that a user can mend.

    The text is one line; the command line prints it and exits with 2.
    """

    def __init__(self, *reasons: Reason) -> None:
        if not reasons:
            raise ValueError("BadInput needs at least one Reason")
        self.reasons = reasons
        message = " ".join(str(reasons[0]).split())
        if len(reasons) > 1:
            message += f" (and {len(reasons) - 1} more)"
        super().__init__(message)
