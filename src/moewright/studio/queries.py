"""The address of a page as a query, with the job that was dropped on it: nothing else is kept.

A config.json is packed as it stands; the job of a launch script as the fields of model and workload
that are not at their defaults.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from moewright.api.launch_scripts import read_flags
from moewright.api.planning import is_plan_file
from moewright.api.views import ViewQuery
from moewright.api.watching import WatchedJob
from moewright.api.workload_choices import workload_options
from moewright.codec import format_layout, parse_json, read_json, write_json
from moewright.codec.data import from_data, to_data
from moewright.codec.files import read_text
from moewright.codec.numbers import explain_thousands, parse_count
from moewright.intake import hf
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import BatchRampSpec, Workload
from moewright.studio.folder import StudioFolder

MOST_LETTERS = 3500  # of what addresses of every browser and proxy hold
_MOST_BYTES = 1 << 18  # of fields
_MOST_NAME = 40
_MOST_DIGITS = 12
_TOO_LONG = (
    "too long for an address: it names a file of this machine; send plan.json of Share, which "
    "another studio takes where it is dropped"
)
_PACKED = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)~(?P<kind>job~)?(?P<fields>[A-Za-z0-9_-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedJob:
    """What an address holds: a model, and the workload of a job that was stated whole."""

    model: ModelSpec
    workload: Workload | None = None


def pack_config(name: str, config: Mapping[str, object]) -> str:
    """Return a name and the fields of a config.json as text of an address; "" if it is too long."""
    return _pack(f"{name}~", config)


def _pack_model(name: str, model: ModelSpec) -> str:
    """Return a model as the few fields that it follows from; "" where they do not say all of it."""
    config = hf.build_config(model)
    is_whole = hf.parse_config(config, where="config.json", name=model.name) == model
    return pack_config(name, config) if is_whole else ""


def pack_job(model: ModelSpec, workload: Workload) -> str:
    """Return a model and a workload as text of an address; "" if it is too long."""
    job = {"model": _list_changes(model), "workload": _list_changes(workload)}
    return _pack(f"{clean_name(model.name)}~job~", job)


def clean_name(text: str) -> str:
    """Return what stands behind the last slash of a name, in letters that addresses have."""
    kept = re.sub(r"[^A-Za-z0-9_.-]", "", text.rpartition("/")[2])
    return kept[:_MOST_NAME].lstrip(".") or "model"


def _pack(head: str, data: Mapping[str, object]) -> str:
    compressed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    text = head + urlsafe_b64encode(compressed).decode().rstrip("=")
    return text if len(text) <= MOST_LETTERS else ""


def _list_changes(record: Any) -> dict[str, object]:
    """Return the fields of a record that are not at their defaults, of records inside as well."""
    changes: dict[str, object] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            changes[field.name] = _list_changes(value) if is_dataclass(value) else to_data(value)
    return changes


def unpack_job(text: str) -> PackedJob | None:
    """Return the job that an address holds; None for a text of another kind.

    Raises:
        BadInput: the address was cut or changed, or its fields are no model's.
    """
    packed = _PACKED.fullmatch(text)
    if packed is None:
        return None
    name = packed["name"]
    try:
        data = urlsafe_b64decode(packed["fields"] + "=" * (-len(packed["fields"]) % 4))
        opened = zlib.decompressobj()
        content = opened.decompress(data, _MOST_BYTES)
        is_whole = opened.eof and len(text) <= MOST_LETTERS
    except (Error, zlib.error):
        is_whole = False
    if not is_whole:
        rule = "is cut or changed: its address does not hold a whole job"
        raise BadInput(Reason(field="model", value=name, rule=rule, nearest="drop the file again"))
    values = parse_json(content.decode(errors="replace"), where=name)
    if packed["kind"]:
        return from_data(PackedJob, values, where=name)
    if not isinstance(values, Mapping):
        raise BadInput(Reason(field="model", value=name, rule="must be an object"))
    return PackedJob(model=hf.parse_config(values, where=name, name=name))


def read_dropped_model(folder: StudioFolder, path: Path) -> dict[str, object]:
    """Return the query of a config.json or a plan.json, which holds all of it, with notes.

    Of a long one the address has the fields that the model follows from; one whose model is too
    long for an address is kept in the studio's folder.

    Raises:
        BadInput: the file is neither a config.json of a model that can be planned nor a plan.
    """
    if is_plan_file(path):
        return _read_dropped_plan(path)
    data = parse_json(read_text(path), where="config.json")
    if not isinstance(data, Mapping):
        raise BadInput(Reason(field="config.json", rule="must be an object"))
    name = clean_name(str(data.get("_name_or_path") or _name_config(path, data)))
    model = hf.parse_config(data, where="config.json", name=name)
    packed = pack_config(name, data) or _pack_model(name, model)
    if packed:
        return {"query": {"model": packed}, "notes": []}
    kept = folder.keep_model(json.dumps(data), name)
    return {"query": {"model": str(kept)}, "notes": [_TOO_LONG]}


def _read_dropped_plan(path: Path) -> dict[str, object]:
    """Return the query of a plan.json, which another studio has sent; it brings a whole job."""
    plan = read_json(Plan, path)
    layout = format_layout(plan.layout)
    replaced = ("seq_len", "global_batch", "precision", "network", "rampup_batch_size", "load")
    fresh = dict.fromkeys(replaced, "")
    query = {
        "model": pack_job(plan.model, plan.workload),
        "on": f"{plan.hardware.count}x{plan.hardware.device.name}",
        "layout": layout,
    }
    try:
        is_whole = bool(query["model"]) and read_query(query).build().hardware == plan.hardware
    except BadInput:  # hardware of a file of its own, say
        is_whole = False
    if is_whole:
        return {"query": {**fresh, **query}, "notes": []}
    return {
        "query": {**fresh, "model": str(path), "on": "", "layout": layout},
        "notes": [_TOO_LONG],
    }


def _name_config(path: Path, data: Mapping[str, object]) -> str:
    """Return the name of a file that has one of its own, else what its architecture is called."""
    if path.stem != "config":
        return path.stem
    architectures = data.get("architectures") or data.get("model_type") or "model"
    return str(architectures[0] if isinstance(architectures, list) else architectures)


def read_dropped_script(path: Path, params: Mapping[str, str]) -> dict[str, object]:
    """Return the query that a Megatron-LM launch script states, with notes on its reading.

    `params` may name the model and the devices of a script, which does not. The query holds the
    job; one that is too long for an address is kept as a plan.

    Raises:
        BadInput: the script cannot be read or planned.
    """
    device = params.get("on", "").rpartition("x")[2] or params.get("on", "")
    reading = read_flags(path, on=device, model=params.get("model", ""))
    plan = reading.plan
    notes = list(reading.notes)
    model = pack_job(plan.model, plan.workload)
    if not model:
        kept = path.with_suffix(".plan.json")
        write_json(kept, plan)
        model = str(kept)
        notes.append(_TOO_LONG)
    query = {
        "model": model,
        "on": f"{plan.hardware.count}x{device}",
        "layout": format_layout(plan.layout),
    }
    return {"query": query, "notes": notes}


_LONGEST = 4000  # what servers and browsers take of an address


def read_query(params: Mapping[str, str]) -> ViewQuery:
    """Read the query of an address, whose keys are model, on, layout and options of the workload.

    Raises:
        BadInput: a number or a precision cannot be read, or nothing says the model.
    """
    for key, value in params.items():
        if len(value) > _LONGEST:
            rule = f"must have at most {_LONGEST} characters"
            raise BadInput(Reason(field=key, value=value[:20], rule=rule))
    if not params.get("model"):
        raise BadInput(Reason(field="model", rule="is needed", nearest="Qwen3-30B-A3B"))
    options = workload_options(
        read_count(params, "seq_len"),
        read_count(params, "global_batch"),
        params.get("precision") or None,
        Path(params["load"]) if params.get("load") else None,
    )
    packed = unpack_job(params["model"])
    return ViewQuery(
        model=params["model"] if packed is None else packed.model,
        workload=None if packed is None else packed.workload,
        on=params.get("on", ""),
        options=replace(
            options, network=params.get("network", ""), rampup_batch_size=_read_ramp(params)
        ),
        layout=params.get("layout", ""),
        notes=tuple(filter(None, (explain_thousands(params.get("seq_len", "")),))),
    )


def _read_ramp(params: Mapping[str, str]) -> tuple[int, int, int] | None:
    words = params.get("rampup_batch_size", "").split()
    if not words:
        return None
    if len(words) != len(fields(BatchRampSpec)):
        rule = "needs three numbers: start, increment, samples"
        raise BadInput(Reason(field="rampup_batch_size", value=" ".join(words), rule=rule))
    start, increment, samples = (parse_count(word, "rampup_batch_size") for word in words)
    return start, increment, samples


def read_count(params: Mapping[str, str], key: str) -> int | None:
    """Return a whole number of an address, which may be written as 4k; None without.

    Raises:
        BadInput: it is no number.
    """
    text = params.get(key, "").strip()
    return parse_count(text, key) if text else None


def read_number(params: Mapping[str, str], key: str) -> float | None:
    """Return a number of an address; None without.

    Raises:
        BadInput: it is no number.
    """
    text = params.get(key, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise BadInput(Reason(field=key, value=text[:60], rule="must be a number")) from None


def read_counts(params: Mapping[str, str], key: str) -> tuple[int, ...]:
    """Return the whole numbers of an address, apart by spaces or commas.

    Raises:
        BadInput: a word is no whole number.
    """
    words = params.get(key, "").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()) or len(word) > _MOST_DIGITS:
            rule = "must be whole numbers, apart by spaces"
            raise BadInput(Reason(field=key, value=word[:60], rule=rule, nearest="2 4 8"))
    return tuple(map(int, words))


def read_watched_job(params: Mapping[str, Any]) -> WatchedJob:
    """Return the job of a log as a page says it; the log or its folder may say the rest."""
    return WatchedJob(
        model=params.get("model", ""), on=params.get("on", ""), layout=params.get("layout", "")
    )
