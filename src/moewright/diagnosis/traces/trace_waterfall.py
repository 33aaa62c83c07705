"""The waterfall of a traced step, from the ideal step at its device's peak to the measured one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.comm_classes import CommClass
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.diagnosis.traces.rank_skew import RankSkew, mean_idle_s, measure_comm
from moewright.diagnosis.waterfall import (
    BELOW_PEAK,
    close_waterfall,
    describe_ideal_step,
    ideal_step_s,
    peak_flops,
)
from moewright.intake import devices as catalogue
from moewright.rules.job import micro_batches
from moewright.spec.finding import Basis, Waterfall, WaterfallDrop
from moewright.spec.plan import Plan, TimePart
from moewright.spec.units import plural
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


def build_trace_waterfall(
    breakdowns: Sequence[Breakdown],
    skew: RankSkew | None,
    job: Plan | None,
    peak: PeakRate,
) -> Waterfall | None:
    """Build the waterfall of a traced step.

    It is None when nothing says what the ideal step is: neither the job nor shapes and a peak.
    """
    measured_s = fmean(breakdown.step_s for breakdown in breakdowns)
    if job is not None and ideal_step_s(job):
        ideal_s = ideal_step_s(job)
        note = describe_ideal_step(job.workload, job.estimate.model_flops_per_step)
    else:
        flops = fmean(breakdown.known_matrix_flops for breakdown in breakdowns)
        if not flops or not peak.flops:
            return None
        ideal_s = flops / peak.flops
        note = f"{flops:.4g} FLOPs of products with known shapes at the {peak.note}"
    matrix_s = fmean(breakdown.matrix_s for breakdown in breakdowns)
    drops = (
        *_comm_drops(breakdowns, skew, job),
        *_idle_drops(breakdowns),
        *_compute_drops(breakdowns),
        _measured(BELOW_PEAK, matrix_s - ideal_s),
    )
    return close_waterfall(ideal_s, note, drops, measured_s)


def _measured(name: str, seconds: float, note: str = "") -> WaterfallDrop:
    return WaterfallDrop(name=name, seconds=seconds, basis=Basis.MEASURED, note=note)


def _comm_drops(
    breakdowns: Sequence[Breakdown], skew: RankSkew | None, job: Plan | None
) -> Iterator[WaterfallDrop]:
    waiting_s = 0.0
    for comm in CommClass:
        measured = measure_comm(breakdowns, skew, comm)
        waiting_s += measured.waiting_s
        exposed_s = measured.own_s
        if comm is CommClass.PP and job is not None and job.layout.pp > 1:
            measured_s = fmean(breakdown.step_s for breakdown in breakdowns)
            bubble = _predict_bubble(job, exposed_s, measured_s)
            exposed_s -= bubble.seconds
            yield bubble
        yield _measured(f"exposed {comm} communication", exposed_s)
    note = "inside collectives, before the last rank came"
    yield _measured("ranks waiting for each other", waiting_s, note)


def _predict_bubble(job: Plan, exposed_s: float, measured_s: float) -> WaterfallDrop:
    """Return the bubble's predicted share of the measured step, at most what was exposed."""
    prediction = job.estimate
    predicted_s = next(
        (share.seconds for share in prediction.shares if share.part is TimePart.BUBBLE), 0.0
    )
    count = micro_batches(job.workload, job.layout)
    note = (
        f"predicted for {plural(count, 'micro-batch')} over {job.layout.pp} stages, "
        "seen as exposed PP time"
    )
    return WaterfallDrop(
        name="pipeline bubble",
        seconds=min(exposed_s, predicted_s / prediction.step_s * measured_s),
        basis=Basis.PREDICTED,
        note=note,
    )


def _idle_drops(breakdowns: Sequence[Breakdown]) -> Iterator[WaterfallDrop]:
    for cause in IdleCause:
        yield _measured(f"device idle: {cause}", mean_idle_s(breakdowns, cause))


def _compute_drops(breakdowns: Sequence[Breakdown]) -> Iterator[WaterfallDrop]:
    recompute_s = fmean(breakdown.recompute_s for breakdown in breakdowns)
    matrix_s = fmean(breakdown.matrix_s for breakdown in breakdowns)
    compute_s = fmean(breakdown.compute_s for breakdown in breakdowns)
    yield _measured("copies not hidden", fmean(breakdown.copies_s for breakdown in breakdowns))
    yield _measured("recompute", recompute_s, "inside checkpoints' backward")
    other_s = compute_s - matrix_s - recompute_s
    yield _measured("other kernels: norms, permutes, optimizer", other_s)
