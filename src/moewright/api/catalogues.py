"""What is known without asking anybody: models and devices, with the sources of their figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewright.api.requests import read_hardware
from moewright.intake import catalogue
from moewright.intake.catalogue import ModelEntry
from moewright.intake.devices import device_names
from moewright.rules.parameters import count_parameters
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.record import Record, Row
from moewright.spec.units import GIB, TERA
from moewright.spec.workload import Dtype


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ModelTable(Record):
    """The models of the catalogue, by name."""

    entries: tuple[ModelEntry, ...]

    def title(self) -> str:
        """Return the number of models."""
        return f"{len(self.entries)} models"

    def to_rows(self) -> list[Row]:
        """Return a row for each model: parameters in total and active, experts, source."""
        rows: list[Row] = []
        for entry in self.entries:
            spec = catalogue.model(entry.name)
            count = count_parameters(spec)
            rows.append(
                {
                    "model": entry.name,
                    "parameters": count.total,
                    "active": count.active,
                    "layers": spec.layers,
                    "experts": spec.moe.experts if spec.moe else 0,
                    "top_k": spec.moe.router.top_k if spec.moe else 0,
                    "source": entry.source,
                }
            )
        return rows


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
                    "source": device.memory_Bps.source,
                }
            )
        return rows


def models() -> ModelTable:
    """List the models that are known by name.

    Example:
        >>> import moewright as mw
        >>> "Qwen/Qwen3-30B-A3B" in [row["model"] for row in mw.models().to_rows()]
        True
    """
    return ModelTable(entries=catalogue.models())


def model(name: str | Path) -> ModelSpec:
    """Read a model by its catalogue name, its config.json or the folder of one.

    Raises:
        BadInput: the name is not known, or the model has a part that moewright does not model.

    Example:
        >>> import moewright as mw
        >>> mw.model("DeepSeek-V3").layers
        61
    """
    return catalogue.model(str(name))


def hardware(on: str = "") -> Hardware | HardwareTable:
    """Read hardware as people write it, or list the devices that are known by name.

    Args:
        on: "256xH800", "H100x8", "2xruns/machine.toml"; "" lists the devices.

    Raises:
        BadInput: the device is not known, or the count is not legal.

    Example:
        >>> import moewright as mw
        >>> mw.hardware("8xH100").count
        8
        >>> "H800 SXM" in [row["device"] for row in mw.hardware().to_rows()]
        True
    """
    if on:
        return read_hardware(on)
    return HardwareTable(devices=tuple(read_hardware(name) for name in device_names()))
