"""What was published of failures, repairs, storage and power, for a job on any number of devices.

`data/reliability.toml` has every figure with its source. A rate is of failures a device-hour: the
hazard of a job is that of its devices together, as Meta's study finds it above 32 of them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from moewright.cost.memory.model_states import state_bytes_per_parameter
from moewright.rules.adapters import trained_share
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.ledger import Component
from moewright.spec.model import ModelSpec
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Workload

_DATA = Path(__file__).parent / "data" / "reliability.toml"
_HOUR_S = 3600.0
# Seconds that a save stands still beside its bytes: a barrier, names and sizes, a commit.
SAVE_OVERHEAD_S = 5.0
# An asynchronous save stops while a rank's state is copied to its host.
COPY_OVERHEAD_S = 1.0
HOST_COPY_BPS = 2e10  # bytes a second from a device to its host, over PCIe 4 or 5


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRate:
    """A published number of failures of so many devices in so many hours."""

    name: str
    failures: float
    devices: int
    hours: float
    source: str

    @property
    def per_device_s(self) -> float:
        """Failures in a second of one device."""
        return self.failures / (self.devices * self.hours * _HOUR_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """The published figures; `parts` are shares of failures by part."""

    rates: tuple[FailureRate, ...]
    parts: tuple[tuple[str, float], ...]
    parts_source: str
    hardware_share: Sourced
    planned: FailureRate
    recovery_s: Sourced
    storage_Bps_a_device: Sourced
    node_power_share: Sourced
    board_watts: tuple[tuple[str, float], ...]

    @property
    def middle_rate(self) -> float:
        """The median of the published rates, failures in a second of one device."""
        return median(rate.per_device_s for rate in self.rates)

    @property
    def rate_range(self) -> tuple[float, float]:
        """The least and the most failures in a second of one device that were published."""
        rates = [rate.per_device_s for rate in self.rates]
        return min(rates), max(rates)


@cache
def read_reliability() -> Reliability:
    """Read the published figures."""
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    parts = {name: count for name, count in data["parts"].items() if name != "source"}
    watts = {name: value for name, value in data["board_watts"].items() if name != "source"}
    total = sum(parts.values())
    return Reliability(
        rates=tuple(FailureRate(**rate) for rate in data["failure_rate"]),
        parts=tuple((name, count / total) for name, count in parts.items()),
        parts_source=data["parts"]["source"],
        hardware_share=_read_sourced(data["hardware_share"], "value"),
        planned=FailureRate(
            name="planned stops",
            failures=data["planned"]["stops"],
            devices=data["planned"]["devices"],
            hours=data["planned"]["hours"],
            source=data["planned"]["source"],
        ),
        recovery_s=_read_sourced(data["recovery"], "seconds"),
        storage_Bps_a_device=_read_sourced(data["storage"], "Bps_a_device"),
        node_power_share=_read_sourced(data["node_power"], "share"),
        board_watts=tuple(watts.items()),
    )


def _read_sourced(table: dict[str, Any], key: str) -> Sourced:
    return Sourced(value=float(table[key]), kind=SourceKind.MEASURED, source=table["source"])


def checkpoint_bytes(model: ModelSpec, workload: Workload) -> float:
    """Return the bytes of a checkpoint: fp32 weights and moments of every parameter that trains.

    Frozen weights are not written.
    """
    parameters = count_parameters(model)
    per_parameter = state_bytes_per_parameter(workload)
    nbytes = per_parameter[Component.MASTER] + per_parameter[Component.MOMENTS]
    return (parameters.total + parameters.mtp) * trained_share(model, workload) * nbytes
