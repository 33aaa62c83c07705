"""A run as pages show it: verdict, walls with priced fixes, waterfall, loss, experts, ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from statistics import fmean

from moewright.diagnosis.advice import Advice
from moewright.diagnosis.compare_ledgers import TOTAL, LedgerComparison, Section
from moewright.diagnosis.judgement import Judgement, add_judgement
from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.worst_step import WorstStep
from moewright.diagnosis.utilization import list_device_use
from moewright.report.document import DocumentSection, Table, join_runs
from moewright.report.finding_sections import build_advice_section, list_finding_sections
from moewright.report.ledger_document import build_rank_section
from moewright.report.plan_sections import build_plan_facts, build_source_section
from moewright.report.run_sections import (
    RunVerdict,
    build_router_table,
    build_session_section,
    build_verdict,
    is_number,
    list_incidents,
    list_load_window,
)
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.finding import Finding, Waterfall
from moewright.spec.ledger import Component, StepPhase
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.run import EvalRecord, RunRecord
from moewright.spec.units import format_bytes
from moewright.view.plan_view import JobView, build_job_view

_UNEXPLAINED = "unexplained"
_SMALLEST_SHARE = 1e-4  # of a step: smaller parts are not drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """Seconds a step of one part, by rank; all parts of a rank sum to its step."""

    part: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceView:
    """The parts of every rank's step, and the longest step as lanes over time."""

    ranks: tuple[int, ...]
    parts: tuple[RankPart, ...]
    worst: WorstStep | None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DiagnosisView(Record):
    """What to change in a run, its walls, the one to work on first in front, and where it goes.

    `advice` and `waterfall` are None where the job is not known. `notes` say what was read
    otherwise than written and what would give a fuller answer, and `missing` names what of the job
    is not known. `trace` is where the step of each traced rank goes.
    """

    walls: tuple[DocumentSection, ...]
    waterfall: Waterfall | None
    notes: tuple[str, ...] = ()
    trace: TraceView | None = None
    judgement: Judgement | None = None
    missing: tuple[str, ...] = ()
    headline: str = ""  # what the findings do not explain; the first of the notes too
    advice: DocumentSection | None = None

    def title(self) -> str:
        """Return the first finding, and the judgement of the job."""
        title = join_runs(self.walls[0].title) if self.walls else "no wall was found"
        return add_judgement(title, self.judgement)

    def to_rows(self) -> list[Row]:
        """Return a row for each finding."""
        return [{"wall": join_runs(wall.title)} for wall in self.walls]


def build_diagnosis_view(
    findings: Sequence[Finding],
    waterfall: Waterfall | None,
    notes: Sequence[str] = (),
    *,
    trace: TraceView | None = None,
    has_headline: bool = False,
    advice: Advice | None = None,
) -> DiagnosisView:
    """Build the record of a diagnosis; empty notes are left out.

    Where a headline among them says that the findings do not explain the step, none is the wall.
    """
    return DiagnosisView(
        walls=tuple(list_finding_sections(findings, has_headline=has_headline)),
        waterfall=waterfall,
        notes=tuple(note for note in notes if note),
        trace=trace,
        advice=None if advice is None else build_advice_section(advice),
    )


def close_at(waterfall: Waterfall, measured_s: float) -> Waterfall:
    """Return a waterfall that ends at another measured step; the rest is not explained."""
    change_s = measured_s - waterfall.measured_s
    drops = tuple(
        replace(drop, seconds=drop.seconds + change_s) if drop.name == _UNEXPLAINED else drop
        for drop in waterfall.drops
    )
    return replace(waterfall, drops=drops, measured_s=measured_s)


def build_trace_view(breakdowns: Sequence[Breakdown], worst: WorstStep | None) -> TraceView | None:
    """Build the record of a traced step; None where nothing was traced."""
    if not breakdowns:
        return None
    parts_of_rank = [_parts(breakdown) for breakdown in breakdowns]
    longest_s = max(breakdown.step_s for breakdown in breakdowns)
    names = dict.fromkeys(name for parts in parts_of_rank for name in parts)
    parts = (
        RankPart(part=name, seconds=tuple(parts.get(name, 0.0) for parts in parts_of_rank))
        for name in names
    )
    return TraceView(
        ranks=tuple(breakdown.rank for breakdown in breakdowns),
        parts=tuple(part for part in parts if max(part.seconds) > _SMALLEST_SHARE * longest_s),
        worst=worst,
    )


def _parts(breakdown: Breakdown) -> dict[str, float]:
    return {
        "compute": breakdown.compute_s,
        **{f"exposed {time.comm}": time.exposed_s for time in breakdown.comm_times},
        "copies not hidden": breakdown.copies_s,
        **{f"idle: {cause}": seconds for cause, seconds in breakdown.idle_times},
    }


Point = tuple[float, float]

# Most points that one curve draws.
MAX_CURVE_POINTS = 2000
_LOAD_POINTS = 3000  # of the curves of all layers together


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedValue:
    """A value as it was predicted and as it was observed."""

    name: str
    predicted: float
    observed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoads:
    """The loads of a layer's experts over their mean, and those of its expert-parallel ranks.

    `hottest` is the curve of the hottest expert's load over the steps.
    """

    layer: int
    experts: tuple[float, ...]
    ranks: tuple[float, ...]
    hottest: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertView:
    """The load of the experts, means over a window of steps, with the routers' figures."""

    window: str
    dead: str
    layers: tuple[LayerLoads, ...]
    routers: Table


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunView(Record):
    """A run as its page shows it.

    A step's time is one figure on the whole page: `step_s`, the median over steady steps. `phases`
    and the waterfall are scaled or closed to it. `losses` and `steps` are curves over the step.
    """

    name: str
    job: JobView
    verdict: RunVerdict
    step_s: float
    predicted_step_s: float
    diagnosis: DiagnosisView
    losses: tuple[Point, ...]
    evals: tuple[EvalRecord, ...]
    steps: tuple[Point, ...]
    resumed: tuple[int, ...]
    experts: ExpertView | None
    phases: tuple[ComparedValue, ...]
    memory: tuple[ComparedValue, ...]
    is_counted: bool
    capacity_bytes: int
    facts: tuple[DocumentSection, ...]
    ledgers: tuple[DocumentSection, ...]
    sources: DocumentSection
    sessions: DocumentSection
    incidents: tuple[DocumentSection, ...] = ()

    def title(self) -> str:
        """Return the verdict's sentence."""
        return self.verdict.sentence

    def to_rows(self) -> list[Row]:
        """Return a row for each phase of the step."""
        return [
            {"phase": item.name, "predicted_s": item.predicted, "measured_s": item.observed}
            for item in self.phases
        ]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunsView(Record):
    """Several runs over each other: their curves and figures, without the rest of their pages."""

    runs: tuple[RunView, ...]

    def title(self) -> str:
        """Return the names."""
        return ", ".join(run.name for run in self.runs)

    def to_rows(self) -> list[Row]:
        """Return a row for each run."""
        return [{"run": run.name, "step_s": run.step_s} for run in self.runs]


def build_run_view(
    record: RunRecord,
    comparisons: Sequence[LedgerComparison],
    findings: Sequence[Finding],
    waterfall: Waterfall | None,
    *,
    advice: Advice | None = None,
    name: str = "",
) -> RunView:
    """Build the record of a run's page."""
    plan = record.plan
    step_s = median_step_s(record)
    closed = close_at(waterfall, step_s) if waterfall is not None and step_s else None
    return RunView(
        name=name or plan.model.name or "run",
        job=build_job_view(plan),
        verdict=build_verdict(record, comparisons),
        step_s=step_s,
        predicted_step_s=plan.estimate.step_s,
        diagnosis=build_diagnosis_view(findings, closed, advice=advice),
        losses=thin_points(
            [(step.step, step.loss if is_number(step.loss) else nan) for step in record.steps]
        ),
        evals=record.evals,
        steps=thin_points([(step.step, step.step_s) for step in record.steps]),
        resumed=tuple(item.first_step for item in record.sessions if item.first_step > 1),
        experts=_build_experts(record),
        phases=_compare_phases(record, step_s),
        memory=_compare_memory(plan, comparisons),
        is_counted=bool(comparisons),
        capacity_bytes=plan.estimate.capacity_bytes,
        facts=(*build_plan_facts(plan), *_list_device_facts(record)),
        ledgers=tuple(map(build_rank_section, comparisons)),
        sources=build_source_section(plan),
        sessions=build_session_section(record.sessions),
        incidents=tuple(list_incidents(record.incidents)),
    )


def _list_device_facts(record: RunRecord) -> Iterator[DocumentSection]:
    """Yield the list of how busy and how full each rank's device was; none where nothing tells."""
    rows = tuple(
        (
            f"rank {use.rank}",
            f"{use.sample.resident_share:.0%} busy, {format_bytes(use.sample.used_bytes)}",
        )
        for use in list_device_use(record)
    )
    if rows:
        yield DocumentSection(title="Devices, median over steps", facts=rows)


def _compare_phases(record: RunRecord, step_s: float) -> tuple[ComparedValue, ...]:
    """Return the predicted and measured seconds of each phase; the measured sum to `step_s`.

    Each phase gets its share of the steady steps, as medians of phases do not sum to a median.
    """
    steps = steady_steps(record)
    total_s = sum(row.seconds for step in steps for row in step.phases)
    measured: dict[StepPhase, float] = {}
    for phase in StepPhase:
        seconds = sum(row.seconds for step in steps for row in step.phases if row.phase is phase)
        if seconds:
            measured[phase] = seconds / total_s * step_s
    estimate = record.plan.estimate
    predicted = {
        row.phase: row.seconds
        for ledger in estimate.ledgers
        if ledger.pp_rank == estimate.peak_rank
        for row in ledger.time
    }
    return tuple(
        ComparedValue(
            name=phase.value,
            predicted=predicted.get(phase, 0.0),
            observed=measured.get(phase, 0.0),
        )
        for phase in StepPhase
        if phase in predicted or phase in measured
    )


def _compare_memory(
    plan: Plan, comparisons: Sequence[LedgerComparison]
) -> tuple[ComparedValue, ...]:
    """Return bytes by component: of the rank that counted most, or of the plan's fullest rank."""
    predicted: dict[str, float] = {}
    counted: dict[str, float] = {}
    if comparisons:
        fullest = max(
            (comparison.lines_in(Section.MEMORY) for comparison in comparisons),
            key=lambda lines: sum(line.counted for line in lines),
        )
        for line in fullest:
            if line.key[-1] != TOTAL:
                _add(predicted, line.key[0], line.predicted)
                _add(counted, line.key[0], line.counted)
    else:
        for ledger in plan.estimate.ledgers:
            if ledger.pp_rank == plan.estimate.peak_rank:
                for row in ledger.memory:
                    _add(predicted, row.component.value, row.bytes)
    return tuple(
        ComparedValue(
            name=component.value,
            predicted=predicted.get(component.value, 0.0),
            observed=counted.get(component.value, 0.0),
        )
        for component in Component
        if predicted.get(component.value) or counted.get(component.value)
    )


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value


def _build_experts(record: RunRecord) -> ExpertView | None:
    """Return the load of the experts; None for a run without MoE layers or records of them."""
    window = list_load_window(record)
    if not window:
        return None
    last = window[-1]
    hottest: dict[int, list[Point]] = {}
    for step in record.steps:
        for load in step.loads:
            hottest.setdefault(load.layer, []).append((step.step, load.max_over_mean))
    limit = max(60, _LOAD_POINTS // len(last.loads))
    text = f"step {last.step}"
    if window[0].step < last.step:
        text = f"mean over steps {window[0].step} to {last.step}"
    dead = sum(load.dead_experts for load in last.loads)
    experts = sum(len(load.counts) for load in last.loads)
    layers = []
    for load in last.loads:
        loads = [item for step in window for item in step.loads if item.layer == load.layer]
        layers.append(
            LayerLoads(
                layer=load.layer,
                experts=_over_mean([item.counts for item in loads]),
                ranks=_over_mean([item.rank_counts for item in loads]),
                hottest=thin_points(hottest[load.layer], limit),
            )
        )
    return ExpertView(
        window=text,
        dead=f"{dead} of {experts} experts got no token in step {last.step}",
        layers=tuple(layers),
        routers=build_router_table(window),
    )


def _over_mean(counts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return the mean of each column over the mean of all; () without columns."""
    means = [fmean(column) for column in zip(*counts, strict=True)]
    overall = fmean(means or [0.0]) or 1.0
    return tuple(mean / overall for mean in means)


def thin_points(points: Sequence[Point], limit: int = MAX_CURVE_POINTS) -> tuple[Point, ...]:
    """Return at most `limit` points of a curve.

    Of each run of neighbours the lowest and the highest are kept, so that spikes stay visible.
    """
    if len(points) <= limit:
        return tuple(points)
    bins = limit // 2
    edges = [len(points) * number // bins for number in range(bins + 1)]
    kept: list[Point] = []
    for start, stop in pairwise(edges):
        run = points[start:stop]
        extremes = {min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])}
        kept.extend(sorted(extremes))
    return tuple(kept)
