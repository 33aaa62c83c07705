"""The command `megatron sft` of ms-swift as settings: its options have underscores and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moewright.intake.megatron.settings import Value
from moewright.spec.errors import BadInput, Reason

_PROGRAM = "megatron"
_TASKS = ("pt", "sft", "rlhf", "export")
_PLANNED = ("pt", "sft")
_SECTION = "swift"
_RANKS = {"NNODES": "nnodes", "NPROC_PER_NODE": "nproc_per_node"}


def is_swift(words: Sequence[str]) -> bool:
    """Whether a command is ms-swift's on Megatron: `megatron sft`, or the file behind it."""
    return bool(_find_task(words)[0])


def swift_settings(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Value]:
    """Return the options of a command, and its ranks, as settings below `swift`.

    Raises:
        BadInput: the command does something else than pre-training or supervised training.
    """
    task, place = _find_task(words)
    if task not in _PLANNED:
        rule = f"is planned for {' and '.join(_PLANNED)} alone"
        raise BadInput(Reason(field=f"megatron {task}", rule=rule, nearest="megatron sft"))
    settings: dict[str, Value] = {}
    name = ""
    for word in words[place + 1 :]:
        if word.startswith("--"):
            plain, equals, value = word.removeprefix("--").partition("=")
            name = f"{_SECTION}.{plain.replace('-', '_')}"
            settings[name] = value if equals else ""
        elif name:
            before = settings[name]
            values = (*([before] if isinstance(before, str) and before else before), word)
            settings[name] = values if len(values) > 1 else word
    for variable, key in _RANKS.items():
        if variable in environment:
            settings[f"{_SECTION}.{key}"] = environment[variable]
    return settings


def _find_task(words: Sequence[str]) -> tuple[str, int]:
    """Return what a command does, and where that stands; ("", 0) for another command."""
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word.rpartition("/")[2] == _PROGRAM and following in _TASKS:
            return following, place + 1
        if "_megatron/" in word and word.endswith(".py"):
            task = word.rpartition("/")[2].removesuffix(".py")
            return (task, place) if task in _TASKS else ("", 0)
    return "", 0
