"""Constants of the time model from one traced step: its kernels beside those that are predicted.

What a constant scales of a predicted step is told by the step itself, estimated with the constant
a little larger. So a kind of kernels has as many predicted seconds as its constants scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moewright.calibration.fit_inputs import run_from_row
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.own_runs import weigh_own_runs
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.plan import TimePart
from moewright.spec.units import Sourced, SourceKind

_STEP = 0.02  # for derivatives by differences, in the logarithm of a constant
_LEAST_SHARE = 0.01  # of a predicted step, below which a kind of kernels tells nothing
_WIDEST = 10.0  # a kind that differs more was named otherwise, or is other work
_OUTSIDE = (TimePart.BUBBLE, TimePart.HOST)  # no kernels
_PRODUCTS = ("gemm_time_scale", "gemm_8bit_time_scale")
_GROUPED = ("grouped_gemm_time_scale",)
_ATTENTION = ("attention_time_scale", "attention_backward_time_scale")
_ELEMENTWISE = ("elementwise_time_scale",)
_UPDATE = ("optimizer_time_scale",)
_EXCHANGE = (
    "alltoall_inside_time_scale",
    "alltoall_between_time_scale",
    "dedup_inside_time_scale",
    "dedup_between_time_scale",
)
_TENSOR = ("tp_time_scale",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSeconds:
    """Seconds of a step by the work that was traced; 0: there was none, or it is not known.

    `products` are matrix products but those of experts in groups, `other` all that is neither a
    product nor attention. Exchanges count without waits for ranks that came late. Without
    `has_update` it is a part of a step: passes alone, and no optimizer behind them.
    """

    products: float
    grouped: float
    attention: float
    other: float
    exchange: float
    tensor: float
    has_update: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFactor:
    """The measured seconds of a kind of work over the predicted ones."""

    kind: str
    factor: float


def calibrate_on_trace(
    hardware: Hardware, row: MeasuredRow, traced: TracedSeconds
) -> tuple[Hardware, tuple[KindFactor, ...]]:
    """Return the hardware with the constants of a traced step, and how far it was off before.

    What they leave open of a whole step is carried over to runs that make the same choices, as
    those of a fit are.
    """
    # Own runs move a whole step: beside them constants would not add up to it.
    priced = replace(hardware, count=row.layout.world_size, own_runs=())
    scaled = _ScaledSeconds(priced, row)
    factors = list(_compare_kinds(scaled, traced))
    values = Constants(priced)
    source = f"the trace {row.id}"
    changed = {
        name: Constant(
            name=name,
            value=Sourced(value=values[name] * factor, kind=SourceKind.FITTED, source=source),
        )
        for kind, names, factor in factors
        for name in names
    }
    kept = [constant for constant in hardware.constants if constant.name not in changed]
    calibrated = replace(hardware, constants=(*kept, *changed.values()), own_runs=())
    own_runs = calibrated.own_runs
    if traced.has_update:
        run = run_from_row(row, calibrated)
        own_runs = weigh_own_runs([run], [run.prepared.step_s(calibrated.constants)], source=source)
    return (
        replace(calibrated, own_runs=own_runs),
        tuple(KindFactor(kind=kind, factor=factor) for kind, _, factor in factors),
    )


class _ScaledSeconds:
    """The predicted seconds of the row's step that constants scale."""

    def __init__(self, hardware: Hardware, row: MeasuredRow) -> None:
        self._hardware = hardware
        self._row = row
        self._parts = self._estimate({})
        self.step_s = sum(self._parts.values())

    def of_constants(self, names: Sequence[str]) -> float:
        values = Constants(self._hardware)
        larger = self._estimate({name: values[name] * (1 + _STEP) for name in names})
        # d step / d log c: the seconds that are proportional to the constants.
        return max(0.0, (sum(larger.values()) - self.step_s) / _STEP)

    def _estimate(self, values: Mapping[str, float]) -> dict[TimePart, float]:
        changed = tuple(
            Constant(name=name, value=Sourced(value=value, kind=SourceKind.FITTED, source=""))
            for name, value in values.items()
        )
        kept = [item for item in self._hardware.constants if item.name not in values]
        hardware = replace(self._hardware, constants=(*kept, *changed))
        told = estimate(self._row.model, self._row.workload, hardware, self._row.layout)
        return {
            # A trace has kernels whether they show in the step or not.
            share.part: share.seconds + share.hidden_s
            for share in told.shares
            if share.part not in _OUTSIDE
        }


def _compare_kinds(
    scaled: _ScaledSeconds, traced: TracedSeconds
) -> list[tuple[str, tuple[str, ...], float]]:
    """Return each kind whose constants the trace tells: its name, they, and their factor."""
    answer = list(_compare_products(scaled, traced))
    others = (*_ELEMENTWISE, *_UPDATE) if traced.has_update else _ELEMENTWISE
    for kind, names, seconds in (
        ("attention", _ATTENTION, traced.attention),
        ("other kernels", others, traced.other),
        ("exchanges of experts", _EXCHANGE, traced.exchange),
        ("exchanges of tensor parallelism", _TENSOR, traced.tensor),
    ):
        if factor := _find_factor(seconds, scaled.of_constants(names), scaled.step_s):
            answer.append((kind, names, factor))
    return answer


def _compare_products(
    scaled: _ScaledSeconds, traced: TracedSeconds
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the factors of matrix products: of experts and of others, or of all where names err.

    Libraries of grouped products have plain ones too, under the same names, and trainers start
    experts one by one: then one of the two kinds has next to no kernels.
    """
    grouped_s = scaled.of_constants(_GROUPED)
    products_s = scaled.of_constants(_PRODUCTS)  # those in groups among them
    kinds = ((traced.products, products_s - grouped_s), (traced.grouped, grouped_s))
    plain, grouped = (_find_factor(*kind, scaled.step_s) for kind in kinds)
    least_s = _LEAST_SHARE * scaled.step_s
    if any(
        predicted_s >= least_s and not factor
        for (_, predicted_s), factor in zip(kinds, (plain, grouped), strict=True)
    ):
        if factor := _find_factor(traced.products + traced.grouped, products_s, scaled.step_s):
            yield "products", _PRODUCTS, factor
        return
    if plain:
        yield "products", _PRODUCTS, plain
    if grouped:
        # The scale of grouped products multiplies that of all products (cost.time.op_time).
        yield "products of experts", _GROUPED, grouped / (plain or 1.0)


def _find_factor(measured_s: float, predicted_s: float, step_s: float) -> float:
    """Return measured over predicted seconds; 0 where that tells nothing of a constant."""
    if measured_s <= 0 or predicted_s < _LEAST_SHARE * step_s:
        return 0.0
    factor = measured_s / predicted_s
    return factor if 1 / _WIDEST <= factor <= _WIDEST else 0.0
