"""Variables of the libraries that move bytes, each with the reason why a launch file sets it.

The table is data/transport.toml, a source in each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from moewright.codec import from_data
from moewright.codec.files import parse_toml
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import Layout

_TABLE = "data/transport.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportSetting:
    """A variable of the environment, and where it is needed; empty tuples are everywhere."""

    name: str
    value: str
    reason: str
    source: str
    networks: tuple[str, ...] = ()
    dispatchers: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    def is_for(self, layout: Layout, hardware: Hardware) -> bool:
        """Whether a layout on some hardware needs it."""
        fabric = hardware.fabric
        crosses = layout.world_size > fabric.domain_size
        return (
            (not self.networks or (crosses and fabric.network in self.networks))
            and (not self.dispatchers or (layout.ep > 1 and layout.dispatcher in self.dispatchers))
            and (not self.domains or fabric.domain in self.domains)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TransportSettings:
    setting: tuple[TransportSetting, ...]


@cache
def _read_table() -> tuple[TransportSetting, ...]:
    text = resources.files("moewright.exporters").joinpath(_TABLE).read_text(encoding="utf-8")
    return from_data(_TransportSettings, parse_toml(text, where=_TABLE), where=_TABLE).setting


def transport_settings(layout: Layout, hardware: Hardware) -> Iterator[TransportSetting]:
    """Yield the settings of a layout's ranks; a CPU and ROCm, whose RCCL has others, have none."""
    if hardware.device.kind is not DeviceKind.CUDA or layout.world_size == 1:
        return
    size = hardware.fabric.domain_size
    for setting in _read_table():
        if setting.is_for(layout, hardware):
            value = setting.value.format(
                domain_ranks=min(layout.ep * layout.etp, size), domain_size=size
            )
            yield replace(setting, value=value)
