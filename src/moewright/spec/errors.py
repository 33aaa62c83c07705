"""Refusals of input: a Reason names a broken rule, and BadInput carries Reasons to the user."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.spec.printable import escape_controls

# What errors say when a process gets no more memory.
#
# Imports nothing: there may be no memory to import with.

# Of Python, the loader of libraries, torch's allocator of host memory, and threads without a stack.
_SIGNS = (
    "failed to map segment",
    "annot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",
)


def lacks_memory(error: BaseException) -> bool:
    """Tell whether an error says that the host has no memory left, or no room to map more."""
    text = str(error)
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """The reason why a value is not legal: field, value, broken rule, and nearest legal value."""

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
    """The exception for input that a user can mend.

    Its text is one line: the first Reason, and how many more there are. The command line prints it
    and exits with 2.
    """

    def __init__(self, *reasons: Reason) -> None:
        if not reasons:
            raise ValueError("BadInput needs at least one Reason")
        self.reasons = reasons
        message = escape_controls(" ".join(str(reasons[0]).split()))
        if len(reasons) > 1:
            message += f" (and {len(reasons) - 1} more)"
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows of it: each reason on a line, and no frames."""
        return [f"BadInput: {escape_controls(str(reason))}" for reason in self.reasons]

    def __reduce__(self) -> tuple[type[BadInput], tuple[Reason, ...]]:
        """Return how it is copied to another process: by its reasons."""
        return BadInput, self.reasons
