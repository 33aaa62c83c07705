"""What a caller of the Python face says of a workload: the keywords that several functions take."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from moewright.codec.numbers import parse_count
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.options import WorkloadOptions
from moewright.spec.workload import BaseQuantization, Dtype, Task

Member = TypeVar("Member", bound=StrEnum)


class WorkloadChoices(TypedDict, total=False):
    """The keywords of `plan`, `estimate`, `budget` and `show` that are theirs as options of verbs.

    See WorkloadOptions, whose other values are parameters of their own.
    """

    network: str
    rampup_batch_size: tuple[int, int, int]
    task: Task | str
    lora_rank: int
    quantize_base: BaseQuantization | str
    from_trace: Path | str


class LengthChoices(WorkloadChoices, total=False):
    """The keywords that say how long is trained, and how long the packed samples are."""

    steps: int
    tokens: int | str
    lengths: Path | str


class LoadChoices(WorkloadChoices, total=False):
    """The keywords where the load of the experts is no parameter of its own."""

    load: Path | str | float


_NO_CHOICES: Mapping[str, Any] = {}
# What a keyword is made into; the others are taken as they are.
_PATHS = ("from_trace", "lengths", "load")


def workload_options(
    seq_len: int | None,
    global_batch: int | None,
    precision: Dtype | str | None,
    load: Path | str | float | None = None,
    choices: Mapping[str, Any] = _NO_CHOICES,
) -> WorkloadOptions:
    """Return what the caller says of the workload; `choices` may hold other keywords besides.

    Raises:
        BadInput: a precision, a task or a number is none; fields are named as keywords.
    """
    names = (*LengthChoices.__annotations__, *LoadChoices.__annotations__)
    values = {name: choices[name] for name in names if choices.get(name) is not None}
    if load is not None:
        values["load"] = load
    for name in _PATHS:
        if name in values:
            # A number or a word as well: what reads it tells them from files.
            values[name] = Path(str(values[name]))
    for name, kind in (("task", Task), ("quantize_base", BaseQuantization)):
        if name in values:
            values[name] = _read_member(kind, values[name], name)
    if "tokens" in values:
        values["tokens"] = parse_count(str(values["tokens"]), "tokens")
    return WorkloadOptions(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=None if precision is None else _read_member(Dtype, precision, "precision"),
        **values,
    )


def _read_member(kind: type[Member], value: str, field: str) -> Member:
    try:
        return kind(value)
    except ValueError:
        rule = f"must be one of {', '.join(kind)}"
        nearest = closest_match(str(value), list(kind))
        raise BadInput(Reason(field=field, value=str(value), rule=rule, nearest=nearest)) from None


def check_keywords(function: str, choices: Mapping[str, Any], allowed: type) -> None:
    """Raise TypeError for a keyword that is none of the function's, as Python does for others.

    `allowed` is the TypedDict of its keywords.
    """
    unknown = set(choices) - set(allowed.__annotations__)
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def select_keywords(choices: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the keywords of a TypedDict among others."""
    return {name: value for name, value in choices.items() if name in kind.__annotations__}
