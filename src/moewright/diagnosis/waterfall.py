"""From the ideal step to the measured one: what each thing costs, and what nothing explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from moewright.diagnosis.priced_fixes import Known
from moewright.spec.finding import Basis, Drop, Waterfall
from moewright.spec.hardware import Hardware
from moewright.spec.plan import TimePart
from moewright.spec.workload import Dtype, Workload

# Parts of a predicted step that do model FLOPs, replays aside.
WORKING = (TimePart.ATTENTION, TimePart.DENSE, TimePart.EXPERTS, TimePart.HEAD)
NAMES = {
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
EFFICIENCY = "products and attention below the peak rate"
LOAD = "uneven expert load"
UNEXPLAINED = "unexplained"


def peak_flops(hardware: Hardware, precision: Dtype) -> float:
    """Dense peak of a device in FLOP/s; 0 where the hardware file has none for the precision."""
    return next((peak.rate.value for peak in hardware.device.peaks if peak.dtype is precision), 0.0)


def ideal_s(known: Known) -> float:
    """Seconds of a step that did nothing but model FLOPs at the peak rate; 0 when no peak is
    known."""
    peak = peak_flops(known.hardware, known.workload.precision)
    return known.estimate.model_flops_per_step / known.layout.world_size / peak if peak else 0.0


def ideal_note(workload: Workload, model_flops: float) -> str:
    return f"{model_flops:.4g} model FLOPs a step at the dense {workload.precision} peak, causal attention counted half"


def closed(ideal: float, note: str, drops: Iterable[Drop], measured: float) -> Waterfall:
    """The drops with what is left over behind them, so that everything sums to the measured
    step."""
    kept = tuple(drop for drop in drops if abs(drop.seconds) > 1e-9)
    rest = measured - ideal - sum(drop.seconds for drop in kept)
    left = Drop(
        name=UNEXPLAINED, seconds=rest, basis=Basis.MEASURED, note="measured less all above"
    )
    return Waterfall(ideal_s=ideal, ideal_note=note, drops=(*kept, left), measured_s=measured)


def predicted(
    known: Known, measured: float, timed: Mapping[TimePart, float] = MappingProxyType({})
) -> Waterfall:
    """Of a run of which the step and the parts `timed` were measured: all else is the planner's, or
    unexplained."""
    drops = [
        drop for drop in predicted_drops(known) if drop.name not in {NAMES[part] for part in timed}
    ]
    found = [
        Drop(name=NAMES[part], seconds=seconds, basis=Basis.MEASURED)
        for part, seconds in timed.items()
    ]
    note = ideal_note(known.workload, known.estimate.model_flops_per_step)
    return closed(ideal_s(known), note, (*found, *drops), measured)


def predicted_drops(known: Known) -> Iterable[Drop]:
    shares = {share.part: share.seconds for share in known.estimate.shares}
    # Rows of the hottest rank over the mean lengthen every expert product and exchange alike.
    load = max(1.0, known.workload.load_factor)
    uneven = shares.get(TimePart.EXPERTS, 0.0) * (1 - 1 / load)
    working = sum(shares.get(part, 0.0) for part in WORKING) - uneven
    for part, name in NAMES.items():
        if part in shares:
            yield Drop(name=name, seconds=shares[part], basis=Basis.PREDICTED)
    yield Drop(
        name=LOAD, seconds=uneven, basis=Basis.PREDICTED, note=f"hottest rank {load:.2f} x the mean"
    )
    yield Drop(name=EFFICIENCY, seconds=working - ideal_s(known), basis=Basis.PREDICTED)
