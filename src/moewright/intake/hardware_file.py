"""Hardware files, such as the one that `moewright bench` writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moewright.codec import read_toml
from moewright.intake.devices import MAX_DEVICES
from moewright.intake.networks import complete_fabric
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Curve, Hardware
from moewright.spec.printable import escape_controls


def read_hardware_file(path: str) -> Hardware:
    """Read a hardware file.

    Raises:
        BadInput: the file cannot be read, or some of its numbers cannot be used in an estimate; it
            has one Reason for each fault.
    """
    hardware = read_toml(Hardware, Path(path))
    faults = (*_numbers_not_above_zero(hardware), *_bad_count(hardware), *_bad_curves(hardware))
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
    device = replace(hardware.device, name=escape_controls(hardware.device.name))
    named = replace(hardware, name=escape_controls(hardware.name), device=device)
    return complete_fabric(named)


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
