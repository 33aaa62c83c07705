"""Rows of a table as runs to fit, hardware with fitted constants, and the run to measure next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from types import MappingProxyType

import numpy as np

from moewright.calibration.fit import RUN_NOISE, Fit, FittedConstant, MeasuredRun
from moewright.calibration.measured_row import MeasuredRow, RowStatement
from moewright.calibration.readings import (
    MixedStep,
    NaturalStep,
    PricedStep,
    Reading,
)
from moewright.codec import format_layout
from moewright.cost.constants import LOAD_SCALE, Constants
from moewright.cost.estimate import estimate
from moewright.cost.evidence import list_choices
from moewright.cost.time.repricing import RepriceableStep
from moewright.rules.limits.legality import check_legality
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.plan import Verdict
from moewright.spec.stage_string import EVEN_SPLIT
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Task

# Runs below which all constants that the fit moved are taken: so few say of none of them alone what
# they say of all together.
_RUNS_THAT_TELL_APART = 3
# A constant was not learnt from the runs if its uncertainty stays above this share of the prior's.
_LEARNT_SHARE = 0.9
# Multiples of the expected excess of the hottest rank at which natural routing is prepared.
_LOAD_SCALES = (0.4, 1.0, 2.5)
# Standard deviation of the logarithm of a row's seconds that no constant explains: of rows that the
# model describes in full, of those with switches inferred (besides the spread of their readings),
# and of those whose router decides: about the spread of residuals of left-out publishers.
_NOISE: Mapping[RowStatement, float] = MappingProxyType(
    {
        RowStatement.COMPLETE: RUN_NOISE,
        RowStatement.UNSTATED: 0.25,
        RowStatement.NATURAL: 0.2,
    }
)
_MAX_BASES = 6  # layouts that are varied to find the next run


@dataclass(frozen=True, kw_only=True, slots=True)
class NextRun:
    """A layout worth measuring, how uncertain its time is, and the constant it tells most about."""

    model: str
    layout: str
    log_time_sd: float
    constant: str
    sd: float  # of the constant's logarithm, now
    sd_after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnmeasuredRun:
    """A change to a measured layout, with the uncertainty of its time."""

    row: MeasuredRow
    layout: Layout
    hardware: Hardware
    log_time_sd: float


def is_priced_in_full(row: MeasuredRow) -> bool:
    """Return whether a timed row may move constants: neither FSDP nor adapters are priced in full.

    What their time misses would move constants that other runs know better.
    """
    return row.layout.zero != 3 and row.workload.fine_tuning.task is not Task.LORA


def reason_not_fittable(row: MeasuredRow) -> str:
    """Return why a row cannot be fitted; "" when it can."""
    if row.speed is None:
        return "states no speed"
    if row.duplicate_of:
        return f"reports the measurement of {row.duplicate_of}"
    if row.unstated:
        return f"does not state {', '.join(row.unstated)}"
    return "" if is_priced_in_full(row) else "is FSDP or LoRA, which are priced roughly"


def measured_step_s(row: MeasuredRow) -> float:
    """Return the measured seconds of a step.

    Raises:
        ValueError: the row has no speed.
    """
    if row.speed is None:
        raise ValueError(f"{row.id} states no speed")
    return row.workload.tokens_per_step / row.hardware.count / row.speed.tokens_per_s_per_device


def runs_from_rows(
    rows: Sequence[MeasuredRow], hardware: Hardware | None = None
) -> tuple[MeasuredRun, ...]:
    """Return rows as runs, on `hardware` (of the row's count) where it is given.

    Repeats of a layout share their weight: n of them count as one run.
    """
    repeats = Counter(_job_key(row) for row in rows)
    return tuple(run_from_row(row, hardware, weight=repeats[_job_key(row)] ** -0.5) for row in rows)


def run_from_row(
    row: MeasuredRow, hardware: Hardware | None = None, *, weight: float = 1.0
) -> MeasuredRun:
    """Return a timed row as the fit takes it, in all its readings.

    Raises:
        ValueError: the row has no speed.
    """
    row_hardware = replace(hardware, count=row.hardware.count) if hardware else row.hardware
    steps = [
        (reading.share, _priced_step(row, reading, row_hardware)) for reading in _readings_of(row)
    ]
    noise = _NOISE[row.kind]
    prepared: PricedStep = steps[0][1]
    if len(steps) > 1:
        mixed = MixedStep(steps)
        prepared = mixed
        noise = hypot(noise, mixed.log_sd(()))
    return MeasuredRun(
        id=row.id,
        prepared=prepared,
        hardware=row_hardware,
        measured_s=measured_step_s(row),
        choices=list_choices(row.job, row_hardware),
        weight=weight,
        publisher=row.publisher if row.cells else "",
        network=row.cells.get("network", ""),
        noise=noise,
    )


def _readings_of(row: MeasuredRow) -> tuple[Reading, ...]:
    own = Reading(share=1.0, workload=row.workload, layout=row.layout)
    return row.readings or (own,)


def _priced_step(row: MeasuredRow, reading: Reading, hardware: Hardware) -> PricedStep:
    """Return a reading of a row, prepared; under natural routing at several loads."""
    if row.kind is not RowStatement.NATURAL or not row.cells:
        return RepriceableStep(row.model, reading.workload, hardware, reading.layout)
    steps: list[tuple[float, PricedStep]] = []
    for scale in _LOAD_SCALES:
        scaled = Sourced(value=scale, kind=SourceKind.ASSUMED, source="varied")
        loaded = replace(
            hardware, constants=(*hardware.constants, Constant(name=LOAD_SCALE, value=scaled))
        )
        steps.append((scale, RepriceableStep(row.model, reading.workload, loaded, reading.layout)))
    return NaturalStep(steps, default=Constants(hardware)[LOAD_SCALE])


def _job_key(row: MeasuredRow) -> tuple[object, ...]:
    workload = row.workload
    return (row.group, row.layout, workload.global_batch, workload.seq_len, workload.precision)


def apply_fit(
    hardware: Hardware, fit: Fit, *, source: str
) -> tuple[Hardware, tuple[FittedConstant, ...]]:
    """Return the hardware with the constants that the runs told about, and those constants.

    One or two runs move many constants a little, and only together do these say what was measured.
    """
    is_few = fit.run_count < _RUNS_THAT_TELL_APART
    learnt = tuple(
        constant
        for constant in fit.fitted_constants(hardware.name)
        if (is_few and constant.value != constant.prior)
        or constant.sd < _LEARNT_SHARE * constant.prior_sd
    )
    tied = {free.name: (free.name, *free.tied_names) for free in fit.free_constants}
    fitted: list[Constant] = []
    for constant in learnt:
        origin = f"fit of {fit.run_count} runs, {source}, +-{100 * constant.sd:.0f} %"
        value = Sourced(value=constant.value, kind=SourceKind.FITTED, source=origin)
        fitted += [Constant(name=name, value=value) for name in tied[constant.name]]
    fitted_names = {constant.name for constant in fitted}
    kept = [constant for constant in hardware.constants if constant.name not in fitted_names]
    return replace(hardware, constants=(*kept, *fitted)), learnt


def is_other_hardware(row: MeasuredRow, hardware: Hardware) -> bool:
    """Return whether a row was measured on another part, or another machine, than `hardware`."""
    if row.hardware.name == hardware.name:
        return False
    return not hardware.fingerprint or row.hardware.fingerprint != hardware.fingerprint


def suggest_next_run(
    fit: Fit,
    rows: Sequence[MeasuredRow],
    hardware: Hardware,
    *,
    can_run: Callable[[MeasuredRow, Layout], bool] = lambda _row, _layout: True,
) -> NextRun | None:
    """Suggest the layout, one decision away from a measured one, whose time is least certain.

    It is one that the software can run and that is not predicted to run out of memory. To measure
    it narrows the constants most: a run tells log(1 + log_time_sd^2 / RUN_NOISE^2) / 2 about them.
    """
    candidates = list(_unmeasured_runs(fit, rows, hardware, can_run))
    for candidate in sorted(candidates, key=lambda candidate: -candidate.log_time_sd):
        row = candidate.row
        prediction = estimate(row.model, row.workload, candidate.hardware, candidate.layout)
        if prediction.verdict is not Verdict.OOM:
            return _describe_next_run(fit, candidate)
    return None


def _unmeasured_runs(
    fit: Fit,
    rows: Sequence[MeasuredRow],
    hardware: Hardware,
    can_run: Callable[[MeasuredRow, Layout], bool],
) -> Iterator[_UnmeasuredRun]:
    """Yield the legal layouts one decision away from the measured ones, each once."""
    seen = {format_layout(row.layout) for row in rows}
    row_of_layout = {format_layout(row.layout): row for row in rows}
    for row in list(row_of_layout.values())[:_MAX_BASES]:
        row_hardware = replace(hardware, count=row.hardware.count)
        for layout in _neighbouring_layouts(row.layout):
            text = format_layout(layout)
            if text in seen or check_legality(replace(row.job, layout=layout)):
                continue
            if not can_run(row, layout):
                continue
            seen.add(text)
            run = _run_to_price(row, layout, row_hardware)
            yield _UnmeasuredRun(
                row=row, layout=layout, hardware=row_hardware, log_time_sd=fit.log_time_sd(run)
            )


def _run_to_price(row: MeasuredRow, layout: Layout, hardware: Hardware) -> MeasuredRun:
    """Return a run of which only the predicted time is asked; its measured time is a dummy."""
    prepared = RepriceableStep(row.model, row.workload, hardware, layout)
    return MeasuredRun(id="", prepared=prepared, hardware=hardware, measured_s=1.0)


def _describe_next_run(fit: Fit, candidate: _UnmeasuredRun) -> NextRun:
    site = candidate.hardware.name
    run = _run_to_price(candidate.row, candidate.layout, candidate.hardware)
    sd_after = {constant.name: constant.sd for constant in fit.fitted_constants_after(run, site)}
    narrowed_most = min(
        fit.fitted_constants(site), key=lambda constant: sd_after[constant.name] / constant.sd
    )
    return NextRun(
        model=candidate.row.model.name,
        layout=format_layout(candidate.layout),
        log_time_sd=candidate.log_time_sd,
        constant=narrowed_most.name,
        sd=narrowed_most.sd,
        sd_after=sd_after[narrowed_most.name],
    )


def _neighbouring_layouts(layout: Layout) -> Iterator[Layout]:
    """Yield layouts one decision away."""
    for axis in ("tp", "ep", "mbs"):
        for value in (2 * getattr(layout, axis), getattr(layout, axis) // 2):
            if value >= 1:
                sp = value > 1 if axis == "tp" else layout.sp
                yield replace(layout, **{axis: value}, sp=sp)
    if layout.vpp > 1:
        yield replace(layout, vpp=1, schedule=Schedule.ONE_F_ONE_B, stages=EVEN_SPLIT)
    if layout.ep > 1:
        searched = [kind for kind in DispatcherKind if kind.facts.is_searched]
        for dispatcher in (DEFAULT_LAYOUT.dispatcher, *searched):
            yield replace(layout, dispatcher=dispatcher)
        # Switched: on where it is off.
        yield replace(layout, overlap=tuple(sorted({*layout.overlap} ^ {Overlap.EP})))
    for recompute in ((), (Recompute.FULL,), (Recompute.LAYERNORM, Recompute.MOE_ACT)):
        yield replace(layout, recompute=recompute)
    for graphs in (
        (),
        (CudaGraphScope.ATTN, CudaGraphScope.MOE_PREPROCESS, CudaGraphScope.MOE_ROUTER),
    ):
        yield replace(layout, graphs=graphs)
    yield _switch_data_parallel_overlap(layout)


def _switch_data_parallel_overlap(layout: Layout) -> Layout:
    """Return the layout with its overlap of gradients and parameters switched on, or off."""
    both = (Overlap.GRAD, Overlap.PARAM)
    others = tuple(overlap for overlap in layout.overlap if overlap not in both)
    if Overlap.GRAD in layout.overlap:
        return replace(layout, overlap=others)
    return replace(layout, overlap=tuple(sorted((*others, *both))))


def require_runs(runs: Sequence[MeasuredRun], *, source: str) -> None:
    """Refuse a table of which no run can be fitted.

    Raises:
        BadInput: there is no run.
    """
    if not runs:
        rule = "has no row that can be fitted on this hardware"
        raise BadInput(Reason(field="table", value=source, rule=rule))


def relative_errors(runs: Sequence[MeasuredRun], predicted: Sequence[float]) -> tuple[float, ...]:
    """Return predicted / measured - 1 of each run."""
    measured = np.array([run.measured_s for run in runs])
    return tuple(float(error) for error in np.array(predicted) / measured - 1)
