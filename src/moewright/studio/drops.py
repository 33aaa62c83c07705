"""Files that are dropped on a page: a config.json names a model, a launch script a whole job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from moewright.api.launch_scripts import read_flags
from moewright.codec import format_layout, parse_json, write_json
from moewright.codec.files import read_text
from moewright.intake import hf
from moewright.spec.errors import BadInput, Reason
from moewright.studio.folder import StudioFolder
from moewright.studio.packing import pack_config

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
