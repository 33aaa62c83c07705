"""The releases of Megatron-LM: which options each has, and what they are by default there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from moewright.intake.megatron.packaged_tables import read_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRelease:
    """A release by its tag and month, with the defaults of its options, "" for none."""

    tag: str
    month: str
    defaults: Mapping[str, str]


@cache
def list_releases() -> tuple[MegatronRelease, ...]:
    """Return the releases from the oldest on, the last being the parser that is read here."""
    spans = read_rows("release_options.csv")
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
        for index, row in enumerate(read_rows("releases.csv"))
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
