"""What refusals of a script ask for, followed as a user would, so that all of it is asked at once.

A reading stops at the first value that it lacks, and the next is only met once that value is there.
What a refusal asks for is therefore added with a typical value and the script read again, until
nothing is asked for; the user sees one line with everything. An answer that changes nothing is not
offered.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from moewright.codec.foreign import BeyondBudget
from moewright.spec.errors import BadInput, Reason

# What stands for "..." in what a refusal says to add, by a word of the name that it is for.
_TYPICAL = (
    ("num-layers|num_layers|nlayers", "32"),
    ("hidden-size|hidden_size", "4096"),
    ("num-attention-heads|num_attention_heads", "32"),
    ("seq-length|seq_length|seq_len|max_length", "4096"),
    ("global-batch|global_batch|gbs", "512"),
    ("vocab", "128000"),
    ("parallel-size|parallel_size|micro-batch|micro_batch|mbs", "1"),
    (r"=(tp|pp|cp|ep|vpp)(_size)?=|^(tp|pp|cp|ep|vpp)(_size)?=", "1"),
)
_OTHERWISE = "8"
_OPEN = "..."
_ARGUMENTS = "--script-args"
_HEADS = ("--on", "--set", "--model", "estimate", _ARGUMENTS)
_PAIR = 2  # a word and what stands behind it
_MOST_ROUNDS = 12  # readings for one refusal: a script that lacks more is asked for these first
_COUNT = re.compile(r"\d+x.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptAdditions:
    """What is given beside a script: devices, a model by name, arguments, and texts of --set."""

    devices: str
    model: str = ""
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def follow(self, reason: Reason) -> ScriptAdditions | None:
        """Return these with what a refusal asks for; None where it asks for nothing.

        Where it leaves a value open ("..."), a typical one stands for it.
        """
        words = _split(reason.nearest)
        if reason.field == "--on" and len(words) == 1:
            return replace(self, devices=words[0])
        if words[:1] == [_ARGUMENTS] and len(words) == _PAIR:
            return self._add_argument(reason)
        if words and words[0] in _HEADS:
            return self._add_words(words)
        option = reason.field.rpartition(" ")[2] if ": --" in reason.field else reason.field
        return self._correct(option.partition(" ")[0], words)

    def _add_words(self, words: list[str]) -> ScriptAdditions:
        """Return these with what stands behind each of the words that add something."""
        added = self
        for word, following in pairwise((*words, "")):
            if word == "--on":
                added = replace(added, devices=following)
            elif word in ("--model", "estimate"):
                added = replace(added, model=following)
            elif word == "--set":
                added = replace(added, settings=(*added.settings, _fill(following)))
        return added

    def _correct(self, option: str, words: list[str]) -> ScriptAdditions | None:
        """Return these with another value of an option, or with an option that goes with it."""
        is_option = option.startswith("--")
        is_name = is_option or ("." in option and not option.endswith(":"))
        if not words or not is_name:
            return None
        if words[0].startswith("--"):
            is_other = is_option and words[0] != option and len(words) > 1
            return (
                replace(self, settings=(*self.settings, "=".join(words[:2]))) if is_other else None
            )
        if len(words) > 1:
            return None
        return replace(self, settings=(*self.settings, f"{option}={words[0]}"))

    def _add_argument(self, reason: Reason) -> ScriptAdditions | None:
        """Return these with the argument of a script that a refusal asks for by its place."""
        place = re.search(r"argument (\d+)", reason.rule)
        if place is None:
            return None
        count = int(place[1])
        arguments = [*self.arguments, *[_OTHERWISE] * (count - len(self.arguments))]
        arguments[count - 1] = _fill(f"{reason.field}=...").partition("=")[2]
        return replace(self, arguments=tuple(arguments))

    def __str__(self) -> str:
        words = f'{_ARGUMENTS} "{" ".join(self.arguments)}"' if self.arguments else ""
        model = f"--model {self.model}" if self.model else ""
        settings = (f"--set {shlex.quote(setting)}" for setting in self.settings)
        return " ".join(filter(None, (f"--on {self.devices}", model, words, *settings)))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _fill(setting: str) -> str:
    """Return NAME=VALUE with a typical value in the place of three dots."""
    typical = (value for names, value in _TYPICAL if re.search(names, setting, re.IGNORECASE))
    return setting.replace(_OPEN, next(typical, _OTHERWISE))


def gather_requests(
    refusal: BadInput,
    additions: ScriptAdditions,
    read: Callable[[ScriptAdditions], BadInput | None],
) -> BadInput:
    """Return a refusal of a script with all that it, and those behind it, ask for.

    `read` reads the script with additions and returns its refusal, or None where it is planned.
    What does not help is asked for no longer.
    """
    requests: list[Reason] = []
    latest = refusal
    is_open = False  # a value was made up, on which what is wrong next may depend
    for _ in range(_MOST_ROUNDS):
        asking = [reason for reason in latest.reasons if _asks(reason, is_open=is_open)]
        followed = additions
        for reason in asking:
            followed = followed.follow(reason) or followed
        if followed == additions:
            break
        try:
            following = read(followed)
        except BeyondBudget:
            break
        useless = _find_useless(asking, following)
        if useless:
            return (
                _without_hints(refusal, useless) if latest is refusal else _join(refusal, requests)
            )
        requests += asking
        is_open = is_open or any(_leaves_open(reason) for reason in asking)
        additions = followed
        if following is None:
            break
        latest = following
    return _join(refusal, requests)


def _asks(reason: Reason, *, is_open: bool) -> bool:
    """Whether a refusal asks for what a user has to say, and does not correct a made-up value."""
    nearest = reason.nearest
    if reason.field == "--on":
        # The script states another count than was beside, or none.
        return _COUNT.fullmatch(nearest) is not None and not nearest.endswith(_OPEN)
    asks = nearest.startswith(("--set ", _ARGUMENTS, "--model ", "estimate "))
    return asks or (not is_open and bool(nearest) and reason.field.startswith("--"))


def _leaves_open(reason: Reason) -> bool:
    return _OPEN in reason.nearest or reason.field == "--on"


def _find_useless(asking: list[Reason], following: BadInput | None) -> list[Reason]:
    """Return the requests that come again once they are followed, or that nothing can follow."""
    if following is None:
        return []
    again = {str(reason) for reason in following.reasons}
    if any(reason.field == "--set" for reason in following.reasons):
        return asking
    return [reason for reason in asking if str(reason) in again]


def _without_hints(refusal: BadInput, useless: list[Reason]) -> BadInput:
    return BadInput(
        *(
            replace(reason, nearest="") if reason in useless else reason
            for reason in refusal.reasons
        )
    )


def _join(refusal: BadInput, requests: list[Reason]) -> BadInput:
    """Return a refusal whose first reason names all that is asked for, as one line to write."""
    words = list(dict.fromkeys(word for reason in requests for word in _spell_request(reason)))
    later = [reason for reason in requests if reason not in refusal.reasons]
    if len(words) < 2 or not requests:
        return refusal
    words.sort(key=lambda word: not word.startswith("estimate"))  # a verb stands first
    first = replace(refusal.reasons[0], nearest=" ".join(words))
    return BadInput(first, *refusal.reasons[1:], *later)


def _quote(setting: str) -> str:
    """Return NAME=VALUE as one word of a shell, with quotes around the value alone."""
    name, equals, value = setting.partition("=")
    is_plain = " " not in value or any(letter in value for letter in '"$`\\')
    return shlex.quote(setting) if is_plain else f'{name}{equals}"{value}"'


def _spell_request(reason: Reason) -> Iterator[str]:
    """Yield what a user writes for a request, an option with its value together."""
    words = _split(reason.nearest)
    if reason.field == "--on":
        yield f"--on {reason.nearest}"
    elif words[:1] == ["--set"]:
        yield from (f"--set {_quote(word)}" for word in words if word != "--set")
    elif words[:1] in ([_ARGUMENTS], ["--model"], ["estimate"]):
        yield reason.nearest
    elif words[:1] and words[0].startswith("--"):
        yield f"--set {'='.join(words[:2])}"
    else:
        yield f"--set {reason.field.rpartition(' ')[2]}={reason.nearest}"
