"""Rows of work -> seconds, by the rates of a device."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moewright.cost.constants import Constants
from moewright.spec.hardware import Curve, Hardware, Op
from moewright.spec.layout import Recompute
from moewright.spec.plan import Assumption, TimePart
from moewright.spec.sourced import SourceKind
from moewright.spec.workload import Dtype

# The constants that only matter where the hardware file has no rate for an operation.
_STANDS_IN: Mapping[str, Op] = MappingProxyType(
    {
        "gemm_efficiency": Op.GEMM,
        "grouped_rolloff_rows": Op.GROUPED_GEMM,
        "attention_efficiency": Op.ATTENTION,
        "attention_half_seq": Op.ATTENTION,
        "attention_backward_efficiency": Op.ATTENTION_BACKWARD,
        "memory_efficiency": Op.ELEMENTWISE,
        "optimizer_bytes_per_parameter": Op.OPTIMIZER,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """Work of one kind: `amount` (FLOPs, bytes or parameters, as its Op says) at the rate the curve
    has at `x`.

    `replay` names the recompute choices that run a forward row again in backward; `share` is the
    part of the usual rate that it reaches; `scale` names a constant that multiplies its time
    besides that of its Op.
    """

    name: str
    part: TimePart
    op: Op
    amount: float
    x: float
    dtype: Dtype
    recomputed_by: tuple[Recompute, ...] = ()
    efficiency: float = 1.0
    scale_constant: str = ""


def interpolate(curve: Curve, x: float) -> float:
    """y at x: linear in log x and log y between the points, flat outside them."""
    points = curve.points
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1]
    above = bisect_right(points, x, key=_first)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    weight = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + weight * math.log(y1 / y0))


def _first(point: tuple[float, float]) -> float:
    return point[0]


class DeviceRates:
    """Rates of one device, with the stand-ins where the hardware file has no curve."""

    __slots__ = ("_curves", "_hardware", "_peaks", "_scales", "constants")

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.constants = Constants(hardware)
        self._curves = {(r.op, r.dtype): r.curve for r in hardware.device.rates}
        self._scales = {(op, dtype): self._scale(op, dtype) for op in Op for dtype in Dtype}
        self._peaks = {p.dtype: p.rate.value for p in hardware.device.peaks}

    def _scale(self, op: Op, dtype: Dtype) -> float:
        """Experts' products have the factor of other GEMMs and one of their own."""
        c = self.constants
        if op not in (Op.GEMM, Op.GROUPED_GEMM):
            return c[f"{op}_time_scale"]
        gemm = c["gemm_8bit_time_scale" if dtype.is_narrow else "gemm_time_scale"]
        if dtype is Dtype.NVFP4:
            gemm *= c["gemm_4bit_time_scale"]
        if dtype is Dtype.MXFP8:
            gemm *= c["gemm_mx_time_scale"]
        return gemm * c["grouped_gemm_time_scale"] if op is Op.GROUPED_GEMM else gemm

    def peak_flops(self, dtype: Dtype) -> float:
        """Dense peak, FLOP/s: that of the dtype, else of the widest listed kind."""
        known = Dtype.FP8 if dtype is Dtype.MXFP8 and dtype not in self._peaks else dtype
        return self._peaks.get(known) or next(iter(self._peaks.values()))

    def rate_curve(self, op: Op, dtype: Dtype) -> Curve | None:
        """The curve for (op, dtype); MXFP8 falls back on FP8, memory-bound work on the curve of any
        dtype."""
        found = self._curves.get((op, dtype))
        if found is None and dtype is Dtype.MXFP8:
            found = self._curves.get((op, Dtype.FP8))
        if found is None and op in (Op.ELEMENTWISE, Op.OPTIMIZER):
            found = next((c for (o, _), c in self._curves.items() if o is op), None)
        return found

    def uses_constant(self, constant: str) -> bool:
        """Whether an estimate can depend on a constant: a stand-in does not count where every rate
        is known."""
        op = _STANDS_IN.get(constant)
        return op is None or not any(known is op for known, _ in self._curves)

    def rate(self, op: Op, dtype: Dtype, x: float) -> float:
        """Units of work a second (FLOP/s, bytes/s or parameters/s)."""
        curve = self.rate_curve(op, dtype)
        return interpolate(curve, x) if curve is not None else self._stand_in(op, dtype, x)

    def _stand_in(self, op: Op, dtype: Dtype, x: float) -> float:
        c = self.constants
        memory_Bps = self._hardware.device.memory_Bps.value * c["memory_efficiency"]
        if op is Op.ELEMENTWISE:
            return memory_Bps
        if op is Op.OPTIMIZER:
            return memory_Bps / c["optimizer_bytes_per_parameter"]
        if op is Op.GEMM:
            return self.peak_flops(dtype) * c["gemm_efficiency"]
        if op is Op.GROUPED_GEMM:
            gemm = self.rate(Op.GEMM, dtype, 1e12)
            return gemm / (1 + c["grouped_rolloff_rows"] / max(x, 1.0))
        if op is Op.ATTENTION_BACKWARD:
            return self.rate(Op.ATTENTION, dtype, x) * c["attention_backward_efficiency"]
        return (
            self.peak_flops(dtype) * c["attention_efficiency"] * x / (x + c["attention_half_seq"])
        )

    def seconds(self, row: OpRow) -> float:
        """Time of a row: its amount at the rate, times the correction between tables and whole
        training steps."""
        if not row.amount:
            return 0.0
        scale = self._scales[row.op, row.dtype] * (
            self.constants[row.scale_constant] if row.scale_constant else 1.0
        )
        return scale * row.amount / (self.rate(row.op, row.dtype, row.x) * row.efficiency)


def find_uncovered_rates(rates: DeviceRates, rows: Iterable[OpRow]) -> tuple[Assumption, ...]:
    """What the hardware file does not cover: rates it lacks, and rows outside a measured range
    (held flat there)."""
    found: dict[str, Assumption] = {}
    for row in rows:
        if not row.amount:
            continue
        curve = rates.rate_curve(row.op, row.dtype)
        name = f"rate {row.op} {row.dtype}"
        if curve is None:
            value = f"{rates.rate(row.op, row.dtype, row.x):.4g} at {row.x:.4g} ({row.name})"
            source = (
                "no rate in the hardware file; stand-in from peak, memory bandwidth and constants"
            )
            found.setdefault(
                name, Assumption(name=name, value=value, kind=SourceKind.ASSUMED, source=source)
            )
            continue
        first, last = curve.points[0][0], curve.points[-1][0]
        low, high = curve.measured or (first, last)
        if len(curve.points) > 1 and not low <= row.x <= high:
            name = f"{name} at {row.name}"
            how = "by its fit" if first <= row.x <= last else "held flat"
            value = f"x={row.x:.4g} outside the measured {low:.4g}-{high:.4g}, {how}"
            found.setdefault(
                name,
                Assumption(name=name, value=value, kind=SourceKind.ASSUMED, source=curve.source),
            )
    return tuple(found.values())
