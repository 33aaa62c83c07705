"""The address of a page as a query, with the config.json or script that was dropped on it."""

from __future__ import annotations

import json
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from moewright.api.launch_scripts import read_flags
from moewright.api.planning import workload_options
from moewright.api.views import ViewQuery
from moewright.codec import format_layout, parse_json, write_json
from moewright.codec.files import read_text
from moewright.codec.numbers import parse_count
from moewright.intake import hf
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import BatchRampSpec
from moewright.studio.folder import StudioFolder

MOST_LETTERS = 3500  # of what addresses of every browser and proxy hold
_MOST_BYTES = 1 << 18  # of fields
_PACKED = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)~(?P<fields>[A-Za-z0-9_-]+)")


def pack_config(name: str, config: Mapping[str, object]) -> str:
    """Return a name and the fields of a config.json as text of an address; "" if it is too long."""
    fields = json.dumps(config, separators=(",", ":")).encode()
    packed = urlsafe_b64encode(zlib.compress(fields, 9)).decode().rstrip("=")
    text = f"{name}~{packed}"
    return text if len(text) <= MOST_LETTERS else ""


def unpack_model(text: str) -> ModelSpec | None:
    """Return the model that an address holds; None for a text of another kind.

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
        fields = opened.decompress(data, _MOST_BYTES)
        is_whole = opened.eof and len(text) <= MOST_LETTERS
    except (Error, zlib.error):
        is_whole = False
    if not is_whole:
        rule = "is cut or changed: its address does not hold a whole config.json"
        raise BadInput(Reason(field="model", value=name, rule=rule, nearest="drop the file again"))
    config = parse_json(fields.decode(errors="replace"), where=name)
    if not isinstance(config, Mapping):
        raise BadInput(Reason(field="model", value=name, rule="must be an object"))
    return hf.parse_config(config, where=name, name=name)


_MOST_NAME = 40


def read_dropped_model(folder: StudioFolder, path: Path) -> dict[str, str]:
    """Return the name by which queries find a config.json, which holds all of it.

    One that is too long for an address is kept in the studio's folder.

    Raises:
        BadInput: the file is no config.json of a model that can be planned.
    """
    data = parse_json(read_text(path), where="config.json")
    if not isinstance(data, Mapping):
        raise BadInput(Reason(field="config.json", rule="must be an object"))
    architectures = data.get("architectures") or data.get("model_type") or "model"
    first = architectures[0] if isinstance(architectures, list) else architectures
    called = str(data.get("_name_or_path") or first).rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9_.-]", "", called)[:_MOST_NAME].lstrip(".") or "model"
    hf.parse_config(data, where="config.json", name=name)
    return {"model": pack_config(name, data) or str(folder.keep_model(json.dumps(data), name))}


def read_dropped_script(path: Path, params: Mapping[str, str]) -> dict[str, object]:
    """Return the query that a Megatron-LM launch script states, with notes on its reading.

    `params` may name the model and the devices of a script, which does not. The job is kept as a
    plan, which the query names as its model.

    Raises:
        BadInput: the script cannot be read or planned.
    """
    device = params.get("on", "").rpartition("x")[2] or params.get("on", "")
    reading = read_flags(path, on=device, model=params.get("model", ""))
    plan = reading.plan
    kept = path.with_suffix(".plan.json")
    write_json(kept, plan)
    query = {
        "model": str(kept),
        "on": f"{plan.hardware.count}x{device}",
        "layout": format_layout(plan.layout),
    }
    return {"query": query, "notes": reading.notes}


_LONGEST = 4000


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
    return ViewQuery(
        model=unpack_model(params["model"]) or params["model"],
        on=params.get("on", ""),
        options=replace(
            options, network=params.get("network", ""), rampup_batch_size=_read_ramp(params)
        ),
        layout=params.get("layout", ""),
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
