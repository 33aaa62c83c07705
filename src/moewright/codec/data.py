"""Records to and from plain data (dicts, lists, strings, numbers), with every error located."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin

from cattrs import BaseValidationError, Converter, ForbiddenExtraKeysError
from cattrs.errors import AttributeValidationNote, IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn

from moewright.families.fields import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
)
from moewright.spec.errors import BadInput, Paragraph, Reason, Verbatim, has_controls, is_control
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.record import to_plain_data
from moewright.spec.stage_string import StageString, parse_stages
from moewright.spec.units import mention, shorten


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeFault:
    """A field of a model, by its path, whose value is beyond what it may be."""

    path: str
    value: int
    rule: str
    nearest: str


def find_size_faults(model: ModelSpec) -> Iterator[SizeFault]:
    """Yield the sizes that no model has, and lists that are not as long as it has layers."""
    for path, value, low, high in _list_sizes(model):
        if not low <= value <= high:
            nearest = str(min(max(value, low), high))
            yield SizeFault(
                path=path, value=value, rule=f"must be in {low}..{high}", nearest=nearest
            )
    for path in ("moe_layers", "mixers", "mlp_layers", "rope_layers"):
        length = len(getattr(model, path))
        if length != model.layers and (length or path == "moe_layers"):
            rule = f"must have a value for each of the {model.layers} layers"
            yield SizeFault(path=path, value=length, rule=rule, nearest=f"{model.layers} values")


def _list_sizes(model: ModelSpec) -> Iterator[tuple[str, int, int, int]]:
    attention = model.attention
    yield "layers", model.layers, 1, MAX_LAYERS
    yield "mtp_layers", model.mtp_layers, 0, MAX_LAYERS
    yield "hidden_size", model.hidden_size, 1, MAX_HIDDEN
    yield "vocab_size", model.vocab_size, 1, MAX_VOCAB
    yield "dense_ffn_size", model.dense_ffn_size, 0, MAX_FFN
    yield "max_position", model.max_position, 0, MAX_POSITION
    yield "attention.heads", attention.heads, 0, MAX_HEADS
    yield "attention.kv_heads", attention.kv_heads, 0, MAX_HEADS
    yield "attention.head_dim", attention.head_dim, 0, MAX_HEAD_DIM
    yield "attention.v_head_dim", attention.v_head_dim, 0, MAX_HEAD_DIM
    if model.moe is not None:
        yield "moe.experts", model.moe.experts, 1, MAX_EXPERTS
        yield "moe.ffn_size", model.moe.ffn_size, 1, MAX_FFN
        yield "moe.shared_ffn_size", model.moe.shared_ffn_size, 0, MAX_FFN
        yield "moe.router.top_k", model.moe.router.top_k, 1, model.moe.experts


T = TypeVar("T")

INT_LIMIT = 2**63  # beyond it numpy and TOML have no integer


class FloatPolicy(StrEnum):
    """The floats that a reader accepts: finite ones from people, NaN and Infinity from runs too."""

    FINITE = "finite"
    NON_FINITE = "non-finite"


class _Refused(Exception):
    """A value that its field does not accept; the path to it is known to callers alone."""

    def __init__(self, rule: str, value: object, nearest_value: str = "") -> None:
        super().__init__(rule)
        self.rule = rule
        self.value = format_value(value)
        self.nearest = nearest_value


def to_data(record: object) -> Any:
    """Return the plain data of a record: a dataclass as dict, a tuple as list, an enum as value."""
    return to_plain_data(record)


def default_values(record: object) -> dict[str, Any]:
    """Return the defaults that `from_data` takes for fields of a record that are left out.

    Records inside are included as dicts; required fields are not.
    """
    defaults: dict[str, Any] = {}
    for field in fields(cast(Any, record)):
        value = getattr(record, field.name)
        if is_dataclass(value):
            defaults[field.name] = default_values(value)
        elif field.default is not MISSING:
            defaults[field.name] = to_data(field.default)
    return defaults


def from_data(
    cls: type[T], data: Any, *, where: str, floats: FloatPolicy = FloatPolicy.FINITE
) -> T:
    """Return the record of type `cls` that `data` describes.

    Keys must be fields of `cls`, and types must match exactly (an int does for a float).

    Raises:
        BadInput: `data` is at fault; each fault is a Reason whose field is like "job.toml:
            layout.ep" for where="job.toml".
    """
    try:
        return _converter(floats).structure(data, cls)
    except (BaseValidationError, ForbiddenExtraKeysError, _Refused, KeyError) as error:
        raise BadInput(*_reasons(error, "", where)) from None
    except RecursionError:
        raise BadInput(Reason(field=where, rule="is nested too deeply")) from None


def fingerprint(*records: object) -> str:
    """Return 16 hex digits of the SHA-256 over the canonical JSON of the records.

    Equal records have equal fingerprints.
    """
    canonical = json.dumps(
        [[type(record).__name__, to_data(record)] for record in records],
        sort_keys=True,
        allow_nan=False,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@cache
def _converter(floats: FloatPolicy) -> Converter:
    converter = Converter(forbid_extra_keys=True)
    converter.register_structure_hook(bool, _bool)
    converter.register_structure_hook(int, _int)
    converter.register_structure_hook(
        float, _float if floats is FloatPolicy.FINITE else _measured_float
    )
    converter.register_structure_hook(str, _str)
    # The texts that are not one line of anything: each has a type of its own.
    converter.register_structure_hook(Paragraph, _paragraph)
    converter.register_structure_hook(Verbatim, _verbatim)
    converter.register_structure_hook(StageString, _stage_string)
    converter.register_structure_hook_factory(_is_tuple, lambda cls: _tuple(converter, cls))
    converter.register_structure_hook_factory(_is_mapping, lambda cls: _mapping(converter, cls))
    converter.register_structure_hook_factory(is_dataclass, lambda cls: _record(converter, cls))
    converter.register_structure_hook(ModelSpec, _model(_record(converter, ModelSpec)))
    return converter


def _bool(value: Any, _: type) -> bool:
    if isinstance(value, bool):
        return value
    raise _Refused("must be true or false", value)


def _int(value: Any, _: type) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        near = ""
        if isinstance(value, float) and math.isfinite(value):
            near = str(round(value))
        raise _Refused("must be a whole number", value, near)
    if abs(value) >= INT_LIMIT:
        raise _Refused("must be below 2**63 in size", value)
    return value


def _measured_float(value: Any, _: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refused("must be a number", value)
    if isinstance(value, int) and abs(value) >= INT_LIMIT:
        raise _Refused("must be below 2**63 when written without a point", value)
    return float(value)


def _float(value: Any, cls: type) -> float:
    number = _measured_float(value, cls)
    if not math.isfinite(number):
        raise _Refused("must be a finite number", value)
    return number


def _str(value: Any, cls: type) -> str:
    if issubclass(cls, StrEnum):  # cattrs dispatches by base class, so text enums arrive here
        return _enum(value, cls)
    if not isinstance(value, str):
        raise _Refused("must be text in quotes", value)
    if has_controls(value):
        cleaned = "".join(letter for letter in value[:60] if not is_control(letter))
        raise _Refused("must be one line, without control characters", value, cleaned)
    return value


def _verbatim(value: Any, _: type) -> str:
    if not isinstance(value, str):
        raise _Refused("must be text in quotes", value)
    return value


def _paragraph(value: Any, _: type) -> str:
    """Return text of several lines, each of which holds no control characters."""
    if not isinstance(value, str):
        raise _Refused("must be text in quotes", value)
    for line in value.split("\n"):
        _str(line, str)
    return value


def _stage_string(value: Any, _: type) -> str:
    text = _str(value, str)
    if text:
        try:
            parse_stages(text)
        except BadInput as error:
            raise _Refused(error.reasons[0].rule, text, "Et*3|(tt|)*29,m|L") from None
    return text


def _enum(value: Any, cls: type[StrEnum]) -> StrEnum:
    legal = [str(member.value) for member in cls]
    if isinstance(value, str) and value in legal:
        return cls(value)
    raise _Refused(f"must be one of {', '.join(legal)}", value, closest_match(str(value), legal))


def _is_tuple(cls: Any) -> bool:
    return get_origin(cls) is tuple


def _tuple(converter: Converter, cls: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    item_types = get_args(cls)
    fixed_length = None if item_types[-1] is Ellipsis else len(item_types)

    def structure(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _Refused("must be a list", value)
        if fixed_length is not None and len(value) != fixed_length:
            raise _Refused(f"must be a list of {fixed_length}", value)
        types = (item_types[0],) * len(value) if fixed_length is None else item_types
        built = []
        faults = []
        for index, (item, item_type) in enumerate(zip(value, types, strict=True)):
            try:
                built.append(converter.get_structure_hook(item_type)(item, item_type))
            except Exception as error:
                error.add_note(IterableValidationNote(f"index {index}", index, item_type))
                faults.append(error)
        if faults:
            raise IterableValidationError("items", faults, cls)
        return tuple(built)

    return structure


def _is_mapping(cls: Any) -> bool:
    return get_origin(cls) is Mapping


def _mapping(converter: Converter, cls: Any) -> Callable[[Any, Any], dict[str, Any]]:
    _, item_type = get_args(cls)  # the keys of JSON and TOML are text

    def structure(value: Any, _: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Refused("must be a table of keys", value)
        built = {}
        faults = []
        for key, item in value.items():
            try:
                _str(key, str)
                built[key] = converter.get_structure_hook(item_type)(item, item_type)
            except Exception as error:
                error.add_note(AttributeValidationNote(f"key {key}", str(key), item_type))
                faults.append(error)
        if faults:
            raise IterableValidationError("items", faults, cls)
        return built

    return structure


def _record(converter: Converter, cls: Any) -> Callable[[Any, Any], Any]:
    build = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

    def structure(value: Any, target: Any) -> Any:
        if not isinstance(value, dict):
            raise _Refused("must be a table of keys", value)
        return build(cast(Any, value), target)

    return structure


def _model(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], ModelSpec]:
    """Return what builds a model and refuses sizes that no model has."""

    def structure(value: Any, target: Any) -> ModelSpec:
        model: ModelSpec = build(value, target)
        faults = []
        for fault in find_size_faults(model):
            error = _Refused(fault.rule, fault.value, fault.nearest)
            error.add_note(AttributeValidationNote(fault.path, fault.path, int))
            faults.append(error)
        if faults:
            raise IterableValidationError("sizes", faults, ModelSpec)
        return model

    return structure


def _reasons(error: BaseException, path: str, where: str) -> Iterator[Reason]:
    """Yield the Reasons of a tree of cattrs errors.

    Unknown keys come first, because a misspelt key also shows as a missing one.
    """
    if isinstance(error, BaseValidationError):
        for inner in sorted(
            error.exceptions, key=lambda e: not isinstance(e, ForbiddenExtraKeysError)
        ):
            yield from _reasons(inner, path + _step(inner, path), where)
    elif isinstance(error, ForbiddenExtraKeysError):
        legal = [field.name for field in fields(cast(Any, error.cl))]
        for key in sorted(map(str, error.extra_fields)):
            field = _located(where, mention("{}.", path) + key)
            near = closest_match(key, legal)
            rule = "unknown key" if near else f"unknown key; known here: {', '.join(legal)}"
            yield Reason(field=field, rule=rule, nearest=near)
    elif isinstance(error, _Refused):
        yield Reason(
            field=_located(where, path), rule=error.rule, value=error.value, nearest=error.nearest
        )
    elif isinstance(error, KeyError):
        yield Reason(field=_located(where, path), rule="is missing")
    else:
        raise error


def _step(error: BaseException, path: str) -> str:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return f".{note.name}" if path else note.name
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]"
    return ""


def _located(where: str, path: str) -> str:
    if not path or not where:
        return where or path
    separator = "." if ": " in where else ": "
    return f"{where}{separator}{path}"


def format_value(value: object) -> str:
    """Return a refused value in a few letters, as JSON writes it."""
    if isinstance(value, int) and abs(value) >= INT_LIMIT:
        return "a huge integer"
    if isinstance(value, list | tuple | dict):  # may be nested without end
        kind = "table" if isinstance(value, dict) else "list"
        return f"a {kind} of {len(value)}"
    text = json.dumps(value) if isinstance(value, bool | str | None) else str(value)
    return shorten(text)
