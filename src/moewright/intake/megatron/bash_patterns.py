"""Bash's patterns: whether a value is of one, what it strips from a value, what it replaces in it.

A pattern is `*`, `?`, sets in brackets and letters; each operation takes a time that grows with the
length of the value, for a segment between two `*` is taken where it is found first. The regular
expressions of `=~` may backtrack without end: those that could are searched in a fork.
"""

from __future__ import annotations

import re
from functools import cache

from moewright.codec.foreign import budget, read_apart

_TOKEN = re.compile(r"\[[!^]?\]?(?:\[:\w+:\]|[^]])*\]|.", re.DOTALL)
_SET = re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|[^]])*)\]", re.DOTALL)
_CLASS = re.compile(r"\[:(\w+):\]|(.)", re.DOTALL)
_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r" \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}
_NOTHING = r"(?!)"
# With one of these a search takes steps in the square of the value's length at most; with two of
# them, such as (a|aa)+, it may double them with each letter.
_CHOICE = re.compile(r"[*+?|]")
_SHORT_EXPRESSION = 200
_SHORT_VALUE = 1000


def matches_pattern(value: str, pattern: str) -> bool:
    """Return whether all of a value is of a pattern."""
    return _match(_segments(pattern), r"\Z", value) == len(value)


def quote_pattern(text: str) -> str:
    """Return the pattern that a text alone is of."""
    return re.sub(r"([*?[])", r"[\1]", text)


def strip_pattern(value: str, pattern: str, operation: str) -> str:
    """Return a value without the shortest or longest head (#, ##) or tail (%, %%) of a pattern."""
    is_longest = len(operation) == 2
    if operation[0] == "#":
        end = _find_end(_segments(pattern), value, is_longest=is_longest)
        return value if end is None else value[end:]
    end = _find_end(_reverse(pattern), value[::-1], is_longest=is_longest)
    return value if end is None else value[: len(value) - end]


def replace_pattern(value: str, pattern: str, by: str, operation: str) -> str:
    """Return a value with its first (/), all (//), leading (/#) or trailing (/%) match replaced.

    A match is the longest that begins where the first one does.
    """
    if operation == "/#":
        end = _find_end(_segments(pattern), value, is_longest=True)
        return value if end is None else by + value[end:]
    if operation == "/%":
        end = _find_end(_reverse(pattern), value[::-1], is_longest=True)
        return value if end is None else value[: len(value) - end] + by
    segments = _segments(pattern)
    head = _compile(segments[0])
    parts = []
    position = 0
    while pattern and position < len(value):
        # Where no match begins at the first head, none begins at a later one.
        start = head.search(value, position)
        begin = start.start() if start else len(value)
        end = _match(segments, "", value, begin)
        if end is None or end == begin:
            break
        parts += [value[position:begin], by]
        position = end
        if operation == "/":
            break
    return "".join((*parts, value[position:]))


def search_expression(expression: str, value: str, *, where: str) -> tuple[str, ...] | None:
    """Return the match of a regular expression in a value and its groups; None: there is none.

    Raises:
        BadInput: the search takes more time or memory than a search takes.
        re.error: it is no regular expression.
    """
    is_short = len(expression) <= _SHORT_EXPRESSION and len(value) <= _SHORT_VALUE
    if is_short and "{" not in expression and len(_CHOICE.findall(expression)) <= 1:
        return _search(expression, value)
    return _search_apart(expression, value, where)


@read_apart
def _search_apart(expression: str, value: str, where: str) -> tuple[str, ...] | None:
    with budget(where, len(value)):
        return _search(expression, value)


def _search(expression: str, value: str) -> tuple[str, ...] | None:
    match = re.search(expression, value)
    return None if match is None else (match[0], *(group or "" for group in match.groups()))


@cache
def _compile(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.DOTALL)


def _segments(pattern: str) -> tuple[str, ...]:
    """Return regular expressions for what stands before, between and behind the `*`."""
    return _join(_TOKEN.findall(pattern))


def _reverse(pattern: str) -> tuple[str, ...]:
    """Return the segments of the pattern that the reversed values are of."""
    return _join(_TOKEN.findall(pattern)[::-1])


def _join(tokens: list[str]) -> tuple[str, ...]:
    segments = [""]
    for token in tokens:
        if token == "*":
            segments.append("")
        else:
            segments[-1] += _translate(token)
    return tuple(segments)


def _translate(token: str) -> str:
    """Return a regular expression for what stands for one letter."""
    if token == "?":
        return "."
    match = _SET.fullmatch(token)
    if match is None:
        return re.escape(token)
    items = "".join(
        _CLASSES.get(name, "") or re.escape(letter).replace(r"\-", "-")
        for name, letter in _CLASS.findall(match[2])
    )
    text = f"[{'^' if match[1] else ''}{items}]"
    try:
        re.compile(text)
    except re.error:  # a range whose ends are the wrong way round
        return _NOTHING
    return text


def _find_end(segments: tuple[str, ...], value: str, *, is_longest: bool) -> int | None:
    """Return where the head of a value that is of a pattern ends; None: it has none."""
    if is_longest:
        return _match(segments, "", value)
    return _end(segments[0] + "".join(f"(?>.*?{segment})" for segment in segments[1:]), value)


def _match(segments: tuple[str, ...], behind: str, value: str, begin: int = 0) -> int | None:
    """Return where the longest match that starts at `begin` ends; None: there is none."""
    first, *inner = segments
    last = inner.pop() if inner else None
    middle = "".join(f"(?>.*?{segment})" for segment in inner)
    tail = "" if last is None else f".*{last}"
    return _end(first + middle + tail + behind, value, begin)


def _end(expression: str, value: str, begin: int = 0) -> int | None:
    match = _compile(expression).match(value, begin)
    return match.end() if match else None
