"""The peak rate of the device that a trace comes from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.waterfall import peak_flops
from moewright.intake import devices as catalogue
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRate:
    """The peak of a device in FLOP/s, and where the figure is from; 0: not known."""

    flops: float
    note: str


def find_peak_rate(breakdowns: Sequence[Breakdown], job: Plan | None) -> PeakRate:
    """Return the peak rate of the job's hardware, else that in 16 bits of the trace's device.

    Of older devices that are not in the catalogue it is the peak that diagnosis/data/peaks.toml
    has.
    """
    if job is not None:
        precision = job.workload.precision
        note = f"{precision} peak of {job.hardware.name}"
        return PeakRate(flops=peak_flops(job.hardware, precision), note=note)
    device_name = breakdowns[0].device
    device = catalogue.find_by_driver_name(device_name) if device_name else None
    older = _find_older_peak(device_name)
    if device is None and older is not None:
        return older
    if device is None:
        note = f"no peak known for {device_name or 'an unnamed device'}; say it with --on"
        return PeakRate(flops=0.0, note=note)
    has_bf16 = any(peak.dtype is Dtype.BF16 for peak in device.peaks)
    precision = Dtype.BF16 if has_bf16 else Dtype.FP16
    flops = peak_flops(catalogue.build_hardware(device, count=1), precision)
    return PeakRate(flops=flops, note=f"{precision} peak of {device.name}, by the device's name")


def _find_older_peak(device_name: str) -> PeakRate | None:
    text = resources.files("moewright.diagnosis").joinpath("data/peaks.toml").read_text("utf-8")
    for row in tomllib.loads(text)["device"]:
        if re.search(row["pattern"], device_name):
            note = f"{row['dtype']} peak of {row['name']}, by the device's name"
            return PeakRate(flops=float(row["flops"]), note=note)
    return None
