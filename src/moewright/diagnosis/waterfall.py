"""The waterfall from the ideal step to the measured one, with what nothing explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from moewright.spec.finding import Basis, Waterfall, WaterfallDrop
from moewright.spec.hardware import Hardware
from moewright.spec.plan import Plan, TimePart
from moewright.spec.units import divide
from moewright.spec.workload import Dtype, Workload

# Parts of a predicted step that do the model's FLOPs; recompute is a part of its own.
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
_SMALLEST_DROP_S = 1e-9


def peak_flops(hardware: Hardware, precision: Dtype) -> float:
    """Return the dense peak of a device in FLOP/s; 0 where the hardware file has none for it."""
    return next((peak.rate.value for peak in hardware.device.peaks if peak.dtype is precision), 0.0)


def ideal_step_s(job: Plan) -> float:
    """Return the seconds of a step of nothing but model FLOPs at the peak; 0: no peak is known."""
    peak = peak_flops(job.hardware, job.workload.precision)
    return divide(job.estimate.model_flops_per_step / job.layout.world_size, peak)


def describe_ideal_step(workload: Workload, model_flops: float) -> str:
    """Describe what the ideal step counts."""
    return (
        f"{model_flops:.4g} model FLOPs a step at the dense {workload.precision} peak, "
        "causal attention counted half"
    )


def close_waterfall(
    ideal_s: float, note: str, drops: Iterable[WaterfallDrop], measured_s: float
) -> Waterfall:
    """Add what is left over to the drops, so that everything sums to the measured step."""
    kept = tuple(drop for drop in drops if abs(drop.seconds) > _SMALLEST_DROP_S)
    rest_s = measured_s - ideal_s - sum(drop.seconds for drop in kept)
    if abs(rest_s) <= _SMALLEST_DROP_S:
        rest_s = 0.0  # rounding
    unexplained = WaterfallDrop(
        name=UNEXPLAINED, seconds=rest_s, basis=Basis.MEASURED, note="measured less all above"
    )
    return Waterfall(
        ideal_s=ideal_s, ideal_note=note, drops=(*kept, unexplained), measured_s=measured_s
    )


def build_log_waterfall(
    job: Plan,
    measured_s: float,
    timed_parts: Mapping[TimePart, float] = MappingProxyType({}),
) -> Waterfall:
    """Build the waterfall of a run of which the step and the parts `timed_parts` were measured.

    All else is the planner's prediction, or unexplained.
    """
    measured = [
        WaterfallDrop(name=DROP_NAMES[part], seconds=seconds, basis=Basis.MEASURED)
        for part, seconds in timed_parts.items()
    ]
    measured_names = {drop.name for drop in measured}
    predicted = [drop for drop in predict_drops(job) if drop.name not in measured_names]
    note = describe_ideal_step(job.workload, job.estimate.model_flops_per_step)
    return close_waterfall(ideal_step_s(job), note, (*measured, *predicted), measured_s)


def predict_drops(job: Plan) -> Iterator[WaterfallDrop]:
    """Yield the drops of the predicted step."""
    seconds = {share.part: share.seconds for share in job.estimate.shares}
    # Rows of the hottest rank over the mean lengthen every expert product and exchange alike.
    load_factor = max(1.0, job.workload.load_factor)
    uneven_s = seconds.get(TimePart.EXPERTS, 0.0) * (1 - 1 / load_factor)
    compute_s = sum(seconds.get(part, 0.0) for part in COMPUTE_PARTS) - uneven_s
    for part, name in DROP_NAMES.items():
        if part in seconds:
            yield _predicted(name, seconds[part])
    yield _predicted(UNEVEN_LOAD, uneven_s, f"hottest rank {load_factor:.2f} x the mean")
    yield _predicted(BELOW_PEAK, compute_s - ideal_step_s(job))


def _predicted(name: str, seconds: float, note: str = "") -> WaterfallDrop:
    return WaterfallDrop(name=name, seconds=seconds, basis=Basis.PREDICTED, note=note)
