"""A Hugging Face config.json as a ModelSpec, and the config.json of a ModelSpec.

The reader is strict where a field changes the model, and never runs code from a checkpoint. It
reads both forms of rope (`rope_theta` + `rope_scaling`, `rope_parameters`) and all spellings of the
expert count. Fields that say nothing about the model's shape are ignored; `unknown_fields` names
those that moewright does not know. A field that asks for other mathematics (another scorer,
activation or mixer, a soft cap, an unknown switch that is on) is refused by name. What a family
reads and writes is in its record (`moewright.families`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moewright.codec import FloatPolicy, read_json_data
from moewright.codec.files import name_model
from moewright.families.fields import FieldReader
from moewright.families.record import Family
from moewright.families.table import known_families, nested_families
from moewright.intake.unknown_fields import require_same_score, skipped_names
from moewright.spec.errors import BadInput, Reason, escape_controls, has_controls
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match

MAX_FILE_BYTES = 16 * 2**20  # a config of 1,000 layers, each named, has less than one

# Model types whose token mixer a ModelSpec cannot describe, and what it is.
_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "falcon_h1": "Mamba-2 and attention side by side",
        "mamba": "Mamba layers",
        "mamba2": "Mamba-2 layers",
    }
)
# Fields of such a model type beside `text_config`, by the beginning or the end of their names.
_BESIDE_TEXT = ("vision", "image", "video", "audio", "projection", "boi_", "eoi_", "mm_", "media")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ParsedConfig:
    model: ModelSpec
    unknown_fields: tuple[str, ...]


def read_config(path: Path) -> ModelSpec:
    """Read the model of a config.json, or of a folder with one.

    Raises:
        BadInput: the file cannot be read, or it has a model that moewright does not know.
    """
    file = _config_file(path)
    return parse_config(_read_table(file), where=str(file), name=name_model(file))


def unknown_fields(path: Path) -> tuple[str, ...]:
    """Return the names in a config.json that are skipped because moewright does not know them."""
    file = _config_file(path)
    return _parse(_read_table(file), str(file), "").unknown_fields


def parse_config(config: Mapping[str, Any], *, where: str, name: str) -> ModelSpec:
    """Return the model of a table of HF fields; `where` locates errors.

    Raises:
        BadInput: a field is missing, wrong or asks for what moewright does not model.
    """
    return _parse(config, where, escape_controls(name)).model


def build_config(model: ModelSpec) -> dict[str, Any]:
    """Build the fields of a config.json that `parse_config` reads back to `model`.

    They are in the form that every release of transformers reads. Only the name is not among them.
    The language model of Qwen3-VL is that of a Qwen3-MoE.

    Raises:
        BadInput: transformers has no such model, or its config.json would load as another one.
    """
    families = known_families()
    family = families.get(model.family)
    if family is not None and family.written_as:
        family = families[family.written_as]
    if family is None or not family.architecture:
        written = (entry.model_type for entry in families.values() if entry.architecture)
        rule = f"has no HF form; families: {', '.join(written)}"
        raise BadInput(Reason(field="model.family", value=model.family or '""', rule=rule))
    config = family.write_config(model)
    loaded = replace(parse_config(config, where="", name=model.name), family=model.family)
    for name, value in _list_differences(model, loaded, "model"):
        rule = f"has no place in the config.json of {family.model_type}"
        raise BadInput(Reason(field=name, value=str(value[0]), rule=rule, nearest=str(value[1])))
    return config


def _list_differences(
    stated: object, loaded: object, name: str
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the name of each field in which two records differ, with both values."""
    if is_dataclass(stated) and type(stated) is type(loaded):
        for field in fields(stated):
            pair = (getattr(stated, field.name), getattr(loaded, field.name))
            yield from _list_differences(*pair, f"{name}.{field.name}")
    elif stated != loaded:
        yield name, (stated, loaded)


def _config_file(path: Path) -> Path:
    if "\0" in str(path):
        raise BadInput(Reason(field=repr(str(path))[:80], rule="is no path: it holds a zero byte"))
    try:
        if path.is_dir():
            path = path / "config.json"
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise BadInput(Reason(field=str(path)[:80], rule=rule)) from None
    if size > MAX_FILE_BYTES:
        rule = f"is no config.json: larger than {MAX_FILE_BYTES // 2**20} MiB"
        raise BadInput(Reason(field=str(path), rule=rule))
    return path


def _read_table(file: Path) -> Mapping[str, Any]:
    # Published configs of Nemotron-H bound time steps by [0.0, Infinity].
    data = read_json_data(file, FloatPolicy.NON_FINITE)
    if not isinstance(data, dict):
        raise BadInput(Reason(field=str(file), rule="must hold a table of fields at its top"))
    _refuse_unprintable_names(data, file)
    return data


def _refuse_unprintable_names(table: Mapping[str, Any], file: Path) -> None:
    """Refuse a name that no field has: it would be told of where it is skipped."""
    tables = [table]
    while tables:
        for name, value in tables.pop().items():
            if has_controls(name):
                rule = "names a field with characters that do not print"
                raise BadInput(Reason(field=str(file), value=name[:60], rule=rule))
            if isinstance(value, dict):
                tables.append(value)


def _parse(config: Mapping[str, Any], where: str, name: str) -> _ParsedConfig:
    fields = FieldReader(config, where)
    skipped: tuple[str, ...] = ()
    model_type = fields.raw_value("model_type")
    nested = nested_families()
    if isinstance(model_type, str) and model_type in nested:
        fields, family, skipped = _enter_text_config(fields, nested[model_type])
    else:
        family = _read_family(fields)
    model = family.read_model(fields, name)
    require_same_score(fields, model)
    return _ParsedConfig(model=model, unknown_fields=(*skipped, *skipped_names(fields)))


def _enter_text_config(
    fields: FieldReader, usual: Family
) -> tuple[FieldReader, Family, tuple[str, ...]]:
    """Return the nested language model, its family, and the fields beside it that are skipped."""
    text = fields.table("text_config")
    if text is None:
        raise fields.refusal("text_config", "is missing: it holds the language model")
    other_parts = (field for field in fields.unread_names() if _is_beside_text(field))
    if fields.has_value("tie_word_embeddings"):  # transformers ties by that of the outer table
        inner = dict(fields.raw_value("text_config"))
        inner["tie_word_embeddings"] = fields.raw_value("tie_word_embeddings")
        text = FieldReader(inner, text.where)
    fields.ignore("model_type", "tie_word_embeddings", *other_parts)
    model_type = text.raw_value("model_type") or usual.model_type
    text.ignore("model_type")
    if not isinstance(model_type, str) or model_type not in known_families():
        raise text.refusal("model_type", f"must be {usual.model_type}", usual.model_type)
    return text, known_families()[model_type], skipped_names(fields)


def _is_beside_text(field: str) -> bool:
    is_other_part = any(part in field for part in _BESIDE_TEXT)
    return is_other_part or field.endswith(("_token_id", "_token_index"))


def _read_family(fields: FieldReader) -> Family:
    model_type = fields.raw_value("model_type")
    fields.ignore("model_type")
    families = known_families()
    names = (*families, *nested_families())
    rule = f"must be one of {len(names)} known model types"
    if model_type is None:
        raise fields.refusal("model_type", f"is missing; {rule}", "llama")
    if not isinstance(model_type, str):
        raise fields.refusal("model_type", rule, "llama")
    if model_type in _UNSUPPORTED:
        raise fields.refusal(
            "model_type",
            f"has {_UNSUPPORTED[model_type]}, a mixer that moewright does not model",
        )
    if model_type not in families:
        nearest = closest_match(model_type, names)
        raise fields.refusal("model_type", rule, nearest or f"one of {', '.join(families)}")
    return families[model_type]
