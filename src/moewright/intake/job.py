"""Job files: one TOML with what to train, on what, for how long.

Sections: [model] (`config`: a catalogue name, or a path beside the job file; or a config.json's
fields themselves; and `weights`: what to start from, a folder of checkpoints or a Hugging Face
folder, whose config.json is the model where no other is given), [data], [layout] (`text =
"ep2,mbs2"`, or the layout's keys; what is absent is for the search), [train] (the fields of
Workload, OptimizerSpec, LossSpec, RouterTraining, ScalingSpec and RampSpec, and `nproc` and
`hardware`), [checkpoint], [tune] (what tuning may change, each key with a list of values). Relative
paths start at the job file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moewright.codec import closest_match, explicit_fields, format_value, from_data, read_toml_data
from moewright.intake import catalogue, devices, hf
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.tuning_axis import TUNABLE_TRAIN_KEYS, TuningAxis
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    Dtype,
    LossScalingSpec,
    LossSpec,
    OptimizerSpec,
    ProfileSpec,
    RouterTraining,
    Workload,
)

DEFAULT_HARDWARE = "runs/machine.toml"
MAX_SEQ_LEN = 2**24
MAX_BATCH = 2**24
MAX_STEPS = 10**9

_SECTIONS = ("model", "data", "layout", "train", "checkpoint", "tune")
_NESTED = ("optimizer", "loss", "router", "scaling", "ramp", "data", "checkpoint", "profile")
_OWN = ("nproc", "hardware")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A job file, read. `layout_text` holds what the file fixes of the layout (see
    codec.parse_layout), maybe nothing; `hardware` is a device name or the path of a hardware file,
    without a count; `nproc` the ranks to start; `axes` what tuning may change, () for whatever it
    likes.
    """

    model: ModelSpec
    workload: Workload
    layout_text: str
    nproc: int
    hardware: str
    axes: tuple[TuningAxis, ...] = ()


def read_job(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """The job in a TOML file, after `overrides` like "train.lr=1e-3" (values as in TOML; bare text
    is text).

    Raises BadInput that names file, section and key.
    """
    data = read_toml_data(path)
    where = path.name
    for override in overrides:
        _override(data, override)
    tables = _sections(data, where)
    train = tables["train"]
    workload = _workload(tables, path, where)  # takes model.weights
    nproc = _whole(train.get("nproc", 1), f"{where}: train.nproc", high=devices.MAX_DEVICES)
    return JobFile(
        model=_model(tables["model"], workload.weights, path, where),
        workload=workload,
        layout_text=_layout(tables["layout"], where),
        nproc=nproc,
        hardware=_hardware(train.get("hardware"), path, where),
        axes=tuple(
            _axis(key, values, f"{where}: tune.{key[:60]}")
            for key, values in tables["tune"].items()
        ),
    )


def _override(data: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name:
        rule = "must be section.key=value"
        raise BadInput(Reason(field="--set", value=text[:60], rule=rule, nearest="train.lr=1e-3"))
    try:
        read = tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except (ValueError, RecursionError):
        read = value.strip()
    table = data.setdefault(section, {})
    if not isinstance(table, dict):
        raise BadInput(
            Reason(
                field=f"--set {section}",
                rule="is no section",
                nearest=closest_match(section, _SECTIONS),
            )
        )
    inner, dot, leaf = name.partition(".")
    if dot and isinstance(table.setdefault(inner, {}), dict):
        table[inner][leaf] = read
    else:
        table[name] = read


def _sections(data: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    for section, table in data.items():
        if section not in _SECTIONS:
            close = closest_match(section, _SECTIONS)
            rule = (
                "unknown section" if close else f"unknown section; sections: {', '.join(_SECTIONS)}"
            )
            raise BadInput(Reason(field=f"{where}: {section[:60]}", rule=rule, nearest=close))
        if not isinstance(table, dict):
            raise BadInput(
                Reason(
                    field=f"{where}: {section}", rule="must be a section", nearest=f"[{section}]"
                )
            )
    return {section: dict(data.get(section, {})) for section in _SECTIONS}


def _weights(table: dict[str, Any], path: Path, where: str) -> str:
    weights = table.pop("weights", "")
    if not isinstance(weights, str) or "\0" in weights:
        rule = "must be the path of a Hugging Face folder, or of one with checkpoints"
        raise BadInput(
            Reason(field=f"{where}: model.weights", value=format_value(weights), rule=rule)
        )
    return _beside(path, weights)


def _model(table: dict[str, Any], weights: str, path: Path, where: str) -> ModelSpec:
    if "config" not in table:
        if not table and (Path(weights) / "config.json").is_file() and weights:
            return hf.read_config(Path(weights))
        if not table:
            rule = "needs config (a path or a known model), or the fields of a config.json"
            raise BadInput(
                Reason(field=f"{where}: model", rule=rule, nearest='config = "config.json"')
            )
        return hf.parse_config(table, where=f"{where}: model", name=path.stem)
    config = table.pop("config")
    if table:
        key = sorted(table)[0]
        raise BadInput(
            Reason(field=f"{where}: model.{key}", rule="cannot stand beside model.config")
        )
    if not isinstance(config, str) or "\0" in config or not config:
        raise BadInput(
            Reason(field=f"{where}: model.config", rule="must be a path or the name of a model")
        )
    beside = Path(_beside(path, config))
    if beside.exists() or beside.suffix == ".json":
        return hf.read_config(beside)
    return catalogue.model(config)


def _workload(tables: Mapping[str, dict[str, Any]], path: Path, where: str) -> Workload:
    train = tables["train"]
    groups = {"": [f.name for f in fields(Workload) if f.name not in (*_NESTED, "weights")]}
    flat = {
        "optimizer": OptimizerSpec,
        "loss": LossSpec,
        "router": RouterTraining,
        "scaling": LossScalingSpec,
        "ramp": BatchRampSpec,
    }
    groups |= {name: [f.name for f in fields(nested)] for name, nested in flat.items()}
    legal = [*(name for names in groups.values() for name in names), *_OWN, "profile"]
    for key in train:
        if key not in legal:
            close = closest_match(key, legal)
            rule = "unknown key" if close else f"unknown key; known here: {', '.join(legal)}"
            raise BadInput(Reason(field=f"{where}: train.{key[:60]}", rule=rule, nearest=close))
    here = f"{where}: train"
    for key in ("seq_len", "global_batch"):
        if key not in train:
            raise BadInput(Reason(field=f"{here}.{key}", rule="is missing"))
    picked = {group: {k: train[k] for k in names if k in train} for group, names in groups.items()}
    data = from_data(DataSpec, tables["data"], where=f"{where}: data")
    profile = from_data(ProfileSpec, train.get("profile", {}), where=f"{here}.profile")
    workload = from_data(
        Workload,
        picked[""]
        | {
            name: _plain(from_data(nested, picked[name], where=here))
            for name, nested in flat.items()
        }
        | {
            "data": _plain(data)
            | {
                name: _beside(path, getattr(data, name))
                for name in ("train", "heldout", "tokenizer")
            }
        }
        | {"weights": _weights(tables["model"], path, where)}
        | {"profile": _plain(profile)}
        | {
            "checkpoint": _plain(
                from_data(CheckpointSpec, tables["checkpoint"], where=f"{where}: checkpoint")
            )
        },
        where=here,
    )
    faults = tuple(_out_of_range(workload, where))
    if faults:
        raise BadInput(*faults)
    return workload


def _plain(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _out_of_range(workload: Workload, where: str) -> Iterator[Reason]:
    optimizer, loss, router, checkpoint = (
        workload.optimizer,
        workload.loss,
        workload.router,
        workload.checkpoint,
    )
    scaling, ramp = workload.scaling, workload.ramp
    ranges = (
        ("train.seq_len", workload.seq_len, 1, MAX_SEQ_LEN),
        ("train.global_batch", workload.global_batch, 1, MAX_BATCH),
        ("train.steps", workload.steps, 0, MAX_STEPS),
        ("train.seed", workload.seed, 0, 2**62),
        ("train.load_factor", workload.load_factor, 1, 1e6),
        ("train.load_skew", workload.load_skew, 0, 1e6),
        ("train.eval_every_steps", workload.eval_every_steps, 0, MAX_STEPS),
        ("train.router_log_every_steps", workload.router_log_every_steps, 0, MAX_STEPS),
        ("train.eval_batches", workload.eval_batches, 1, MAX_STEPS),
        ("train.ledger_step", workload.ledger_step, 0, MAX_STEPS),
        ("train.gc_every_steps", workload.gc_every_steps, 0, MAX_STEPS),
        (
            "train.profile.start",
            workload.profile.start,
            1 if workload.profile.end else 0,
            MAX_STEPS,
        ),
        (
            "train.profile.end",
            workload.profile.end,
            workload.profile.start + 1 if workload.profile.start else 0,
            MAX_STEPS,
        ),
        ("train.profile.ranks", min(workload.profile.ranks, default=-1), 0, devices.MAX_DEVICES),
        ("train.lr", optimizer.lr, 0, 1e3),
        ("train.min_lr_fraction", optimizer.min_lr_fraction, 0, 1),
        ("train.warmup_steps", optimizer.warmup_steps, 0, MAX_STEPS),
        ("train.decay_steps", optimizer.decay_steps, 0, MAX_STEPS),
        ("train.beta1", optimizer.beta1, 0, 1 - 1e-9),
        ("train.beta2", optimizer.beta2, 0, 1 - 1e-9),
        ("train.eps", optimizer.eps, 1e-30, 1),
        ("train.weight_decay", optimizer.weight_decay, 0, 1e3),
        ("train.clip_norm", optimizer.clip_norm, 0, 1e9),
        ("train.bucket_elements", optimizer.bucket_elements, 1, 2**40),
        ("train.aux_coeff", loss.aux_coeff, 0, 1e3),
        ("train.seq_aux_coeff", loss.seq_aux_coeff, 0, 1e3),
        ("train.global_aux_coeff", loss.global_aux_coeff, 0, 1e3),
        ("train.z_coeff", loss.z_coeff, 0, 1e3),
        ("train.mtp_coeff", loss.mtp_coeff, 0, 1e3),
        ("train.bias_update_rate", router.bias_update_rate, 0, 1),
        ("train.force_std", router.force_std, 0, 1e3),
        ("train.sinkhorn_iterations", router.sinkhorn_iterations, 0, 10**6),
        ("train.jitter_eps", router.jitter_eps, 0, 0.999),
        ("train.initial_loss_scale", scaling.initial_loss_scale, 1, 2.0**40),
        ("train.min_loss_scale", scaling.min_loss_scale, 1, scaling.initial_loss_scale),
        ("train.loss_scale_window", scaling.loss_scale_window, 1, MAX_STEPS),
        ("train.ramp_start", ramp.ramp_start, 0, workload.global_batch),
        (
            "train.ramp_increment",
            ramp.ramp_increment,
            1 if ramp.ramp_start else 0,
            workload.global_batch,
        ),
        ("train.ramp_samples", ramp.ramp_samples, 0, 2**40),
        ("data.attended_share", workload.data.attended_share, 1e-9, 1),
        ("checkpoint.every_steps", checkpoint.every_steps, 0, MAX_STEPS),
        ("checkpoint.keep", checkpoint.keep, 1, 10**6),
        ("checkpoint.keep_every_steps", checkpoint.keep_every_steps, 0, MAX_STEPS),
    )
    for key, value, low, high in ranges:
        if not low <= value <= high:
            close = f"{min(max(value, low), high):.12g}"
            rule = f"must be in {low:.12g}..{high:.12g}"
            yield Reason(field=f"{where}: {key}", value=f"{value:.12g}", rule=rule, nearest=close)
    for key, dtype in (
        ("grad_dtype", workload.grad_dtype),
        ("moment_dtype", optimizer.moment_dtype),
    ):
        if dtype is Dtype.FP16:
            rule = "fp16 has too little range to accumulate in"
            yield Reason(field=f"{where}: train.{key}", value=dtype, rule=rule, nearest=Dtype.FP32)


def _layout(table: dict[str, Any], where: str) -> str:
    """The section as layout text. Keys are those of the text; a list stands for its items joined by
    +."""
    text = table.pop("text", None)
    if text is not None and table:
        raise BadInput(
            Reason(
                field=f"{where}: layout.{sorted(table)[0]}", rule="cannot stand beside layout.text"
            )
        )
    if text is not None and not isinstance(text, str):
        raise BadInput(
            Reason(field=f"{where}: layout.text", rule="must be text in quotes", nearest='"ep2"')
        )
    if text is None:
        text = ",".join(f"{key}={_layout_value(key, value, where)}" for key, value in table.items())
    try:
        explicit_fields(text)
    except BadInput as error:
        reasons = (
            Reason(
                field=f"{where}: layout.{r.field}", rule=r.rule, value=r.value, nearest=r.nearest
            )
            for r in error.reasons
        )
        raise BadInput(*reasons) from None
    return text


def _layout_value(key: str, value: Any, where: str) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "+".join(value) or "none"
    if isinstance(value, bool) and key == "sp":
        return str(int(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f"'{value}'" if key == "layout" and "'" not in value else value
    rule = "must be a number, text or a list of texts"
    raise BadInput(
        Reason(field=f"{where}: layout.{key[:60]}", value=format_value(value), rule=rule)
    )


def _axis(key: str, values: Any, where: str) -> TuningAxis:
    """A key of [tune] and its values, each as it would stand in [layout] or [train]."""
    if not isinstance(values, list) or not values:
        raise BadInput(
            Reason(
                field=where,
                value=format_value(values),
                rule="must be a list of values",
                nearest="[1, 2]",
            )
        )
    if key in TUNABLE_TRAIN_KEYS:
        low = 0 if key == "gc_every_steps" else 1
        return TuningAxis(
            key=key,
            values=tuple(str(_whole(value, where, low=low, high=2**40)) for value in values),
        )
    texts = tuple(dict.fromkeys(_layout_value(key, value, where) for value in values))
    for text in texts:
        try:
            fields_set = explicit_fields(f"{key}={text}")
        except BadInput as error:
            raise BadInput(*(replace(reason, field=where) for reason in error.reasons)) from None
        if not fields_set:
            raise BadInput(
                Reason(
                    field=where, value=text, rule="is derived from the other degrees; leave it out"
                )
            )
    return TuningAxis(key=key, values=texts)


def _hardware(value: Any, path: Path, where: str) -> str:
    """A device of the catalogue by name; a file as a path from here. Absent: the machine at
    hand."""
    if value is None:
        return DEFAULT_HARDWARE
    here = f"{where}: train.hardware"
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadInput(
            Reason(
                field=here,
                rule="must be a device name or the path of a .toml",
                nearest='"machine.toml"',
            )
        )
    if value.casefold().endswith(".toml"):
        return _beside(path, value)
    if devices.find_device(value) is None:
        close = closest_match(value[:60], devices.device_names())
        rule = "must be a known device or the path of a .toml; how many stands in train.nproc"
        raise BadInput(
            Reason(
                field=here, value=value[:60], rule=rule, nearest=close or devices.device_names()[0]
            )
        )
    return value


def _beside(path: Path, value: str) -> str:
    """A path relative to the job file, as a path from the working folder; "" stays ""."""
    return os.path.normpath(path.parent / value) if value else ""


def _whole(value: Any, where: str, *, high: int, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        close = (
            str(min(max(value, low), high))
            if isinstance(value, int) and not isinstance(value, bool)
            else str(low)
        )
        rule = f"must be a whole number in {low}..{high}"
        raise BadInput(Reason(field=where, value=format_value(value), rule=rule, nearest=close))
    return value
