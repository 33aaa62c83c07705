"""Job files: a TOML file that says what to train, on which hardware and for how long.

The sections are:

- [model]: `config`, a catalogue name, a path or a hub id; or the fields of a config.json
  themselves; and `weights`, what to start from: a folder of checkpoints or a Hugging Face folder,
  whose config.json is the model where no other is given.
- [data]: the fields of DataSpec.
- [layout]: `text = "ep2,mbs2"`, or the layout's keys; what is absent is for the search to choose.
- [train]: the fields of Workload, OptimizerSpec, MuonSpec, LossSpec, RouterTraining,
  LossScalingSpec, DelayedScalingSpec and BatchRampSpec, and `nproc`, `hardware` and `network`.
- [checkpoint]: the fields of CheckpointSpec.
- [tune]: what tuning may change, each key with a list of values.

Relative paths start at the folder of the job file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moewright.codec import (
    explicit_fields,
    format_value,
    parse_count,
    read_toml_data,
)
from moewright.codec.layout_text import FIELD_OF_KEY
from moewright.intake import catalogue, hf, hub
from moewright.intake.devices import device_names, find_device
from moewright.intake.job_workload import count_keys, read_workload, resolve_beside
from moewright.intake.networks import read_networks, refuse_network
from moewright.spec.choices import FieldKind
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import MAX_DEVICES
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.options import TUNABLE_TRAIN_KEYS, TuningAxis
from moewright.spec.workload import Workload

DEFAULT_HARDWARE = "runs/machine.toml"

_SECTIONS = ("model", "data", "layout", "train", "checkpoint", "tune")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """The contents of a job file.

    `layout_text` holds the part of the layout that the file fixes (see codec.parse_layout), "" for
    none; `hardware` is a device name or the path of a hardware file, without a count; `network`
    names kinds of network in place of its own; `nproc` is the number of ranks to start; `axes` are
    what tuning may change, () for its default axes.
    """

    model: ModelSpec
    workload: Workload
    layout_text: str
    nproc: int
    hardware: str
    network: str = ""
    axes: tuple[TuningAxis, ...] = ()


def read_job(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Read the job in a TOML file, after `overrides` like "train.lr=1e-3".

    Values of overrides are written as in TOML, but text needs no quotes, and counts may be written
    like 128k.

    Raises:
        BadInput: names file, section and key.
    """
    data = read_toml_data(path)
    where = path.name
    for override in overrides:
        _apply_override(data, override)
    tables = _read_sections(data, where)
    train = tables["train"]
    weights = _pop_weights(tables["model"], path, where)
    workload = read_workload(tables, weights, path, where)
    nproc = _check_integer(train.get("nproc", 1), f"{where}: train.nproc", high=MAX_DEVICES)
    return JobFile(
        model=_read_model(tables["model"], weights, path, where),
        workload=workload,
        layout_text=_read_layout_text(tables["layout"], where),
        nproc=nproc,
        hardware=_read_hardware_name(train.get("hardware"), path, where),
        network=_read_network(train.get("network", ""), where),
        axes=tuple(
            _read_axis(key, values, f"{where}: tune.{key[:60]}")
            for key, values in tables["tune"].items()
        ),
    )


def _apply_override(data: dict[str, Any], text: str) -> None:
    key, equals, value_text = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name:
        rule = "must be section.key=value"
        raise BadInput(Reason(field="--set", value=text[:60], rule=rule, nearest="train.lr=1e-3"))
    table = data.setdefault(section, {})
    if not isinstance(table, dict):
        nearest = closest_match(section, _SECTIONS)
        raise BadInput(Reason(field=f"--set {section}", rule="is no section", nearest=nearest))
    value = _parse_toml_value(value_text)
    # A count such as 128k is no TOML, and so is text until here.
    if isinstance(value, str) and value[:1].isdigit() and f"{section}.{name}" in count_keys():
        value = parse_count(value, f"--set {section}.{name}")
    outer, dot, inner = name.partition(".")
    if dot and isinstance(table.setdefault(outer, {}), dict):
        table[outer][inner] = value
    else:
        table[name] = value


def _parse_toml_value(text: str) -> Any:
    # As TOML, what follows a line end would set further keys.
    if "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # the latter of a thousand open brackets
        return text.strip()


def _read_sections(data: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    for section, table in data.items():
        if section not in _SECTIONS:
            nearest = closest_match(section, _SECTIONS)
            rule = "unknown section"
            if not nearest:
                rule = f"{rule}; sections: {', '.join(_SECTIONS)}"
            raise BadInput(Reason(field=f"{where}: {section[:60]}", rule=rule, nearest=nearest))
        if not isinstance(table, dict):
            field = f"{where}: {section}"
            raise BadInput(Reason(field=field, rule="must be a section", nearest=f"[{section}]"))
    # Copies, of which readers take out what is not theirs to hand on.
    return {section: dict(data.get(section, {})) for section in _SECTIONS}


def _pop_weights(table: dict[str, Any], path: Path, where: str) -> str:
    """Take `weights` out of [model], as a path from here; "" for none."""
    weights = table.pop("weights", "")
    # No path has a NUL: the system's calls answer it by a ValueError, not an OSError.
    if not isinstance(weights, str) or "\0" in weights:
        rule = "must be the path of a Hugging Face folder, or of one with checkpoints"
        field = f"{where}: model.weights"
        raise BadInput(Reason(field=field, value=format_value(weights), rule=rule))
    return resolve_beside(path, weights)


def _read_model(table: dict[str, Any], weights: str, path: Path, where: str) -> ModelSpec:
    if not table:
        if weights and (Path(weights) / "config.json").is_file():
            return hf.read_config(Path(weights))
        rule = "needs config (a path or a known model), or the fields of a config.json"
        nearest = 'config = "config.json"'
        raise BadInput(Reason(field=f"{where}: model", rule=rule, nearest=nearest))
    if "config" not in table:
        return hf.parse_config(table, where=f"{where}: model", name=path.stem)
    config = table.pop("config")
    if table:
        field = f"{where}: model.{min(table)}"
        raise BadInput(Reason(field=field, rule="cannot be given together with model.config"))
    if not isinstance(config, str) or "\0" in config or not config:
        rule = "must be a path or the name of a model"
        raise BadInput(Reason(field=f"{where}: model.config", rule=rule))
    file = Path(resolve_beside(path, config))
    # No model is named like a file: a .json that is not there is refused as a path.
    if file.exists() or file.suffix == ".json":
        return hf.read_config(file)
    return catalogue.model(hub.locate_config(config))


def _read_layout_text(table: dict[str, Any], where: str) -> str:
    """Return [layout] as layout text.

    Its keys are those of the text; a list stands for its items joined by +.
    """
    text = table.pop("text", None)
    if text is not None and table:
        field = f"{where}: layout.{min(table)}"
        raise BadInput(Reason(field=field, rule="cannot be given together with layout.text"))
    if text is not None and not isinstance(text, str):
        rule = "must be text in quotes"
        raise BadInput(Reason(field=f"{where}: layout.text", rule=rule, nearest='"ep2"'))
    if text is None:
        text = ",".join(
            f"{key}={_format_layout_value(key, value, where)}" for key, value in table.items()
        )
    try:
        explicit_fields(text)
    except BadInput as error:
        reasons = (
            replace(reason, field=f"{where}: layout.{reason.field}") for reason in error.reasons
        )
        raise BadInput(*reasons) from None
    return text


def _format_layout_value(key: str, value: Any, where: str) -> str:
    field_of_key = FIELD_OF_KEY.get(key)
    kind = field_of_key.kind if field_of_key else None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "+".join(value) or "none"
    if isinstance(value, bool) and kind is FieldKind.SWITCH:
        return str(int(value))
    if isinstance(value, int | float) and not isinstance(value, bool):  # True is an int
        return str(value)
    if isinstance(value, str):
        # The text of stages has commas, which would end the field.
        return f"'{value}'" if kind is FieldKind.STAGES and "'" not in value else value
    rule = "must be a number, text or a list of texts"
    field = f"{where}: layout.{key[:60]}"
    raise BadInput(Reason(field=field, value=format_value(value), rule=rule))


def _read_axis(key: str, values: Any, where: str) -> TuningAxis:
    """Read a key of [tune]; its values are written as in [layout] or [train]."""
    key = key.strip().casefold()
    if not isinstance(values, list) or not values:
        rule = "must be a list of values"
        raise BadInput(Reason(field=where, value=format_value(values), rule=rule, nearest="[1, 2]"))
    if key in TUNABLE_TRAIN_KEYS:
        low = 0 if key == "gc_every_steps" else 1
        counts = tuple(str(_check_integer(value, where, low=low, high=2**40)) for value in values)
        return TuningAxis(key=key, values=counts)
    texts = tuple(dict.fromkeys(_format_layout_value(key, value, where) for value in values))
    for text in texts:
        try:
            fields_set = explicit_fields(f"{key}={text}")
        except BadInput as error:
            raise BadInput(*(replace(reason, field=where) for reason in error.reasons)) from None
        if not fields_set:
            rule = "is derived from the other degrees; leave it out"
            raise BadInput(Reason(field=where, value=text, rule=rule))
    return TuningAxis(key=key, values=texts)


def _read_hardware_name(value: Any, path: Path, where: str) -> str:
    """Return a device's name, or a hardware file's path from here.

    Without a value it is the file of the machine at hand.
    """
    if value is None:
        return DEFAULT_HARDWARE
    field = f"{where}: train.hardware"
    if not isinstance(value, str) or not value or "\0" in value:
        rule = "must be a device name or the path of a .toml"
        raise BadInput(Reason(field=field, rule=rule, nearest='"machine.toml"'))
    if value.casefold().endswith(".toml"):
        return resolve_beside(path, value)
    if find_device(value) is None:
        nearest = closest_match(value[:60], device_names()) or device_names()[0]
        rule = "must be a known device or the path of a .toml; how many stands in train.nproc"
        raise BadInput(Reason(field=field, value=value[:60], rule=rule, nearest=nearest))
    return value


def _read_network(value: Any, where: str) -> str:
    """Return the names of the kinds of network, joined by "+"; "" leaves the hardware's own."""
    if value == "":
        return ""
    names = value.split("+") if isinstance(value, str) else [""]
    unknown = next((name for name in names if name not in read_networks()), None)
    if unknown is None:
        return str(value)
    raise refuse_network(unknown, field=f"{where}: train.network", value=format_value(value))


def _check_integer(value: Any, where: str, *, high: int, low: int = 1) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        nearest = min(max(value, low), high) if is_integer else low
        raise BadInput(
            Reason(
                field=where,
                value=format_value(value),
                rule=f"must be a whole number in {low}..{high}",
                nearest=str(nearest),
            )
        )
    return int(value)
