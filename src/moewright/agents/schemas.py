"""JSON Schemas of records of parameters, for those who call a tool."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from moewright.spec.record import to_plain_data

_SIMPLE: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
}


def build_schema(record: type, descriptions: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of a dataclass: an object with its fields, and no others.

    Raises:
        KeyError: a field has no description.
    """
    hints = get_type_hints(record)
    properties = {}
    required = []
    for field in fields(cast(Any, record)):
        schema = _describe_type(hints[field.name])
        schema["description"] = descriptions[field.name]
        if field.default is MISSING:
            required.append(field.name)
        elif field.default is not None:
            schema["default"] = to_plain_data(field.default)
        properties[field.name] = schema
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _describe_type(hint: Any) -> dict[str, Any]:
    """Return the schema of a type; None beside another is what is left out."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (item for item in get_args(hint) if item is not type(None))
    if get_origin(hint) is tuple:
        items = get_args(hint)
        schema: dict[str, Any] = {"type": "array", "items": _describe_type(items[0])}
        if items[-1] is not Ellipsis:
            schema |= {"minItems": len(items), "maxItems": len(items)}
        return schema
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [member.value for member in hint]}
    return {"type": _SIMPLE[hint]}
