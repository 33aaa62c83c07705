"""Values that only running a script tells, as they stand inside its words.

Such a value stands between zero bytes: the variable that would answer it, what it depends on, and
the words that it may stand for, where the script says them. A variable that nothing sets has no
origin; it is empty where a decision needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNKNOWN_VALUE = re.compile("\0([^\0\1]*)(?:\1([^\0\1]*)(?:\1([^\0]*))?)?\0")
_BLANK = "\2"  # words are split at blanks, and an unknown value is one of them
_MOST_LENGTH = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownValue:
    """What is known of a value: its variable, what it depends on, and what it may be.

    `origin` reads behind "depends on": "what env.sh sets", "whether `grep` succeeds".
    """

    name: str = ""
    origin: str = ""
    words: tuple[str, ...] = ()

    def mark(self) -> str:
        """Return the value as it stands in a word."""
        parts = [self.name, self.origin, " ".join(map(show_unknown, self.words))[:_MOST_LENGTH]]
        while len(parts) > 1 and not parts[-1]:
            parts.pop()
        text = "\1".join(part.replace("\0", "").replace("\1", "") for part in parts)
        return "\0" + "".join(_BLANK if letter.isspace() else letter for letter in text) + "\0"


def find_unknown(text: str) -> UnknownValue | None:
    """Return the first unknown value in a text, one with an origin before others."""
    values = [_read(match) for match in UNKNOWN_VALUE.finditer(text)]
    return next((value for value in values if value.origin), next(iter(values), None))


def show_unknown(text: str) -> str:
    """Return a text with the names of its unknown values in their places."""
    return UNKNOWN_VALUE.sub(lambda match: f"${match[1]}" if match[1] else "$(...)", text)


def name_unknown(text: str, name: str) -> str:
    """Return a value with the variable that it is assigned to, where it had none."""
    match = UNKNOWN_VALUE.fullmatch(text)
    if match is None or match[1]:
        return text
    value = _read(match)
    return UnknownValue(name=name, origin=value.origin, words=value.words).mark()


def _read(match: re.Match[str]) -> UnknownValue:
    name, origin, words = (part or "" for part in match.groups())
    return UnknownValue(
        name=name,
        origin=origin.replace(_BLANK, " "),
        words=tuple(words.split(_BLANK)) if words else (),
    )
