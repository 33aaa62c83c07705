"""The words that stand behind a script's name: what it calls them, and what it compares them with.

A script that takes twenty of them is refused once, with all of their names and the values that its
conditions know, and not for one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moewright.spec.errors import BadInput, Reason

_FUNCTION = re.compile(r"^\s*(?:function\s+)?[\w-]+\s*\(\)\s*\{.*?^\s*\}", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_SHIFTS = re.compile(r"(?m)(^|[;&|\s])(shift|getopts)\b")
_NAMED = re.compile(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?\$\{?(\d+)\}?[\"']?\s*(?:;|$)")
_USED = re.compile(r"\$(\d)|\$\{(\d+)\}")
_COMPARED = re.compile(r"\[\[?\s+[\"']?\$\{?(\w+)\}?[\"']?\s+={1,2}\s+[\"']?([\w.+-]+)[\"']?\s+\]")
_ASSIGNED = r"(?m)^\s*(?:export\s+)?{}="
_UNSET = "takes the value of"  # a variable that no command of the script sets
_SETTINGS = re.compile(r"--set (\w+)=\.\.\.(?: --set \w+=\.\.\.)*")
_LEAVES = "the script leaves at line"
_REQUEST = '--script-args "..."'
_FEW = 2  # arguments, which a refusal names one by one
_MOST_VALUES = 12
_MOST_LENGTH = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptArgument:
    """A positional argument: its place, its variable ("" for none), the values that are known."""

    place: int
    name: str = ""
    values: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return its name with its values, as a user has to write them in its place."""
        name = self.name or f"argument-{self.place}"
        return f"{name}={'|'.join(self.values[:_MOST_VALUES])}" if self.values else name


def list_arguments(text: str) -> tuple[ScriptArgument, ...]:
    """Return the arguments that a script reads by their place; () for one that moves them."""
    plain = _COMMENT.sub(r"\1", _FUNCTION.sub("", text))
    if _SHIFTS.search(plain):
        return ()
    names = {int(place): name for name, place in _NAMED.findall(plain)}
    places = {int(short or long) for short, long in _USED.findall(plain)} - {0}
    compared: dict[str, dict[str, None]] = {}
    for name, value in _COMPARED.findall(plain):
        compared.setdefault(name, {})[value] = None
    return tuple(
        ScriptArgument(
            place=place,
            name=names.get(place, ""),
            values=tuple(compared.get(names.get(place, ""), compared.get(str(place), ()))),
        )
        for place in range(1, max(places, default=0) + 1)
    )


def complete_refusal(refusal: BadInput, text: str, words: Sequence[str]) -> BadInput:
    """Return a refusal of a script with all that its arguments have to say.

    `words` are the arguments that were. Where one is missing, all are named; where the script does
    not know the value of one, and a variable has none therefore, that is what is wrong.
    """
    arguments = list_arguments(text)
    if not arguments:
        return refusal
    reasons = tuple(_complete(reason, text, arguments, words) for reason in refusal.reasons)
    return refusal if reasons == refusal.reasons else BadInput(*reasons)


def _complete(
    reason: Reason, text: str, arguments: Sequence[ScriptArgument], words: Sequence[str]
) -> Reason:
    if reason.nearest == _REQUEST and len(arguments) > _FEW:
        return replace(reason, rule=f"{reason.rule}; {_describe(arguments)}")
    is_choice = any(len(item.values) > 1 and item.place > len(words) for item in arguments)
    if _LEAVES in reason.rule and is_choice:
        return replace(reason, rule=f"{reason.rule}; {_describe(arguments)}", nearest=_REQUEST)
    variable = _SETTINGS.fullmatch(reason.nearest)
    if variable is None or not reason.rule.startswith(_UNSET):
        return reason
    if not re.search(_ASSIGNED.format(variable[1]), text):
        return reason
    for argument in _list_unknown(arguments, words):
        value = words[argument.place - 1]
        values = ", ".join(argument.values[:_MOST_VALUES])
        rule = (
            f"is argument {argument.place} of the script, which knows {values}; without one of "
            f"them {variable[1]} is not set"
        )
        name = argument.name or f"argument {argument.place}"
        return Reason(field=name, value=value[:60], rule=rule, nearest=argument.values[0])
    if is_choice:
        rule = f"is {variable[1]}, which an argument decides; {_describe(arguments)}"
        return Reason(field=reason.field, rule=rule, nearest=_REQUEST)
    return reason


def _describe(arguments: Sequence[ScriptArgument]) -> str:
    names = " ".join(argument.describe() for argument in arguments)[:_MOST_LENGTH]
    return f"the script takes {len(arguments)} arguments: {names}"


def _list_unknown(
    arguments: Sequence[ScriptArgument], words: Sequence[str]
) -> Iterator[ScriptArgument]:
    """Yield the arguments whose value is none of several that the script compares it with."""
    for argument in arguments:
        is_choice = len(argument.values) > 1 and argument.place <= len(words)
        if is_choice and words[argument.place - 1] not in argument.values:
            yield argument
