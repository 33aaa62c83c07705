"""From the ideal step to the measured one: what each thing costs, and what nothing explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from moewright.diagnosis.priced_fixes import PricedJob
from moewright.spec.finding import Basis, Waterfall, WaterfallDrop
from moewright.spec.hardware import Hardware
from moewright.spec.plan import TimePart
from moewright.spec.workload import Dtype, Workload

# Parts of a predicted step that do model FLOPs, replays aside.
COMPUTE_PARTS = (TimePart.ATTENTION, TimePart.DENSE, TimePart.EXPERTS, TimePart.HEAD)
DROP_NAMES = {
    TimePart.BUBBLE: "pipeline bubble",
    TimePart.TP_COMM: "exposed TP communication",
    TimePart.CP_COMM: "exposed CP communication",
    TimePart.EP_COMM: "exposed EP communication",
    TimePart.PP_COMM: "exposed PP communication",
    TimePart.DP_COMM: "exposed DP communication",
    TimePart.HOST: "host",
    TimePart.RECOMPUTE: "recompute",
    TimePart.ELEMENTWISE: "elementwise kernels",
    TimePart.OPTIMIZER: "optimizer",
}
BELOW_PEAK = "products and attention below the peak rate"
UNEVEN_LOAD = "uneven expert load"
UNEXPLAINED = "unexplained"


def peak_flops(hardware: Hardware, precision: Dtype) -> float:
    """Dense peak of a device in FLOP/s; 0 where the hardware file has none for the precision."""
    return next((peak.rate.value for peak in hardware.device.peaks if peak.dtype is precision), 0.0)


def ideal_step_s(job: PricedJob) -> float:
    """Seconds of a step that did nothing but model FLOPs at the peak rate; 0 when no peak is
    known."""
    peak = peak_flops(job.hardware, job.workload.precision)
    return job.estimate.model_flops_per_step / job.layout.world_size / peak if peak else 0.0


def describe_ideal_step(workload: Workload, model_flops: float) -> str:
    return f"{model_flops:.4g} model FLOPs a step at the dense {workload.precision} peak, causal attention counted half"


def close_waterfall(
    ideal: float, note: str, drops: Iterable[WaterfallDrop], measured: float
) -> Waterfall:
    """The drops with what is left over behind them, so that everything sums to the measured
    step."""
    kept = tuple(drop for drop in drops if abs(drop.seconds) > 1e-9)
    rest = measured - ideal - sum(drop.seconds for drop in kept)
    left = WaterfallDrop(
        name=UNEXPLAINED, seconds=rest, basis=Basis.MEASURED, note="measured less all above"
    )
    return Waterfall(ideal_s=ideal, ideal_note=note, drops=(*kept, left), measured_s=measured)


def build_log_waterfall(
    job: PricedJob, measured_s: float, timed_parts: Mapping[TimePart, float] = MappingProxyType({})
) -> Waterfall:
    """Of a run of which the step and the parts `timed` were measured: all else is the planner's, or
    unexplained."""
    drops = [
        drop
        for drop in predict_drops(job)
        if drop.name not in {DROP_NAMES[part] for part in timed_parts}
    ]
    found = [
        WaterfallDrop(name=DROP_NAMES[part], seconds=seconds, basis=Basis.MEASURED)
        for part, seconds in timed_parts.items()
    ]
    note = describe_ideal_step(job.workload, job.estimate.model_flops_per_step)
    return close_waterfall(ideal_step_s(job), note, (*found, *drops), measured_s)


def predict_drops(job: PricedJob) -> Iterable[WaterfallDrop]:
    shares = {share.part: share.seconds for share in job.estimate.shares}
    # Rows of the hottest rank over the mean lengthen every expert product and exchange alike.
    load = max(1.0, job.workload.load_factor)
    uneven = shares.get(TimePart.EXPERTS, 0.0) * (1 - 1 / load)
    working = sum(shares.get(part, 0.0) for part in COMPUTE_PARTS) - uneven
    for part, name in DROP_NAMES.items():
        if part in shares:
            yield WaterfallDrop(name=name, seconds=shares[part], basis=Basis.PREDICTED)
    yield WaterfallDrop(
        name=UNEVEN_LOAD,
        seconds=uneven,
        basis=Basis.PREDICTED,
        note=f"hottest rank {load:.2f} x the mean",
    )
    yield WaterfallDrop(name=BELOW_PEAK, seconds=working - ideal_step_s(job), basis=Basis.PREDICTED)
