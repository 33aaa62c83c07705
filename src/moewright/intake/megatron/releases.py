"""The releases of Megatron-LM: which options each has, and what they are by default there."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

_DATA = "moewright.intake.megatron"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRelease:
    """A release by its tag and month, with the defaults of its options, "" for none."""

    tag: str
    month: str
    defaults: Mapping[str, str]


@cache
def list_releases() -> tuple[MegatronRelease, ...]:
    """Return the releases from the oldest on, the last being the parser that is read here."""
    spans = _read_rows("release_options.csv")
    return tuple(
        MegatronRelease(
            tag=row["tag"],
            month=row["month"],
            defaults=MappingProxyType(
                {
                    span["name"]: span["default"]
                    for span in spans
                    if int(span["first"]) <= index <= int(span["last"])
                }
            ),
        )
        for index, row in enumerate(_read_rows("releases.csv"))
    )


@cache
def list_changed() -> frozenset[str]:
    """Return the options that are not the same by default in all releases that have them."""
    defaults: dict[str, set[str]] = {}
    for release in list_releases():
        for name, default in release.defaults.items():
            defaults.setdefault(name, set()).add(default)
    return frozenset(name for name, values in defaults.items() if len(values) > 1)


def find_release(names: Iterable[str]) -> MegatronRelease:
    """Return the last of the releases that have most of a command's options.

    An option that came and one that went between them say when a command was written, and so which
    defaults stand for what it leaves out.
    """
    told = set(names)
    return max(reversed(list_releases()), key=lambda release: len(told & release.defaults.keys()))


def _read_rows(name: str) -> list[dict[str, str]]:
    text = resources.files(_DATA).joinpath(f"data/{name}").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
