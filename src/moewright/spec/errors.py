"""Refusals of input, and foreign text made safe to print in them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NewType, TextIO
from unicodedata import category

# Text of several lines; every other text that a file holds is one line.
Paragraph = NewType("Paragraph", str)
NO_TEXT = Paragraph("")
# Text word for word, as a file or a process had it: it is escaped where it is shown.
Verbatim = NewType("Verbatim", str)
NOTHING = Verbatim("")

# Marks that turn the direction of text, so that a line reads otherwise than it is.
_BIDI_CONTROLS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
# Control characters (line ends among them), lone surrogates, separators of lines and paragraphs.
_CONTROL_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")


def is_control(letter: str) -> bool:
    """Return whether a character ends a line, commands a terminal, or turns text around."""
    return category(letter) in _CONTROL_CATEGORIES or letter in _BIDI_CONTROLS


def has_controls(text: str) -> bool:
    """Return whether text holds what no line of text may hold: control characters and the like."""
    return not text.isprintable() and any(map(is_control, text))


def escape_controls(text: str) -> str:
    r"""Return text with everything that does not print written out, such as \x1b or \u202e.

    Terminal escapes, marks that turn the direction of text, line ends and lone surrogates are
    among them; escaping twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines, on standard output where no stream is given, and flush them.

    Line ends stay; what else does not print is written out.
    """
    stream = stream or sys.stdout
    lines = map(escape_controls, text.removesuffix("\n").split("\n"))
    print("\n".join(lines), file=stream, flush=True)


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
