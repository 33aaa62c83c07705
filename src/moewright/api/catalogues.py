"""What is known without asking anybody: models and devices, with the sources of their figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewright.api.requests import read_hardware
from moewright.intake import catalogue, hub
from moewright.intake.catalogue import ModelEntry
from moewright.intake.devices import device_names
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.record import Record, Row
from moewright.spec.units import GIB, TERA
from moewright.spec.workload import Dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """One line about a model of the catalogue; `experts` and `top_k` are 0 for a dense one."""

    model: str
    parameters: int
    active: int  # parameters that a token uses
    layers: int
    experts: int
    top_k: int
    source: str
    verified: bool  # the figures were read again at the source


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ModelTable(Record):
    """The models of the catalogue, by name."""

    models: tuple[ModelSummary, ...]

    def title(self) -> str:
        """Return the number of models."""
        return f"{len(self.models)} models"

    def to_rows(self) -> list[Row]:
        """Return a row for each model: parameters in total and active, experts, source."""
        return [
            {
                "model": summary.model,
                "parameters": summary.parameters,
                "active": summary.active,
                "layers": summary.layers,
                "experts": summary.experts,
                "top_k": summary.top_k,
                "source": summary.source,
            }
            for summary in self.models
        ]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HardwareTable(Record):
    """The devices of the catalogue, by name."""

    devices: tuple[Hardware, ...]

    def title(self) -> str:
        """Return the number of devices."""
        return f"{len(self.devices)} devices"

    def to_rows(self) -> list[Row]:
        """Return a row for each device: memory, peak, links, source."""
        rows: list[Row] = []
        for hardware in self.devices:
            device = hardware.device
            fabric = hardware.fabric
            bf16 = next((peak for peak in device.peaks if peak.dtype is Dtype.BF16), None)
            rows.append(
                {
                    "device": device.name,
                    "memory_GiB": device.memory_bytes.value / GIB,
                    "memory_TBps": device.memory_Bps.value / TERA,
                    "bf16_TFLOPs": bf16.rate.value / TERA if bf16 else 0.0,
                    "devices_per_domain": fabric.domain_size,
                    "domain_GBps": fabric.domain_Bps.value / 1e9,
                    "network_GBps": fabric.network_Bps.value / 1e9,
                    "domain": str(fabric.domain),
                    "network": str(fabric.network),
                    "source": device.memory_Bps.source,
                }
            )
        return rows


def models(words: str = "") -> ModelTable:
    """List the models that are known by name, or those whose names have all of some words.

    Raises:
        BadInput: no name has them, with the nearest.

    Example:
        >>> import moewright as mw
        >>> "Qwen/Qwen3-30B-A3B" in [row["model"] for row in mw.models().to_rows()]
        True
    """
    folded = words.casefold().split()
    entries = [
        entry
        for entry in catalogue.models()
        if all(word in entry.name.casefold() for word in folded)
    ]
    if not entries:
        rule = "is in no name of a model of the catalogue"
        near = catalogue.nearest_model(words)
        raise BadInput(Reason(field="models", value=words[:80], rule=rule, nearest=near))
    return ModelTable(models=tuple(_summarize_model(entry) for entry in entries))


def _summarize_model(entry: ModelEntry) -> ModelSummary:
    spec = catalogue.model(entry.name)
    count = count_parameters(spec)
    experts = 0
    top_k = 0
    if spec.moe is not None:
        experts = spec.moe.experts
        top_k = spec.moe.router.top_k
    return ModelSummary(
        model=entry.name,
        parameters=count.total,
        active=count.active,
        layers=spec.layers,
        experts=experts,
        top_k=top_k,
        source=entry.source,
        verified=entry.verified,
    )


def model(name: str | Path) -> ModelSpec:
    """Read a model by its catalogue name, its config.json or the folder of one, or its hub id.

    Raises:
        BadInput: the name is not known or cannot be fetched, or the model has a part that moewright
            does not model.

    Example:
        >>> import moewright as mw
        >>> mw.model("DeepSeek-V3").layers
        61
    """
    return catalogue.model(hub.locate_config(str(name)))


def hardware(on: str = "", *, network: str = "") -> Hardware | HardwareTable:
    """Read hardware as people write it, or list the devices that are known by name.

    Args:
        on: "256xH800", "H100x8", "2xruns/machine.toml"; "" lists the devices.
        network: kinds of network in place of the hardware's own, such as "efa" or "nvl36+efa".

    Raises:
        BadInput: the device is not known, the count is not legal, or the hardware cannot have the
            network.

    Example:
        >>> import moewright as mw
        >>> mw.hardware("8xH100").count
        8
        >>> mw.hardware("64xH100", network="efa").fabric.network
        'efa'
        >>> "H800 SXM" in [row["device"] for row in mw.hardware().to_rows()]
        True
    """
    if on:
        return read_hardware(on, network)
    return HardwareTable(devices=tuple(read_hardware(name) for name in device_names()))
