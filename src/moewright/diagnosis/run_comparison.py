"""A run beside its prediction and the nearest published runs: where the gap lies, what closes it.

Parts of a step that runs, traces and logs name differently are put into the same classes, which sum
to the step on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moewright.codec import format_layout, parse_layout
from moewright.cost.estimate import estimate
from moewright.diagnosis.advice import Advice
from moewright.diagnosis.published import Nearness, PublishedRun, find_nearest_runs
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.diagnosis.traces.log_findings import TRACE_COMMAND
from moewright.diagnosis.waterfall import (
    BELOW_PEAK,
    DROP_NAMES,
    UNEVEN_LOAD,
    UNEXPLAINED,
    peak_flops,
)
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.spec.choices import FieldGroup
from moewright.spec.errors import BadInput
from moewright.spec.finding import Basis, Cause, Fix, Waterfall
from moewright.spec.layout import LAYOUT_FIELDS, Layout
from moewright.spec.plan import Plan, TimePart, Verdict
from moewright.spec.record import Record, Row
from moewright.spec.units import divide, format_seconds
from moewright.spec.workload import Dtype

SHOWN_RUNS = 5  # of which the first is nearest
_LEAST_GAP = 0.01  # of the measured step: less is no gap
_LEAST_GAIN = 0.005  # of the predicted step
_ADOPTED = (FieldGroup.DEGREES, FieldGroup.PIPELINE)  # of a published run's layout


class StepClass(StrEnum):
    """A class of a step's parts, the same for runs, traces, logs and predictions."""

    DEVICE = "work of the device"
    RECOMPUTE = "recompute"
    EP = "expert dispatch"
    TP = "tensor parallelism"
    CP = "context parallelism"
    PP = "pipeline: bubble and messages"
    DP = "gradients and weights"
    HOST = "host"
    LATE = "waiting for late ranks"
    COPIES = "copies and offloading"
    OTHER = "other"
    UNEXPLAINED = "not explained"


_CLASS_OF_PART: Mapping[TimePart, StepClass] = {
    TimePart.RECOMPUTE: StepClass.RECOMPUTE,
    TimePart.OFFLOAD: StepClass.COPIES,
    TimePart.EP_COMM: StepClass.EP,
    TimePart.TP_COMM: StepClass.TP,
    TimePart.CP_COMM: StepClass.CP,
    TimePart.PP_COMM: StepClass.PP,
    TimePart.DP_COMM: StepClass.DP,
    TimePart.BUBBLE: StepClass.PP,
    TimePart.HOST: StepClass.HOST,
}
_CAUSES: Mapping[StepClass, tuple[Cause, ...]] = {
    StepClass.DEVICE: (Cause.FEW_ROWS, Cause.KERNEL_RATES, Cause.IMBALANCE),
    StepClass.RECOMPUTE: (Cause.RECOMPUTE,),
    StepClass.EP: (Cause.EP,),
    StepClass.TP: (Cause.TP,),
    StepClass.CP: (Cause.CP,),
    StepClass.PP: (Cause.PP,),
    StepClass.DP: (Cause.DP,),
    StepClass.HOST: (
        *(Cause.LAUNCH, Cause.SYNC, Cause.DATA, Cause.GARBAGE_COLLECTION, Cause.HOST_OTHER),
        Cause.GROWING,
    ),
    StepClass.LATE: (Cause.STRAGGLER, Cause.IMBALANCE),
    StepClass.COPIES: (Cause.COPIES, Cause.DEVICE_COPIES),
    StepClass.OTHER: (Cause.COLLECTIVES, Cause.QUEUED),
    StepClass.UNEXPLAINED: (),
}
_CLASS_OF_DROP: Mapping[str, StepClass] = {
    **{name: _CLASS_OF_PART.get(part, StepClass.DEVICE) for part, name in DROP_NAMES.items()},
    **{
        f"waiting: {cause}": step_class
        for step_class, causes in _CAUSES.items()
        for cause in causes
    },
    **{f"device idle: {cause}": StepClass.HOST for cause in IdleCause},
    f"device idle: {IdleCause.DEVICE}": StepClass.OTHER,
    Cause.DATA: StepClass.HOST,
    Cause.GARBAGE_COLLECTION: StepClass.HOST,
    "host asleep, or in no phase": StepClass.HOST,
    BELOW_PEAK: StepClass.DEVICE,
    UNEVEN_LOAD: StepClass.DEVICE,
    "work below the peak rate": StepClass.DEVICE,
    "other kernels: norms, permutes, optimizer": StepClass.DEVICE,
    "ranks waiting for each other": StepClass.LATE,
    "waiting for late ranks": StepClass.LATE,
    "copies not hidden": StepClass.COPIES,
    UNEXPLAINED: StepClass.UNEXPLAINED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGap:
    """A class of a step, measured beside predicted.

    `is_measured` is False where the run did not time it: its seconds are then the predicted ones.
    """

    name: StepClass
    measured_s: float
    predicted_s: float
    is_measured: bool

    @property
    def gap_s(self) -> float:
        """Return the seconds beyond the prediction."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A published run beside a job.

    `expected` are the tokens/s a device of the job if it came as near its prediction as that run
    came to its own; 0 where the two share neither model nor device.
    """

    run: PublishedRun
    expected: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GapCloser:
    """A change, with the class of the step that it is for, and where it comes from."""

    gap: str
    fix: Fix
    source: str = ""  # a published run's; "" of the diagnosis


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunComparison(Record):
    """A run beside its prediction and the nearest published runs.

    Speeds are tokens/s a device; `mfu` and `predicted_mfu` are of the bf16 peak by our count of
    model FLOPs, 0 without a peak. `gaps` sum to the step on both sides, the largest gap first.
    `closers` are what published runs and a trace add to `advice`, which says what to write.
    """

    job: Plan
    measured_step_s: float
    measured: float
    predicted: float
    mfu: float
    predicted_mfu: float
    nearest: tuple[ComparedRun, ...]
    gaps: tuple[StepGap, ...]
    closers: tuple[GapCloser, ...]
    headline: str
    standing: str = ""  # beside the near published runs; "" where none is near
    notes: tuple[str, ...] = ()
    advice: Advice | None = None

    def title(self) -> str:
        """Return the headline."""
        return self.headline

    def to_rows(self) -> list[Row]:
        """Return a row for each published run."""
        return [
            {
                "run": item.run.id,
                "model": item.run.model,
                "near": item.run.nearness.value,
                "measured": item.run.measured,
                "mfu": item.run.mfu,
                "expected": item.expected,
            }
            for item in self.nearest
        ]


def compare_with_published(
    job: Plan,
    measured_s: float,
    waterfall: Waterfall | None,
    advice: Advice | None = None,
    notes: tuple[str, ...] = (),
) -> RunComparison:
    """Put a run of a job beside its prediction and the nearest published runs.

    `measured_s` is its step; `waterfall` says where the step goes, None where that is not known;
    `advice` is what to change in it.
    """
    tokens = job.workload.tokens_per_step / job.layout.world_size
    predicted = tokens / job.estimate.step_s
    runs = find_nearest_runs(job, SHOWN_RUNS)
    gaps = tuple(_measure_gaps(job, measured_s, waterfall))
    return RunComparison(
        job=job,
        measured_step_s=measured_s,
        measured=tokens / measured_s,
        predicted=predicted,
        mfu=_bf16_mfu(job, measured_s),
        predicted_mfu=_bf16_mfu(job, job.estimate.step_s),
        nearest=tuple(_compare_run(run, predicted) for run in runs),
        gaps=gaps,
        closers=tuple(_list_closers(job, measured_s, gaps, runs)),
        advice=advice,
        headline=_describe(job, measured_s, gaps),
        standing=_describe_standing(tokens / measured_s, runs),
        notes=notes,
    )


def _bf16_mfu(job: Plan, step_s: float) -> float:
    peak = peak_flops(job.hardware, Dtype.BF16)
    flops = job.estimate.model_flops_per_step / job.layout.world_size
    return divide(flops / step_s, peak)


def _compare_run(run: PublishedRun, predicted: float) -> ComparedRun:
    if run.nearness is Nearness.FAR:
        return ComparedRun(run=run, expected=0.0)
    return ComparedRun(run=run, expected=predicted * run.measured / run.predicted)


def _measure_gaps(job: Plan, measured_s: float, waterfall: Waterfall | None) -> Iterator[StepGap]:
    """Yield the classes of a step that take time on either side, the largest gap first."""
    predicted: dict[StepClass, float] = {}
    for share in job.estimate.shares:
        step_class = _CLASS_OF_PART.get(share.part, StepClass.DEVICE)
        predicted[step_class] = predicted.get(step_class, 0.0) + share.seconds
    measured: dict[StepClass, float] = {}
    timed: set[StepClass] = set()
    if waterfall is None:
        measured = dict(predicted)
        measured[StepClass.UNEXPLAINED] = measured_s - sum(predicted.values())
        timed = {StepClass.UNEXPLAINED}
    else:
        measured[StepClass.DEVICE] = waterfall.ideal_s
        for drop in waterfall.drops:
            step_class = _CLASS_OF_DROP.get(drop.name, StepClass.OTHER)
            measured[step_class] = measured.get(step_class, 0.0) + drop.seconds
            if drop.basis is Basis.MEASURED:
                timed.add(step_class)
    gaps = [
        StepGap(
            name=step_class,
            measured_s=measured.get(step_class, 0.0),
            predicted_s=predicted.get(step_class, 0.0),
            is_measured=step_class in timed,
        )
        for step_class in StepClass
        if measured.get(step_class) or predicted.get(step_class)
    ]
    yield from sorted(gaps, key=lambda gap: -gap.gap_s)


def _describe(job: Plan, measured_s: float, gaps: Sequence[StepGap]) -> str:
    times = measured_s / job.estimate.step_s
    low_s, high_s = job.estimate.step_interval_80
    if low_s <= measured_s <= high_s:
        return "the run is as fast as predicted, within the prediction's 80 % interval"
    if times < 1:
        return f"the run takes {times:.2f} of the predicted step: it is faster than the plan"
    first = gaps[0]
    return (
        f"the run takes {times:.2f} x the predicted step; most of the gap is {first.name}: "
        f"{format_seconds(first.gap_s)} more than predicted"
    )


def _describe_standing(measured: float, runs: Sequence[PublishedRun]) -> str:
    """Say what the nearest runs of the same model on the same device reach; "" without any."""
    near = [run for run in runs if run.nearness in (Nearness.SAME, Nearness.NEAR)]
    if not near:
        return ""
    best = max(near, key=lambda run: run.measured)
    speeds = sorted(run.measured for run in near)
    reach = f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}" if len(near) > 1 else f"{speeds[0]:,.0f}"
    return (
        f"published near it: {reach} tokens/s a device; "
        f"this run has {measured / best.measured:.2f} of {best.id}"
    )


def _list_closers(
    job: Plan, measured_s: float, gaps: Sequence[StepGap], runs: Sequence[PublishedRun]
) -> Iterator[GapCloser]:
    """Yield what tells more of a gap that nothing explains, then layouts of published runs."""
    for gap in gaps:
        if gap.name is StepClass.UNEXPLAINED and gap.gap_s >= _LEAST_GAP * measured_s:
            text = "take a trace, for what was recorded does not say where this time goes"
            yield GapCloser(gap=gap.name, fix=Fix(text=text, megatron=TRACE_COMMAND))
    yield from _published_layouts(job, runs)


def _published_layouts(job: Plan, runs: Sequence[PublishedRun]) -> Iterator[GapCloser]:
    """Yield the layouts of near published runs that are predicted to be faster for this job."""
    priced: set[str] = set()
    for run in runs:
        if run.nearness not in (Nearness.SAME, Nearness.NEAR):
            continue
        layout = _adopt_layout(job.layout, run)
        if layout is None or layout == job.layout or format_layout(layout) in priced:
            continue
        priced.add(format_layout(layout))
        if check_legality(replace(plan_job(job), layout=layout)):
            continue
        try:
            other = estimate(job.model, job.workload, job.hardware, layout)
        except BadInput:
            continue
        gain = 1 - other.step_s / job.estimate.step_s
        if gain > _LEAST_GAIN and other.verdict is not Verdict.OOM:
            text = (
                f"the layout of {run.id}, {format_layout(layout)}: predicted step {-gain:+.1%} here"
            )
            yield GapCloser(gap="layout", fix=Fix(text=text), source=run.source)


def _adopt_layout(own: Layout, run: PublishedRun) -> Layout | None:
    """Return the degrees and the pipeline of a published run, with all other choices of a job."""
    try:
        adopted = parse_layout(run.layout, world_size=own.world_size)
    except BadInput:
        return None
    degrees = {
        field.name: getattr(adopted, field.name)
        for field in LAYOUT_FIELDS
        if field.facts.group in _ADOPTED
    }
    layout = replace(own, **degrees)
    if layout.cp == 1:  # nothing is exchanged
        layout = replace(layout, cp_comm=adopted.cp_comm)
    return layout
