"""Measured rows as runs to fit, a hardware with what the fit says, and the run that would teach
most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moewright.calibration.fit import Fit, FittedConstant, MeasuredRun
from moewright.calibration.table import MeasuredRow
from moewright.codec import format_layout
from moewright.cost.estimate import estimate
from moewright.cost.repricing import RepriceableStep
from moewright.rules.legality import check_legality
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import (
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.plan import Verdict
from moewright.spec.sourced import Sourced, SourceKind

MIN_RUNS = 3
# of its prior spread: a constant that stays less certain than this was not seen by the runs
_LEARNT_SHARE = 0.9
_MAX_BASES = 6  # layouts that are varied to find the next run


@dataclass(frozen=True, kw_only=True, slots=True)
class NextRun:
    """A layout worth measuring: how far its time is uncertain now, and the constant it would tell
    most about."""

    model: str
    layout: str
    log_time_sd: float
    constant: str
    sd: float  # of the constant's logarithm, now
    sd_after: float


def reason_not_fittable(row: MeasuredRow) -> str:
    """Why a row cannot be fitted; "" when it can."""
    if row.speed is None:
        return "states no speed"
    if row.duplicate_of:
        return f"reports the measurement of {row.duplicate_of}"
    if row.unstated:
        return f"does not state {', '.join(row.unstated)}"
    return "is FSDP, which is priced roughly" if row.layout.zero == 3 else ""


def measured_step_s(row: MeasuredRow) -> float:
    """Measured seconds of a step. Raises ValueError for a row without speed."""
    if row.speed is None:
        raise ValueError(f"{row.id} states no speed")
    return row.workload.tokens_per_step / row.hardware.count / row.speed.tokens_per_s_per_device


def runs_from_rows(
    rows: Sequence[MeasuredRow], hardware: Hardware | None = None
) -> tuple[MeasuredRun, ...]:
    """Rows as runs, on `hardware` (of the row's count) instead of the catalogue's part where it is
    given. Repeats of a layout share their weight: n of them count as sqrt(n)."""
    repeats = Counter(_key(row) for row in rows)
    found = []
    for row in rows:
        on = replace(hardware, count=row.hardware.count) if hardware else row.hardware
        prepared = RepriceableStep(row.model, row.workload, on, row.layout)
        weight = repeats[_key(row)] ** -0.5
        found.append(
            MeasuredRun(
                id=row.id,
                prepared=prepared,
                hardware=on,
                measured_s=measured_step_s(row),
                weight=weight,
            )
        )
    return tuple(found)


def _key(row: MeasuredRow) -> tuple[object, ...]:
    return (
        row.group,
        row.layout,
        row.workload.global_batch,
        row.workload.seq_len,
        row.workload.precision,
    )


def apply_fit(
    hardware: Hardware, fit: Fit, *, source: str
) -> tuple[Hardware, tuple[FittedConstant, ...]]:
    """The hardware with the constants that the runs told something about, and those constants."""
    learnt = tuple(
        one for one in fit.fitted_constants(hardware.name) if one.sd < _LEARNT_SHARE * one.prior_sd
    )
    also = {one.name: (one.name, *one.tied_names) for one in fit.free_constants}
    new: list[Constant] = []
    for one in learnt:
        said = f"fit of {fit.run_count} runs, {source}, +-{100 * one.sd:.0f} %"
        value = Sourced(value=one.value, kind=SourceKind.FITTED, source=said)
        new += [Constant(name=name, value=value) for name in also[one.name]]
    names = {constant.name for constant in new}
    kept = [constant for constant in hardware.constants if constant.name not in names]
    return replace(hardware, constants=(*kept, *new)), learnt


def is_other_hardware(row: MeasuredRow, hardware: Hardware) -> bool:
    """Whether a row was measured on another part, or another machine, than `hardware`."""
    same = row.hardware.name == hardware.name
    return not same and not (
        hardware.fingerprint and row.hardware.fingerprint == hardware.fingerprint
    )


def suggest_next_run(
    fit: Fit,
    rows: Sequence[MeasuredRow],
    hardware: Hardware,
    *,
    can_run: Callable[[MeasuredRow, Layout], bool] = lambda _row, _layout: True,
) -> NextRun | None:
    """Of one-step changes to the measured layouts that the software `runs`, the one whose time is
    least certain and that does not run out of memory: measuring it narrows the constants most (a
    run tells log(1 + spread^2 / NOISE^2) / 2)."""
    seen = {format_layout(row.layout) for row in rows}
    tried: list[tuple[float, MeasuredRow, Layout, Hardware]] = []
    bases = {format_layout(row.layout): row for row in rows}
    for row in list(bases.values())[:_MAX_BASES]:
        on = replace(hardware, count=row.hardware.count)
        for layout in _neighbouring_layouts(row.layout):
            if (
                format_layout(layout) in seen
                or check_legality(row.model, row.workload, layout)
                or not can_run(row, layout)
            ):
                continue
            seen.add(format_layout(layout))
            run = MeasuredRun(
                id="",
                prepared=RepriceableStep(row.model, row.workload, on, layout),
                hardware=on,
                measured_s=1.0,
            )
            tried.append((fit.log_time_sd(run), row, layout, on))
    for spread, row, layout, on in sorted(tried, key=lambda one: -one[0]):
        if estimate(row.model, row.workload, on, layout).verdict is Verdict.OOM:
            continue
        run = MeasuredRun(
            id="",
            prepared=RepriceableStep(row.model, row.workload, on, layout),
            hardware=on,
            measured_s=1.0,
        )
        after = {one.name: one.sd for one in fit.fitted_constants_after(run, on.name)}
        most = min(fit.fitted_constants(on.name), key=lambda one: after[one.name] / one.sd)
        return NextRun(
            model=row.model.name,
            layout=format_layout(layout),
            log_time_sd=spread,
            constant=most.name,
            sd=most.sd,
            sd_after=after[most.name],
        )
    return None


def _neighbouring_layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts one decision away."""
    for axis in ("tp", "ep", "mbs"):
        for value in (2 * getattr(layout, axis), getattr(layout, axis) // 2):
            if value >= 1:
                sp = value > 1 if axis == "tp" else layout.sp
                yield replace(layout, **{axis: value}, sp=sp)
    if layout.vpp > 1:
        yield replace(layout, vpp=1, schedule=Schedule.ONE_F_ONE_B, stages="")
    if layout.ep > 1:
        for dispatcher in (
            DispatcherKind.ALL_TO_ALL,
            DispatcherKind.DEEPEP,
            DispatcherKind.HYBRIDEP,
        ):
            yield replace(layout, dispatcher=dispatcher)
        yield replace(layout, overlap=tuple(sorted({*layout.overlap} ^ {Overlap.EP})))
    for recompute in ((), (Recompute.FULL,), (Recompute.LAYERNORM, Recompute.MOE_ACT)):
        yield replace(layout, recompute=recompute)
    for graphs in (
        (),
        (CudaGraphScope.ATTN, CudaGraphScope.MOE_PREPROCESS, CudaGraphScope.MOE_ROUTER),
    ):
        yield replace(layout, graphs=graphs)
    both = (Overlap.GRAD, Overlap.PARAM)
    rest = tuple(one for one in layout.overlap if one not in both)
    yield replace(
        layout, overlap=rest if both[0] in layout.overlap else tuple(sorted((*rest, *both)))
    )


def require_enough_runs(runs: Sequence[MeasuredRun], *, source: str) -> None:
    """Raises BadInput when there are too few runs to fit."""
    if len(runs) < MIN_RUNS:
        rule = f"has {len(runs)} rows that can be fitted on this hardware; a fit needs {MIN_RUNS}"
        raise BadInput(Reason(field="table", value=source, rule=rule))


def relative_errors(runs: Sequence[MeasuredRun], predicted: Sequence[float]) -> tuple[float, ...]:
    """predicted / measured - 1."""
    measured = np.array([run.measured_s for run in runs])
    return tuple(float(one) for one in np.array(predicted) / measured - 1)
