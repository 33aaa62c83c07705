"""A ModelSpec in the making, and what a part of a config.json is."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

from moewright.families.fields import FieldReader
from moewright.spec.model import (
    AttentionSpec,
    IndexerSpec,
    ModelSpec,
    MoeSpec,
    MultiplierSpec,
    RecurrentSpec,
    RopeSpec,
    RouterSpec,
)

# The records inside a ModelSpec, inner ones first.
_RECORDS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "attention.rope": RopeSpec,
        "attention.compressed_rope": RopeSpec,
        "attention.indexer": IndexerSpec,
        "moe.router": RouterSpec,
        "attention": AttentionSpec,
        "moe": MoeSpec,
        "recurrent": RecurrentSpec,
        "multipliers": MultiplierSpec,
    }
)


class ModelFields(Protocol):
    """Fields of a model by their dotted names ("attention.heads"), as far as they are known."""

    def __getitem__(self, field: str, /) -> Any: ...


class Draft:
    """The fields of a model of `family` that have been read so far, by their dotted names."""

    __slots__ = ("_spellings", "_values", "family")

    def __init__(self, family: str) -> None:
        self.family = family
        self._values: dict[str, Any] = {}
        self._spellings: dict[str, str] = {}

    def __getitem__(self, field: str, /) -> Any:
        return self._values[field]

    def __setitem__(self, field: str, value: Any) -> None:
        self._values[field] = value

    def get(self, field: str, default: Any) -> Any:
        """Return a field, or `default` where nothing has said it."""
        return self._values.get(field, default)

    def spell(self, field: str, name: str) -> None:
        """Keep the name in config.json under which a field was read."""
        self._spellings[field] = name

    def spelling(self, field: str) -> str:
        """Return the name in config.json under which a field was read."""
        return self._spellings[field]

    def build(self, name: str) -> ModelSpec:
        """Build the model; a record that was read as a whole is taken as it is."""
        values = dict(self._values)
        # Fields of experts that no layer has are read and left out.
        if not any(values["moe_layers"]):
            values = {field: v for field, v in values.items() if not field.startswith("moe.")}
            values["moe"] = None
        for path, record in _RECORDS.items():
            inner = {
                field.removeprefix(f"{path}."): values.pop(field)
                for field in tuple(values)
                if field.startswith(f"{path}.")
            }
            if inner and path not in values:
                values[path] = record(**inner)
        return ModelSpec(name=name, family=self.family, **values)


class WholeModel:
    """The fields of a finished model by their dotted names."""

    __slots__ = ("_model",)

    def __init__(self, model: ModelSpec) -> None:
        self._model = model

    def __getitem__(self, field: str, /) -> Any:
        return attrgetter(field)(self._model)


class Part(Protocol):
    """A part of a config.json: fields that are read together, and written as they are read.

    What `write` adds for a model is read back to the same fields of that model.
    """

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read fields of the table into fields of the model.

        Raises:
            BadInput: a field is missing or wrong, or asks for what moewright does not model.
        """

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the fields of the table that say these fields of the model.

        Raises:
            BadInput: the family has no form for what the model is.
        """
