"""The known models and devices with their sources, and hardware written as "256xH800"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moewright.codec import from_data, parse_json, read_toml, to_data
from moewright.intake import hf
from moewright.intake.devices import (
    DeviceEntry,
    build_hardware,
    device_names,
    find_device,
    give_memory,
    read_devices,
)
from moewright.intake.hardware_text import HardwareText, parse_hardware_text
from moewright.intake.networks import (
    apply_network,
    check_new_names,
    complete_fabric,
    find_level_faults,
    read_added_files,
)
from moewright.spec.errors import BadInput, Reason, escape_controls
from moewright.spec.hardware import MAX_DEVICES, Curve, Device, Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.names import closest_match
from moewright.spec.units import mention
from moewright.spec.workload import Dtype

# Hardware files, such as the one that `moewright bench` writes.


def read_hardware_file(path: str) -> Hardware:
    """Read a hardware file.

    Raises:
        BadInput: the file cannot be read, or some of its numbers cannot be used in an estimate; it
            has one Reason for each fault.
    """
    hardware = read_toml(Hardware, Path(path))
    faults = (
        *_numbers_not_above_zero(hardware),
        *_bad_count(hardware),
        *_bad_curves(hardware),
        *find_level_faults(hardware.fabric),
    )
    if faults:
        raise BadInput(
            *(
                Reason(
                    field=f"{path}: {fault.field}",
                    value=fault.value,
                    rule=fault.rule,
                    nearest=fault.nearest,
                )
                for fault in faults
            )
        )
    device = replace(_add_formats(hardware.device), name=escape_controls(hardware.device.name))
    named = replace(hardware, name=escape_controls(hardware.name), device=device)
    return complete_fabric(named)


def _add_formats(device: Device) -> Device:
    """Return a device with the formats that its part multiplies at the rate of one it lists.

    Files written before 0.4 list the FP8 peak of parts that multiply MXFP8 too.
    """
    entry = find_device(device.name)
    own = {peak.dtype: peak for peak in device.peaks}
    if entry is None or Dtype.FP8 not in own or Dtype.MXFP8 in own:
        return device
    if all(peak.dtype is not Dtype.MXFP8 for peak in entry.peaks):
        return device
    return replace(device, peaks=(*device.peaks, replace(own[Dtype.FP8], dtype=Dtype.MXFP8)))


def _numbers_not_above_zero(hardware: Hardware) -> Iterator[Reason]:
    device = hardware.device
    fabric = hardware.fabric
    numbers = (
        ("device.memory_bytes", device.memory_bytes.value),
        ("device.memory_Bps", device.memory_Bps.value),
        ("fabric.domain_Bps", fabric.domain_Bps.value),
        ("fabric.network_Bps", fabric.network_Bps.value),
        ("fabric.domain_size", fabric.domain_size),
        ("fabric.devices_per_node", fabric.devices_per_node),
        *((f"device.peaks[{i}].rate", peak.rate.value) for i, peak in enumerate(device.peaks)),
        *((f"fabric.links[{i}].Bps", link.Bps.value) for i, link in enumerate(fabric.links)),
    )
    for field, value in numbers:
        if value <= 0:
            yield Reason(field=field, value=f"{value:g}", rule="must be above 0", nearest="1")


def _bad_count(hardware: Hardware) -> Iterator[Reason]:
    count = hardware.count
    if not 1 <= count <= MAX_DEVICES:
        nearest = str(min(max(count, 1), MAX_DEVICES))
        rule = f"must be in 1..{MAX_DEVICES}"
        yield Reason(field="count", value=str(count), rule=rule, nearest=nearest)


def _bad_curves(hardware: Hardware) -> Iterator[Reason]:
    curves = (
        *((f"device.rates[{i}].curve", rate.curve) for i, rate in enumerate(hardware.device.rates)),
        *((f"fabric.times[{i}].curve", time.curve) for i, time in enumerate(hardware.fabric.times)),
    )
    for field, curve in curves:
        if not _is_usable(curve):
            rule = "must have points with x above 0 and ascending, and y above 0"
            yield Reason(field=field, rule=rule)


def _is_usable(curve: Curve) -> bool:
    """Whether the curve can be interpolated in logarithms."""
    xs = [x for x, _ in curve.points]
    ys = [y for _, y in curve.points]
    return bool(xs) and min(*xs, *ys) > 0 and sorted(set(xs)) == xs


# What a post-trained variant of a checkpoint adds to its name.
_VARIANT = re.compile(
    r"-(base|instruct|thinking|chat|it|pt|hf|bf16|fp8|17b-16e|[0-9]{4})$", re.IGNORECASE
)
# Mistral's first releases: Mixtral-8x7B-v0.1. Other versions are models of their own.
_VERSION = re.compile(r"-v0\.[0-9]+(?=-|$)")
_CUT = re.compile(r"(?P<name>.+) \((?P<layers>[0-9]{1,6}) layers\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """An entry of the model catalogue, with the source of its figures.

    `verified` says whether the figures were checked against the source a second time.
    """

    name: str
    source: str
    verified: bool
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _AddedModel:
    """A model in the models.json of a package, by its name; `config` is its config.json."""

    source: str
    config: Mapping[str, Any]
    verified: bool = False
    note: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _AddedModels:
    models: Mapping[str, _AddedModel]


def model(name: str) -> ModelSpec:
    """Return the model of a catalogue name, or of the path of a config.json or its folder.

    The organisation before the name, the letter case and what a post-trained variant adds to the
    name ("-Base", "-Instruct-2507", "-Thinking") do not matter. "Grok-1 (8 layers)" is Grok-1 cut
    to its first 8 layers.

    Raises:
        BadInput: the name is not known, with the nearest known name; or the model has a mixer that
            moewright does not model, named.
    """
    key = _find_model(name)
    if key is not None:
        return _parse_model(key)
    cut = _CUT.fullmatch(name.strip())
    if cut is not None:
        return cut_layers(model(cut["name"]), int(cut["layers"]))
    if "\0" in name or not name.strip():
        rule = "is no model name and no path"
        raise BadInput(Reason(field="model", value=repr(name)[:60], rule=rule))
    path = Path(name)
    # A missing .json is refused as a file: no name of the catalogue ends so.
    if _exists(path) or path.suffix == ".json":
        return hf.read_config(path)
    nearest = nearest_model(name)
    rule = "is neither a known model nor a config.json or a folder with one"
    if not nearest:
        rule = f"{rule}; known: {', '.join(map(_without_organisation, model_names()))}"
    raise BadInput(Reason(field="model", value=name[:80], rule=rule, nearest=nearest))


def has_model(name: str) -> bool:
    """Tell whether a name is one of the catalogue, or one of its variants."""
    return _find_model(name) is not None


def nearest_model(name: str) -> str:
    """Return the name of the catalogue that is most like a name; "" where none is like it."""
    full_names = {_without_organisation(full): full for full in model_names()}
    return full_names.get(closest_match(_without_organisation(name), full_names), "")


def models() -> tuple[ModelEntry, ...]:
    """Return the entry of every model that `model` can give, sorted by name."""
    return tuple(model_entry(name) for name in model_names())


def model_names() -> tuple[str, ...]:
    """Return the name of every model that `model` can give, sorted."""
    return tuple(sorted(_read_models()))


def model_entry(name: str) -> ModelEntry:
    """Return where the figures of a catalogue model come from.

    Raises:
        BadInput: the catalogue has no such model.
    """
    key = _find_model(name)
    if key is None:
        raise BadInput(Reason(field="model", value=name[:80], rule="is not in the catalogue"))
    entry = _read_models()[key]
    also = ", ".join(entry.get("also", ()))
    notes = (entry.get("note", ""), mention("of the same shape: {}", also))
    return ModelEntry(
        name=key,
        source=entry["source"],
        verified=entry["verified"],
        note="; ".join(note for note in notes if note),
    )


def skipped_fields(name: str) -> tuple[str, ...]:
    """Return the fields of a config.json that `model` skipped because moewright does not know them.

    A catalogue model has none.
    """
    cut = _CUT.fullmatch(name.strip())
    if cut is not None:
        return skipped_fields(cut["name"])
    return () if _find_model(name) is not None else hf.unknown_fields(Path(name))


def hardware(text: str, network: str = "") -> Hardware:
    """Return the hardware of "256xH800", "H800x256", "2xpath/machine.toml" or "path/machine.toml".

    A hardware file without a count before it keeps its own count; a device without one is one
    device. A driver's name of the device is read too: "8 x NVIDIA H100 80GB HBM3"; "8xH100 with
    96GB" is the same device with another memory. `network` names kinds
    of network in place of the hardware's own (intake.networks).

    Raises:
        BadInput: the device is not known, with the nearest; the count is not legal; the file cannot
            be read; or the hardware cannot have such a network (field "network").
    """
    return apply_network(_read_hardware(text), network)


_ANY_DEVICE = ("gpu", "gpus", "device", "devices", "accelerators", "cards")


def _find_hardware(request: HardwareText) -> Hardware | None:
    """Return the hardware of a text, with the device's own memory; None where it is not known."""
    if request.is_file:
        machine = read_hardware_file(request.name)
        return machine if request.count is None else replace(machine, count=request.count)
    device = find_device(request.name)
    if device is None:
        return None
    return build_hardware(device, count=1 if request.count is None else request.count)


def _read_hardware(text: str) -> Hardware:
    request = parse_hardware_text(text)
    machine = _find_hardware(request)
    if machine is not None:
        return give_memory(machine, request.memory_gb) if request.memory_gb else machine
    names = device_names()
    short_name = request.name[:60]
    nearest = closest_match(short_name.upper().removeprefix("NVIDIA "), names)
    nearest = f"{request.count or 1}x{nearest}" if nearest else ""
    rule = f"no device {short_name!r}"
    count = short_name if short_name.isdecimal() else str(request.count or 1)
    if short_name.isdecimal() or short_name.casefold() in _ANY_DEVICE:
        rule, nearest = "names no device, in the form count x device", f"{count}xH100"
    raise BadInput(
        Reason(
            field="hardware",
            value=text[:80],
            rule=f"{rule}; known: {', '.join(names)}, or the path of a .toml",
            nearest=nearest,
        )
    )


def devices() -> tuple[DeviceEntry, ...]:
    """Return the entry of every known device, with its sources, in the order of the file."""
    return read_devices()


def hardware_names() -> tuple[str, ...]:
    """Return the short names of the known devices."""
    return device_names()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _find_model(name: str) -> str | None:
    """Return the catalogue's key of a name with or without its organisation; None if unknown."""
    folded = name.strip().casefold()
    keys = _keys_by_spelling()
    spellings = (*_strip_variants(folded), *_strip_variants(_VERSION.sub("", folded)))
    return next((keys[spelling] for spelling in spellings if spelling in keys), None)


def _strip_variants(name: str) -> Iterator[str]:
    """Yield a name, and the name without the last of its variants, the last two, and so on.

    What looks like a variant may be part of a known name: OLMoE-1B-7B-0924-Instruct.
    """
    yield name
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
        yield name


@cache
def _keys_by_spelling() -> Mapping[str, str]:
    """Return the catalogue's key of each name it knows, case folded, with and without organisation.

    The first entry of a spelling has it. A version "-v0.1" may be left out.
    """
    keys: dict[str, str] = {}
    names = [
        (alias.casefold(), key)
        for key, entry in _read_models().items()
        for alias in (key, *entry.get("also", ()))
    ]
    for name, key in names:
        keys.setdefault(name, key)
        # Of two organisations with a model of one name, the first of the file has the short one.
        keys.setdefault(_without_organisation(name), key)
    for spelling, key in tuple(keys.items()):
        keys.setdefault(_VERSION.sub("", spelling), key)
    return MappingProxyType(keys)


@cache
def _parse_model(key: str) -> ModelSpec:
    return hf.parse_config(_read_models()[key]["config"], where=key, name=key)


def cut_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """Return a model cut to its first layers.

    Raises:
        BadInput: it has not so many.
    """
    if not 1 <= layers <= spec.layers:
        rule = f"{spec.name} has {spec.layers} layers"
        near = str(min(max(layers, 1), spec.layers))
        raise BadInput(Reason(field="model", value=f"({layers} layers)", rule=rule, nearest=near))
    moe_layers = spec.moe_layers[:layers]
    mlp_layers = spec.mlp_layers[:layers]
    short = replace(
        spec,
        name=f"{spec.name} ({layers} layers)",
        layers=layers,
        moe_layers=moe_layers,
        mixers=spec.mixers[:layers],
        mlp_layers=mlp_layers,
        rope_layers=spec.rope_layers[:layers],
        moe=spec.moe if any(moe_layers) else None,
    )
    return short if short.dense_layer_count else replace(short, dense_ffn_size=0)


def _without_organisation(name: str) -> str:
    return name.strip().rpartition("/")[2]


@cache
def _read_models() -> Mapping[str, Any]:
    file = resources.files("moewright.intake").joinpath("data/models.json")
    table: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"), where="models.json")
    for where, text in read_added_files("models.json"):
        added = from_data(_AddedModels, {"models": parse_json(text, where=where)}, where=where)
        check_new_names(added.models, table, where=where)
        table |= {name: to_data(entry) for name, entry in added.models.items()}
    return MappingProxyType(table)
