"""Sweeps: a list of layouts of one job, estimated or run, next to published figures, as tables.

A sweep file holds [job] (model, on, seq_len, global_batch, routing; or `file`, a job to run) and
[[table]]s with [[table.row]]s: `name` as it stands in the table, `layout`, and `global_batch`,
`time_s`, `tokens`, `tflops` where the row has its own or was published; `routing` with
`load_factor` or `load_skew` where its experts are not loaded as the job's. Each trial that was run
is a line of trials.jsonl, and is not run again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.codec import (
    append_line,
    from_data,
    parse_json,
    parse_layout,
    read_complete_lines,
    read_toml_data,
    to_data,
)
from moewright.search.search import build_plan
from moewright.spec.errors import NO_TEXT, NOTHING, BadInput, Paragraph, Reason, Verbatim
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan
from moewright.spec.workload import Routing, Workload

TRIALS_FILE = "trials.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRowSpec:
    """A row as the file has it; zeros: nothing was published."""

    name: str
    layout: str
    global_batch: int = 0  # 0: the job's
    time_s: float = 0.0
    tokens: float = 0.0  # a second and device
    tflops: float = 0.0  # a device
    routing: Routing | None = None  # None: the job's, and its load with it
    load_factor: float = 0.0
    load_skew: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTableSpec:
    """A table of a sweep file."""

    title: str
    row: tuple[SweepRowSpec, ...]
    note: Paragraph = NO_TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJobSpec:
    """What all rows share.

    `file` is a job to run, in the folder of the sweep file; else the rest says what to estimate.
    """

    model: str = ""
    on: str = ""
    file: str = ""
    seq_len: int = 0
    global_batch: int = 0
    routing: Routing = Routing.LEARNED


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """The contents of a sweep file."""

    title: str
    job: SweepJobSpec
    table: tuple[SweepTableSpec, ...]
    source: str = ""
    memory: tuple[str, ...] = ()  # layouts whose memory is drawn by component and by module


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """The figures of one step; zeros: not known."""

    time_s: float
    tokens: float
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTrial:
    """A line of trials.jsonl: a row that was run here.

    `failed` says why there are no figures.
    """

    layout: str
    global_batch: int
    time_s: float = 0.0
    tokens: float = 0.0
    tflops: float = 0.0
    failed: Verbatim = NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrediction:
    """The plan of one layout of a sweep; None with a `refusal` where the layout is illegal."""

    plan: Plan | None
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """A row with its prediction and what was measured."""

    spec: SweepRowSpec
    seq_len: int
    global_batch: int
    devices: int
    predicted: Estimate | None
    refusal: str  # why there is no prediction
    measured: StepFigures | None  # published, or run here
    trial: SweepTrial | None


def read_sweep(path: Path) -> SweepSpec:
    """Read a sweep file.

    Raises:
        BadInput: the file is no sweep; the error names file and key.
    """
    spec = from_data(SweepSpec, read_toml_data(path), where=path.name)
    job = spec.job
    if not job.file and not (job.model and job.on and job.seq_len and job.global_batch):
        rule = "needs file, or model, on, seq_len and global_batch"
        nearest = 'model = "Qwen3-235B-A22B"'
        raise BadInput(Reason(field=f"{path.name}: job", rule=rule, nearest=nearest))
    faults = tuple(
        fault
        for table in spec.table
        for row in table.row
        for fault in _check_load(row, f'{path.name}: row "{row.name}"')
    )
    if faults:
        raise BadInput(*faults)
    return spec


def _check_load(row: SweepRowSpec, where: str) -> Iterator[Reason]:
    """Yield what is wrong with a row's statements of load."""
    one_routing = "is used with one routing alone"
    if row.load_factor and not row.load_factor >= 1:
        value = f"{row.load_factor:g}"
        yield Reason(field=f"{where}: load_factor", value=value, rule="is at least 1", nearest="1")
    if row.load_skew < 0:
        value = f"{row.load_skew:g}"
        yield Reason(field=f"{where}: load_skew", value=value, rule="is at least 0", nearest="0")
    if row.load_factor and row.routing is not Routing.LEARNED:
        nearest = 'routing = "learned"'
        yield Reason(field=f"{where}: load_factor", rule=one_routing, nearest=nearest)
    if row.load_skew > 0 and row.routing is not Routing.SKEWED:
        nearest = 'routing = "skewed"'
        yield Reason(field=f"{where}: load_skew", rule=one_routing, nearest=nearest)
    if row.routing is Routing.MEASURED:
        rule = "stands in a job, with its histogram"
        yield Reason(
            field=f"{where}: routing", value=row.routing, rule=rule, nearest=Routing.SKEWED
        )


def row_workload(spec: SweepRowSpec, workload: Workload) -> Workload:
    """Return the job's workload with the row's own batch and the load of its experts."""
    global_batch = spec.global_batch or workload.global_batch
    if spec.routing is None:
        return replace(workload, global_batch=global_batch)
    return replace(
        workload,
        global_batch=global_batch,
        routing=spec.routing,
        load_factor=spec.load_factor,
        load_skew=spec.load_skew,
    )


def read_trials(folder: Path) -> tuple[SweepTrial, ...]:
    """Read what has been run so far; a torn last line is left out, and run again."""
    path = folder / TRIALS_FILE
    return tuple(
        from_data(SweepTrial, parse_json(line, where=str(path)), where=str(path))
        for line in read_complete_lines(path)
    )


def write_trial(folder: Path, trial: SweepTrial) -> None:
    """Add a finished trial."""
    append_line(folder / TRIALS_FILE, json.dumps(to_data(trial)))


def predict_layout(
    model: ModelSpec, workload: Workload, hardware: Hardware, layout: str | Layout
) -> LayoutPrediction:
    """Estimate one layout of a sweep; an illegal one says why there is no plan."""
    try:
        if isinstance(layout, str):
            layout = parse_layout(layout, world_size=hardware.count)
        return LayoutPrediction(plan=build_plan(model, workload, hardware, layout))
    except BadInput as error:
        return LayoutPrediction(plan=None, refusal=str(error))


def build_row(
    spec: SweepRowSpec,
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    trials: tuple[SweepTrial, ...],
) -> SweepRow:
    """Build the row with its prediction and what was measured: here, else as published."""
    prediction = predict_layout(model, workload, hardware, spec.layout)
    key = trial_key(spec, workload)
    trial = next((trial for trial in trials if (trial.layout, trial.global_batch) == key), None)
    return SweepRow(
        spec=spec,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        devices=hardware.count,
        predicted=prediction.plan.estimate if prediction.plan else None,
        refusal=prediction.refusal,
        measured=_measured_figures(spec, trial),
        trial=trial,
    )


def _measured_figures(spec: SweepRowSpec, trial: SweepTrial | None) -> StepFigures | None:
    """Return the figures of a trial that has them, else the published ones; None without any."""
    if trial and trial.time_s:
        return StepFigures(time_s=trial.time_s, tokens=trial.tokens, tflops=trial.tflops)
    if spec.time_s or spec.tokens or spec.tflops:
        return StepFigures(time_s=spec.time_s, tokens=spec.tokens, tflops=spec.tflops)
    return None


def row_layout(spec: SweepRowSpec, hardware: Hardware) -> Layout:
    """Return the layout of a row."""
    return parse_layout(spec.layout, world_size=hardware.count)


def trial_key(spec: SweepRowSpec, workload: Workload) -> tuple[str, int]:
    """Return the key of a row's trial: its layout text and global batch."""
    return spec.layout, workload.global_batch


def step_figures(prediction: Estimate) -> StepFigures:
    """Return the predicted figures of a step."""
    return StepFigures(
        time_s=prediction.step_s,
        tokens=prediction.tokens_per_s_per_device,
        tflops=prediction.tflops_per_device,
    )


def peak_memory_by_part(prediction: Estimate) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield the bytes of the fullest pipeline rank by component, then by module."""
    rows = prediction.ledgers[prediction.peak_rank].device_rows
    for kind in ("component", "module"):
        bytes_of_part: dict[str, int] = defaultdict(int)
        for row in rows:
            bytes_of_part[str(getattr(row, kind))] += row.bytes
        yield kind, dict(sorted(bytes_of_part.items(), key=lambda pair: -pair[1]))
