"""Texts that a script makes of a template: what `sed` writes where it puts plain words for others.

Anything else that a filter does is not followed, and what it writes stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from moewright.intake.megatron.unknown import UNKNOWN_VALUE

_QUIET = ("-e", "-E", "-r", "--expression")
_SPECIAL = re.compile(r"[\\^$.*\[\]+?(){}|&]")  # of a pattern or what takes its place


def apply_filter(
    words: Sequence[str], text: str | None, read: Callable[[str], str | None]
) -> str | None:
    """Return what `sed` makes of a text, or of the file that it names; None where not followed."""
    if not words or words[0] != "sed":
        return None
    operands = [word for word in words[1:] if word not in _QUIET]
    edits = [word for word in operands if _parse_edits(word) is not None]
    names = [word for word in operands if word not in edits]
    if not edits or len(names) > 1 or any(name.startswith("-") for name in names):
        return None
    if names:
        text = read(names[0])
    if text is None:
        return None
    for word in edits:
        for pattern, put, is_global in _parse_edits(word) or ():
            count = -1 if is_global else 1
            text = "".join(
                line.replace(pattern, put, count) for line in text.splitlines(keepends=True)
            )
    return text


def _parse_edits(word: str) -> tuple[tuple[str, str, bool], ...] | None:
    """Parse s/A/B/ and more of them behind semicolons; None where one is more than plain words."""
    edits = []
    for part in word.strip().split(";"):
        edit = part.strip()
        pieces = edit[2:].split(edit[1]) if len(edit) > 2 and edit[0] == "s" else []
        if len(pieces) != 3 or pieces[2] not in ("", "g") or not pieces[0]:
            return None
        is_known = UNKNOWN_VALUE.search(edit) is None
        if _SPECIAL.search(pieces[0]) or re.search(r"[\\&]", pieces[1]) or not is_known:
            return None
        edits.append((pieces[0], pieces[1], pieces[2] == "g"))
    return tuple(edits)
