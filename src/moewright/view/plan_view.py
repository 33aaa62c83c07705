"""A plan as pages show it: figures, memory of every stage, parts of the step, the timetable."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field, fields

import numpy as np

from moewright.cost.pipeline_rows import simulate_plan
from moewright.diagnosis.judgement import Judgement, add_judgement, judge_plan
from moewright.diagnosis.published import PublishedRun, find_nearest_runs
from moewright.report.plan_text import describe_evidence
from moewright.rules.timetable.stages import pipeline_chunks, virtual_stage
from moewright.spec.errors import Reason
from moewright.spec.ledger import Component, Ledger
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan, TimePart
from moewright.spec.quoting import Html
from moewright.spec.record import Record, Row, render_html_table, spread
from moewright.spec.units import format_bytes, format_seconds
from moewright.view.layout_controls import LayoutControl, list_controls
from moewright.view.layout_view import SHOWN_NAMES, LayoutView, build_layout_view, render_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedValue:
    """A value with the name of what it belongs to, such as the bytes of a component."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFigures:
    """The figures of a layout in a list of several; those that nobody estimated are empty."""

    step_s: float = 0.0
    peak_bytes: int = 0
    fit_probability: float = 0.0
    verdict: str = ""
    margin_bytes: int = 0
    tokens_per_s_per_device: float = 0.0
    tflops_per_device: float = 0.0
    mfu: float = 0.0
    grade: str = ""


def list_figures(estimate: Estimate) -> ListedFigures:
    """Return the figures of an estimate in a list of several."""
    shared = {
        item.name: getattr(estimate, item.name)
        for item in fields(ListedFigures)
        if item.name not in ("verdict", "grade")
    }
    return ListedFigures(
        **shared, verdict=estimate.verdict.value, grade=estimate.evidence.grade.value
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The device bytes of a pipeline rank by component, in the order of Component."""

    pp_rank: int
    holds: str  # layers, and what else the rank holds
    components: tuple[NamedValue, ...]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """The exposed and hidden seconds of a part of the step."""

    part: str
    seconds: float
    hidden_s: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobView(Record):
    """What a page says of the job: model, hardware, batch, and the layout."""

    model: str
    device: str
    devices: int
    seq_len: int
    global_batch: int
    precision: str
    shown: LayoutView = field(metadata=spread(*SHOWN_NAMES))

    def title(self) -> str:
        """Return the job in one line."""
        return (
            f"{self.model} on {self.devices:,} x {self.device}: {self.shown.layout}, sequence "
            f"{self.seq_len:,}, global batch {self.global_batch:,}, {self.precision}"
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanView(Record):
    """A plan as a page shows it; figures have the names and values of `estimate --json`.

    Of `estimate` the named figures are written, beside the other fields. `stages` has the memory of
    every pipeline rank, `parts` the step in the order of TimePart. `sources` counts the figures
    that went into it by kind of source. `nearest_runs` are the published measurements that are most
    like the job.
    """

    job: JobView
    headline: str
    sentence: str
    judgement: Judgement
    estimate: Estimate = field(
        metadata=spread(
            "verdict",
            "step_s",
            "step_interval_80",
            "peak_bytes",
            "peak_rank",
            "peak_sd_bytes",
            "capacity_bytes",
            "margin_bytes",
            "fit_probability",
            "largest",
            "tokens_per_s_per_device",
            "tflops_per_device",
            "mfu",
            "hfu",
            "micro_batches",
            "bubble_fraction",
            "load_limit",
            "imbalance",
        )
    )
    stages: tuple[StageMemory, ...]
    parts: tuple[StepPart, ...]
    evidence: str
    grade: str
    sources: tuple[NamedValue, ...]
    nearest_runs: tuple[PublishedRun, ...]
    controls: tuple[LayoutControl, ...] = ()
    notes: tuple[str, ...] = ()

    def title(self) -> str:
        """Return the job, its figures in a sentence, and the judgement of the layout."""
        return add_judgement(f"{self.job.title()}\n{self.sentence}", self.judgement)

    def to_rows(self) -> list[Row]:
        """Return a row for each part of the step."""
        return [
            {"part": item.part, "seconds": item.seconds, "hidden_s": item.hidden_s}
            for item in self.parts
        ]

    def _repr_html_(self) -> Html:
        table = render_html_table(self.title(), self.to_rows())
        return Html.concat((render_layout(self.job.shown), table))


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A Reason as a page shows it; `key` is of the layout or the workload, such as "tp"."""

    field: str
    value: str
    rule: str
    nearest: str
    text: str
    key: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RefusalView(Record):
    """Why there is nothing to show: the rules that the query breaks, with its controls."""

    reasons: tuple[BrokenRule, ...]
    controls: tuple[LayoutControl, ...] = ()

    def title(self) -> str:
        """Return the first reason."""
        return self.reasons[0].text

    def to_rows(self) -> list[Row]:
        """Return a row for each broken rule."""
        return [
            {"field": reason.field, "value": reason.value, "rule": reason.rule}
            for reason in self.reasons
        ]


def build_refusal(
    reasons: tuple[Reason, ...], controls: tuple[LayoutControl, ...] = ()
) -> RefusalView:
    """Build the record of a query that breaks rules."""
    return RefusalView(
        reasons=tuple(
            BrokenRule(
                field=reason.field,
                value=reason.value,
                rule=reason.rule,
                nearest=reason.nearest,
                text=str(reason),
                key=reason.field.rpartition(".")[2].rpartition(" ")[2].lstrip("-"),
            )
            for reason in reasons
        ),
        controls=controls,
    )


def build_job_view(plan: Plan) -> JobView:
    """Return the job of a plan as pages name it."""
    return JobView(
        model=plan.model.name or "model",
        device=plan.hardware.device.name,
        devices=plan.layout.world_size,
        seq_len=plan.workload.seq_len,
        global_batch=plan.workload.global_batch,
        precision=plan.workload.precision.value,
        shown=build_layout_view(plan.layout, plan.hardware.fabric.devices_per_node),
    )


def build_plan_view(
    plan: Plan, notes: tuple[str, ...] = (), judgement: Judgement | None = None
) -> PlanView:
    """Build the record of a plan's page; without a judgement, of the plan by itself."""
    judgement = judge_plan(plan) if judgement is None else judgement
    estimate = plan.estimate
    holds = _describe_stages(plan.model, plan)
    kinds = [assumption.kind.value for assumption in estimate.assumptions]
    return PlanView(
        job=build_job_view(plan),
        headline=judgement.headline,
        sentence=describe_figures(plan),
        judgement=judgement,
        estimate=estimate,
        stages=tuple(
            build_stage_memory(ledger, holds[ledger.pp_rank]) for ledger in estimate.ledgers
        ),
        parts=tuple(
            StepPart(part=share.part.value, seconds=share.seconds, hidden_s=share.hidden_s)
            for share in sorted(estimate.shares, key=lambda share: list(TimePart).index(share.part))
        ),
        evidence=describe_evidence(estimate.evidence),
        grade=estimate.evidence.grade.value,
        sources=tuple(
            NamedValue(name=kind, value=kinds.count(kind)) for kind in dict.fromkeys(kinds)
        ),
        nearest_runs=find_nearest_runs(plan),
        controls=list_controls(plan.model, plan.workload, plan.layout),
        notes=notes,
    )


def sum_components(ledger: Ledger) -> dict[Component, int]:
    """Sum the device bytes of a pipeline rank by component."""
    sizes: dict[Component, int] = {}
    for row in ledger.device_rows:
        sizes[row.component] = sizes.get(row.component, 0) + row.bytes
    return sizes


def build_stage_memory(ledger: Ledger, holds: str = "") -> StageMemory:
    """Describe the device memory of a pipeline rank, which holds what `holds` says."""
    sizes = sum_components(ledger)
    return StageMemory(
        pp_rank=ledger.pp_rank,
        holds=holds,
        components=tuple(
            NamedValue(name=component.value, value=sizes[component])
            for component in Component
            if component in sizes
        ),
        peak_bytes=ledger.device_bytes,
    )


def _describe_stages(model: ModelSpec, plan: Plan) -> list[str]:
    """Say what each pipeline rank holds, such as "layers 0-2, embedding"."""
    texts: list[list[str]] = [[] for _ in range(plan.layout.pp)]
    for chunk in pipeline_chunks(model, plan.layout):
        text = texts[chunk.pp_rank]
        if chunk.has_embedding:
            text.append("embedding")
        if len(chunk.layers) == 1:
            text.append(f"layer {chunk.layers[0]}")
        elif len(chunk.layers):
            text.append(f"layers {chunk.layers[0]}-{chunk.layers[-1]}")
        if chunk.has_loss:
            text.append("head")
    return [", ".join(text) for text in texts]


def describe_figures(plan: Plan) -> str:
    """Say what a plan holds at its peak, and how fast it is."""
    estimate = plan.estimate
    peak = f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.capacity_bytes)}"
    return (
        f"{peak} on pipeline rank {estimate.peak_rank}, most of it {estimate.largest}; "
        f"a step takes {format_seconds(estimate.step_s)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TimetableView(Record):
    """The rows of every pipeline rank, in packed arrays of `ranks` x `rows`.

    `kinds` and `chunks` are bytes, `micro_batches` 32-bit integers and `starts` and `lengths`
    64-bit floats in seconds, little-endian, in base64. `kinds` are 0 F, 1 B, 2 W. `saved_bytes`
    [ranks][chunks] is what a forward keeps, `peaks` the predicted peak of each rank. `idle_s` is
    what the rank that works longest waits; transfers take `transfer_s` in the estimate, and no time
    in the rows.
    """

    job: JobView
    ranks: int
    rows: int
    micro_batch_count: int
    kinds: str
    micro_batches: str
    chunks: str
    starts: str
    lengths: str
    end_s: float
    step_s: float
    idle_s: float
    bubble_s: float
    transfer_s: float
    saved_bytes: tuple[tuple[float, ...], ...]
    peaks: tuple[int, ...]
    capacity_bytes: int

    def title(self) -> str:
        """Return the job."""
        return self.job.title()

    def to_rows(self) -> list[Row]:
        """Return a row for the whole timetable."""
        return [
            {"ranks": self.ranks, "rows": self.rows, "end_s": self.end_s, "idle_s": self.idle_s}
        ]


def build_timetable_view(plan: Plan) -> TimetableView:
    """Simulate the timetable of a plan and pack it."""
    simulated = simulate_plan(plan)
    layout = plan.layout
    seconds = {share.part.value: share.seconds for share in plan.estimate.shares}
    ranks, rows = simulated.start_s.shape
    return TimetableView(
        job=build_job_view(plan),
        ranks=ranks,
        rows=rows,
        micro_batch_count=plan.estimate.micro_batches,
        kinds=_pack(simulated.kind, "<u1"),
        micro_batches=_pack(simulated.micro_batch, "<u4"),
        chunks=_pack(simulated.chunk, "<u1"),
        starts=_pack(simulated.start_s, "<f8"),
        lengths=_pack(simulated.length_s, "<f8"),
        end_s=simulated.end_s,
        step_s=plan.estimate.step_s,
        idle_s=simulated.idle_s,
        bubble_s=seconds.get("bubble", 0.0),
        transfer_s=seconds.get("pp_comm", 0.0),
        saved_bytes=tuple(
            tuple(
                float(simulated.prices.saved_bytes[virtual_stage(layout, rank, chunk)])
                for chunk in range(layout.vpp)
            )
            for rank in range(ranks)
        ),
        peaks=tuple(ledger.device_bytes for ledger in plan.estimate.ledgers),
        capacity_bytes=plan.estimate.capacity_bytes,
    )


def _pack(values: np.ndarray, dtype: str) -> str:
    return b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
