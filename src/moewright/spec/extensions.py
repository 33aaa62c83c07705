"""What installed packages add to moewright, by entry points: docs/how_to/extend.md.

A package names what it adds in its pyproject.toml; nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from moewright.spec.errors import BadInput, Reason


class ExtensionPoint(StrEnum):
    """The groups of entry points that are read."""

    CATALOGUE = "moewright.catalogue"  # a package with files of devices, networks and models
    TRACKERS = "moewright.trackers"  # a class that takes the scalars of a run
    FAMILIES = "moewright.families"  # the record of a family of models
    EXPORTERS = "moewright.exporters"  # a function that writes a plan for a trainer
    READERS = "moewright.readers"  # a function that reads the file of a trainer


@cache
def list_extensions(point: ExtensionPoint) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, sorted.

    Raises:
        BadInput: two packages add the same name; which of them is meant is not known.
    """
    by_name: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=point.value), key=lambda entry: entry.name):
        other = by_name.setdefault(entry.name, entry)
        if other.value != entry.value:
            rule = f"two installed packages add it: {other.value} and {entry.value}"
            raise BadInput(Reason(field=point.value, value=entry.name, rule=rule))
    return MappingProxyType(by_name)


def load_extension(point: ExtensionPoint, name: str) -> Any:
    """Import what an entry point names.

    Raises:
        BadInput: it cannot be imported.
    """
    try:
        return list_extensions(point)[name].load()
    except Exception as error:  # whatever the code of another package raises
        raise _refusal(point, name, "cannot be imported", error) from None


def call_extension(point: ExtensionPoint, name: str, *arguments: Any) -> Any:
    """Call the function that an entry point names; what it raises is one line.

    Raises:
        BadInput: it cannot be imported, or fails; a BadInput of its own is passed on.
    """
    function = load_extension(point, name)
    try:
        return function(*arguments)
    except BadInput:
        raise
    except Exception as error:  # whatever the code of another package raises
        raise _refusal(point, name, "failed", error) from None


def _refusal(point: ExtensionPoint, name: str, deed: str, error: Exception) -> BadInput:
    """Return one line that names the code of another package, and what came of it."""
    rule = f"{list_extensions(point)[name].value} {deed} ({type(error).__name__}: {error})"
    return BadInput(Reason(field=point.value, value=name, rule=rule))
