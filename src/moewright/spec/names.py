"""The name that a misspelt one most likely means: its family decides first, then its letters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from enum import IntEnum

# The least SequenceMatcher ratio at which two words, two names of one family, and two other names
# count as near.
_WORD_CUTOFF = 0.65
_FAMILY_CUTOFF = 0.4
_NAME_CUTOFF = 0.5
_EQUAL_FAMILY_WORDS = 3

_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)*")


class _Likeness(IntEnum):
    """The degrees to which a word resembles another."""

    NONE = 0
    MISSPELT = 1
    SAME = 2  # or one begins the other


def closest_match(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate nearest to `name`, letter case aside; "" where none is near.

    The first word of letters tells the family: "qwen" of qwen3-30b, "h" of H800x. Among candidates
    of that family, the one that shares most words and numbers wins, then the one with the fewest
    others, of which an equal family makes up for some, then the one whose letters are most alike.
    Letters alone decide where no candidate is of the family.
    """
    near = [(closeness, word) for word in candidates if (closeness := _closeness(name, word))]
    near.sort(key=lambda pair: pair[0])
    return near[-1][1] if near else ""


def _closeness(name: str, candidate: str) -> tuple[float, ...]:
    """Return a sort key that grows with closeness; () where the candidate is not near."""
    words = _WORDS.findall(name.casefold())
    candidate_words = _WORDS.findall(candidate.casefold())
    letters = SequenceMatcher(None, candidate.casefold(), name.casefold(), autojunk=False).ratio()
    first = next((word for word in words if word.isalpha()), "")
    family = _best_likeness(first, candidate_words)
    if family is _Likeness.NONE:
        if letters >= _NAME_CUTOFF:
            return (family, letters)
        return ()
    if letters < _FAMILY_CUTOFF:
        return ()
    shared = sum(_best_likeness(word, candidate_words) is not _Likeness.NONE for word in words)
    # "olmoe" is nearer to OLMoE-1B-7B than to OLMo-3-7B, which has fewer words.
    others = len(candidate_words) - _EQUAL_FAMILY_WORDS * (first in candidate_words)
    return (family, shared, -others, letters)


def _best_likeness(word: str, others: Sequence[str]) -> _Likeness:
    return max((_likeness(word, other) for other in others), default=_Likeness.NONE)


def _likeness(word: str, other: str) -> _Likeness:
    if word == other:
        return _Likeness.SAME
    shorter = min(len(word), len(other))
    if shorter < 2 or not word.isalpha() or not other.isalpha():
        return _Likeness.NONE
    if word.startswith(other) or other.startswith(word):
        return _Likeness.SAME
    if SequenceMatcher(None, word, other).ratio() >= _WORD_CUTOFF:
        return _Likeness.MISSPELT
    return _Likeness.NONE
