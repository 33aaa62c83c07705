"""Known models and devices, each number with its source, and hardware written as people write it:
"256xH800"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from moewright.codec import closest_match, parse_json, read_toml
from moewright.intake import devices, hf
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec

_COUNTED = re.compile(r"\s*([+-]?[\d.,_]*\d(?:e[+-]?\d+)?)\s*[xX×*]\s*(.*\S)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """A model of the catalogue: where its figures come from, and whether they were re-read
    there."""

    name: str
    source: str
    verified: bool
    note: str


def model(name: str) -> ModelSpec:
    """A model by name (with or without its organisation, any letter case), or from a config.json or
    its folder.

    A model whose mixer is not modelled is refused by name. Raises BadInput with the nearest known
    name.
    """
    key = _find(name)
    if key is not None:
        return hf.parse_config(_table()[key]["config"], where=key, name=key)
    path = Path(name)
    if "\0" in name or not name.strip():
        raise BadInput(
            Reason(field="model", value=repr(name)[:60], rule="is no model name and no path")
        )
    if _exists(path) or path.suffix == ".json":
        return hf.read_config(path)
    known = model_names()
    short = {known_name.rpartition("/")[2]: known_name for known_name in known}
    asked = name.strip().rpartition("/")[2]
    begins = [
        known_name for known_name in short if known_name.casefold().startswith(asked.casefold())
    ]
    close = min(begins, key=len) if begins and asked else closest_match(asked, short)
    rule = "is neither a known model nor a config.json or a folder with one"
    if not close:
        rule = f"{rule}; known: {', '.join(short)}"
    raise BadInput(
        Reason(field="model", value=name[:80], rule=rule, nearest=short[close] if close else "")
    )


def skipped_fields(name: str) -> tuple[str, ...]:
    """Fields of a config.json that `model` skipped because nobody here has heard of them; none of a
    catalogue model."""
    return () if _find(name) is not None else hf.unknown_fields(Path(name))


def model_names() -> tuple[str, ...]:
    """Every model that `model` can give, sorted."""
    return tuple(
        sorted(
            name for name, entry in _table().items() if entry["config"]["model_type"] in hf.FAMILIES
        )
    )


def model_entry(name: str) -> ModelEntry:
    """Where a catalogue model's figures come from."""
    key = _find(name)
    if key is None:
        raise BadInput(Reason(field="model", value=name[:80], rule="is not in the catalogue"))
    entry = _table()[key]
    return ModelEntry(
        name=key, source=entry["source"], verified=entry["verified"], note=entry.get("note", "")
    )


def hardware(text: str) -> Hardware:
    """Hardware from "256xH800", "2xpath/machine.toml" or "path/machine.toml" (whose own count then
    holds).

    A device without a count is one device. Raises BadInput.
    """
    counted = _COUNTED.fullmatch(text)
    count = _count(counted[1], counted[2], text) if counted else None
    what = counted[2] if counted else text.strip()
    if what.casefold().endswith(".toml"):
        found = read_toml(Hardware, Path(what))
        devices.check_hardware(found, where=what)
        return found if count is None else replace(found, count=count)
    part = devices.find_device(what)
    if part is None:
        names = devices.device_names()
        rule = f"no device {what[:60]!r}; known: {', '.join(names)}, or the path of a .toml"
        close = closest_match(what[:60], names)
        raise BadInput(
            Reason(
                field="hardware",
                value=text[:80],
                rule=rule,
                nearest=f"{count or 1}x{close or names[0]}",
            )
        )
    return devices.build_hardware(part, count=1 if count is None else count)


def hardware_names() -> tuple[str, ...]:
    """The short names of the devices."""
    return devices.device_names()


def _count(text: str, what: str, on: str) -> int:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise BadInput(
            Reason(
                field="hardware",
                value=on[:80],
                rule="the count is not a number",
                nearest=f"1x{what[:60]}",
            )
        ) from None
    close = int(min(max(value, 1), devices.MAX_DEVICES))
    if value != close:
        rule = f"the count must be a whole number in 1..{devices.MAX_DEVICES}"
        raise BadInput(
            Reason(field="hardware", value=on[:80], rule=rule, nearest=f"{close}x{what[:60]}")
        )
    return close


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _find(name: str) -> str | None:
    """The catalogue key of a name given in full or without its organisation."""
    folded = name.strip().casefold()
    for key in _table():
        if folded in (key.casefold(), key.rpartition("/")[2].casefold()):
            return key
    return None


def _table() -> Mapping[str, Any]:
    text = (
        resources.files("moewright.intake").joinpath("data/models.json").read_text(encoding="utf-8")
    )
    table: Mapping[str, Any] = parse_json(text, where="models.json")
    return table
