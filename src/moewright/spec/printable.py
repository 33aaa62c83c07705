"""Characters that print, and those that command a terminal or end a line."""

from __future__ import annotations

import sys
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
