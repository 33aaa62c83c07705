"""Seconds of rows of work, by the rates of a device."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moewright.cost.constants import FITTED_DEVICES, Constants
from moewright.rules.routing import largest_of
from moewright.spec.hardware import Curve, Hardware, Op
from moewright.spec.layout import Recompute
from moewright.spec.plan import Assumption, TimePart
from moewright.spec.units import SourceKind
from moewright.spec.workload import Dtype

# Constants that stand in for a rate: they matter only where the hardware file has none for the op.
_STAND_IN_CONSTANTS: Mapping[str, Op] = MappingProxyType(
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
_STAND_IN_SOURCE = (
    "no rate in the hardware file; stand-in from peak, memory bandwidth and constants"
)
# Share of a GPU's peak that no product of a training step was seen to exceed.
_MOST_OF_PEAK = 0.8
_LARGE_GEMM_FLOPS = 1e12  # a product so large that it reaches the best rate of its curve


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """A row of work of one kind, done at the rate that a curve has at `x`.

    `amount` is in FLOPs, bytes or parameters, as `op` says. `recomputed_by` lists the recompute
    choices that run a forward row again in backward; `efficiency` is the share of the usual rate
    that the row reaches; `scale_constant` names a constant that multiplies its time, besides the
    constant of its Op.
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


TimedRows = Sequence[tuple[OpRow, float]]  # rows with their seconds


def interpolate(curve: Curve, x: float) -> float:
    """Return y at x: linear in log x and log y between the points, flat outside them."""
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


def _excess_of_slowest(devices: int) -> float:
    """Return how far the slowest of so many devices lies beyond the slowest of a fitted run.

    It is in deviations of the devices' speeds; all devices wait for the slowest.
    """
    return largest_of(devices) - largest_of(FITTED_DEVICES)


class DeviceRates:
    """The rates of one device, with stand-ins where its hardware file has no curve."""

    __slots__ = ("_curves", "_hardware", "_peaks", "_scales", "_slowest", "constants")

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.constants = Constants(hardware)
        self._curves = {(rate.op, rate.dtype): rate.curve for rate in hardware.device.rates}
        self._peaks = {peak.dtype: peak.rate.value for peak in hardware.device.peaks}
        self._slowest = 1 + self.constants["device_spread"] * _excess_of_slowest(hardware.count)
        self._scales: dict[tuple[Op, Dtype], float] = {}

    def _scale(self, op: Op, dtype: Dtype) -> float:
        """Return the factor on the time of an operation; a step has a few of all there are."""
        scale = self._scales.get((op, dtype))
        if scale is None:
            # Fitted factors below 1 must not make products faster than any run was seen to be.
            scale = max(self._slowest * self._time_scale(op, dtype), self._least_scale(op, dtype))
            self._scales[op, dtype] = scale
        return scale

    def _time_scale(self, op: Op, dtype: Dtype) -> float:
        """Return the factor on the time of an operation.

        Grouped GEMMs have the factor of other GEMMs times one of their own.
        """
        c = self.constants
        if op in (Op.ATTENTION, Op.ATTENTION_BACKWARD):
            return c[f"{op}_time_scale"] * c["attention_kernel_time_scale"]
        if op is Op.ELEMENTWISE:
            return c["elementwise_time_scale"] * c["eager_pass_time_scale"]
        if op not in (Op.GEMM, Op.GROUPED_GEMM):
            return c[f"{op}_time_scale"]
        scale = c["gemm_8bit_time_scale" if dtype.is_narrow else "gemm_time_scale"]
        if dtype is Dtype.NVFP4:
            scale *= c["gemm_4bit_time_scale"]
        if dtype is Dtype.MXFP8:
            scale *= c["gemm_mx_time_scale"]
        if op is Op.GROUPED_GEMM:
            scale *= c["grouped_gemm_time_scale"]
        return scale

    def _least_scale(self, op: Op, dtype: Dtype) -> float:
        """Return the scale at which the fastest products of a GPU reach the most they can in a run.

        A table of a CPU is measured in the run's own conditions.
        """
        curve = self.rate_curve(op, dtype) if op in (Op.GEMM, Op.GROUPED_GEMM) else None
        if curve is None or not self._hardware.device.kind.is_accelerator:
            return 0.0
        fastest = max(rate for _, rate in curve.points)
        return fastest / (_MOST_OF_PEAK * self.peak_flops(dtype))

    def peak_flops(self, dtype: Dtype) -> float:
        """Return the dense peak in FLOP/s: that of the dtype, else the first one listed.

        The widest dtype is listed first. MXFP8 without a peak of its own has that of FP8.
        """
        if dtype is Dtype.MXFP8 and dtype not in self._peaks:
            dtype = Dtype.FP8
        return self._peaks.get(dtype) or next(iter(self._peaks.values()))

    def rate_curve(self, op: Op, dtype: Dtype) -> Curve | None:
        """Return the curve for (op, dtype), or None where the hardware file has none.

        MXFP8 falls back on FP8, memory-bound work on the curve of any dtype.
        """
        curve = self._curves.get((op, dtype))
        if curve is None and dtype is Dtype.MXFP8:
            curve = self._curves.get((op, Dtype.FP8))
        if curve is None and op in (Op.ELEMENTWISE, Op.OPTIMIZER):
            same_op = (curve for (curve_op, _), curve in self._curves.items() if curve_op is op)
            curve = next(same_op, None)
        return curve

    def uses_constant(self, constant: str) -> bool:
        """Return whether an estimate can depend on a constant.

        It cannot where the constant stands in for a rate that the hardware file has.
        """
        op = _STAND_IN_CONSTANTS.get(constant)
        return op is None or all(curve_op is not op for curve_op, _ in self._curves)

    def rate(self, op: Op, dtype: Dtype, x: float) -> float:
        """Return the units of work done in a second: FLOP/s, bytes/s or parameters/s."""
        curve = self.rate_curve(op, dtype)
        if curve is None:
            return self._stand_in_rate(op, dtype, x)
        return interpolate(curve, x)

    def _stand_in_rate(self, op: Op, dtype: Dtype, x: float) -> float:
        c = self.constants
        memory_Bps = self._hardware.device.memory_Bps.value * c["memory_efficiency"]
        if op is Op.ELEMENTWISE:
            return memory_Bps
        if op is Op.OPTIMIZER:
            return memory_Bps / c["optimizer_bytes_per_parameter"]
        if op is Op.GEMM:
            return self.peak_flops(dtype) * c["gemm_efficiency"]
        if op is Op.GROUPED_GEMM:
            # A group reaches the rate of a large GEMM when its experts have many rows each.
            best = self.rate(Op.GEMM, dtype, _LARGE_GEMM_FLOPS)
            return best / (1 + c["grouped_rolloff_rows"] / max(x, 1.0))
        if op is Op.ATTENTION_BACKWARD:
            return self.rate(Op.ATTENTION, dtype, x) * c["attention_backward_efficiency"]
        best = self.peak_flops(dtype) * c["attention_efficiency"]
        return best * x / (x + c["attention_half_seq"])

    def seconds(self, row: OpRow) -> float:
        """Return the time of a row: its amount over its rate, times its corrections.

        The corrections are fitted between kernel tables and whole training steps.
        """
        if not row.amount:
            return 0.0
        scale = self._scale(row.op, row.dtype)
        if row.scale_constant:
            scale *= self.constants[row.scale_constant]
        return scale * row.amount / (self.rate(row.op, row.dtype, row.x) * row.efficiency)


def find_uncovered_rates(rates: DeviceRates, rows: Iterable[OpRow]) -> tuple[Assumption, ...]:
    """Return what the hardware file does not cover: missing rates, and rows outside their range.

    Outside the measured range a rate is held flat.
    """
    assumptions: dict[str, Assumption] = {}
    for row in rows:
        if row.amount:
            assumption = _uncovered_rate(rates, row)
            if assumption is not None:
                assumptions.setdefault(assumption.name, assumption)
    return tuple(assumptions.values())


def _uncovered_rate(rates: DeviceRates, row: OpRow) -> Assumption | None:
    name = f"rate {row.op} {row.dtype}"
    curve = rates.rate_curve(row.op, row.dtype)
    if curve is None:
        return Assumption(
            name=name,
            value=f"{rates.rate(row.op, row.dtype, row.x):.4g} at {row.x:.4g} ({row.name})",
            kind=SourceKind.ASSUMED,
            source=_STAND_IN_SOURCE,
        )
    first = curve.points[0][0]
    last = curve.points[-1][0]
    # A fitted curve has points beyond what was measured.
    low, high = curve.measured or (first, last)
    if len(curve.points) == 1 or low <= row.x <= high:
        return None
    how = "by its fit" if first <= row.x <= last else "held flat"
    return Assumption(
        name=f"{name} at {row.name}",
        value=f"x={row.x:.4g} outside the measured {low:.4g}-{high:.4g}, {how}",
        kind=SourceKind.ASSUMED,
        source=curve.source,
    )
