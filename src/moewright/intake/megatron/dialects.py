"""Frameworks on Megatron-core by the marks of their configurations; data/config_dialects.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

from moewright.codec import from_data
from moewright.intake.megatron.adapters import AdapterSettings
from moewright.spec.errors import BadInput, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDialect:
    """How a framework spells a training; data/config_dialects.toml says what the fields mean."""

    name: str
    source: str
    marks: tuple[str, ...]
    sections: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    nodes: str = ""
    ranks_per_node: str = ""
    accumulation: str = ""
    environment: str = ""
    defaults: str = ""
    tables: tuple[str, ...] = ()
    known_sections: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    is_commanded: bool = False
    has_options: bool = False
    refused: str = ""
    adapters: tuple[AdapterSettings, ...] = ()
    apart: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def is_spoken_by(self, names: Sequence[str]) -> bool:
        """Whether settings of these names bear one of its marks: all patterns of a mark match."""
        return any(
            all(any(fnmatchcase(name, pattern) for name in names) for pattern in mark.split())
            for mark in self.marks
        )


@cache
def list_dialects() -> tuple[ConfigDialect, ...]:
    """Return the frameworks in the order in which their marks are looked for."""
    file = resources.files("moewright.intake.megatron").joinpath("data/config_dialects.toml")
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["dialect"]
    return tuple(from_data(ConfigDialect, entry, where="config_dialects.toml") for entry in entries)


def find_dialect(names: Sequence[str]) -> ConfigDialect:
    """Return the framework whose marks the names of settings bear.

    Raises:
        BadInput: there is none, or one whose trainings are not planned here.
    """
    spoken = [dialect for dialect in list_dialects() if dialect.is_spoken_by(names)]
    if not spoken:
        readable = [dialect.name for dialect in list_dialects() if not dialect.refused]
        rule = (
            f"bears the marks of none that is read here ({', '.join(readable)}): name the model "
            "and the layout to `estimate`"
        )
        sections = sorted({name.partition(".")[0] for name in names})
        shown = ", ".join(sections)[:60]
        raise BadInput(Reason(field="configuration", value=shown, rule=rule))
    dialect = spoken[0]
    if dialect.refused:
        raise BadInput(
            Reason(field="configuration", rule=f"is {dialect.name}'s: {dialect.refused}")
        )
    return dialect
