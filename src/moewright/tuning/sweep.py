"""Sweeps: a list of layouts of one job, estimated or run, beside published figures, as one table.

A sweep file holds [job] (model, on, seq_len, global_batch, precision; or `file`, a job to run) and
[[table]]s with [[table.row]]s: `name` as it stands in the table, `layout`, and `global_batch`,
`time_s`, `tokens`, `tflops` where the row has its own or was published; `routing` with
`load_factor` or `load_skew` where its experts are not loaded as the job's. Each trial that was run
is a line of trials.jsonl, and is not run again.
"""

from __future__ import annotations

import json
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
from moewright.cost.estimate import estimate
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate
from moewright.spec.workload import Routing, Workload

TRIALS_FILE = "trials.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRowSpec:
    """One row as the file has it; zeros: nothing was published."""

    name: str
    layout: str
    global_batch: int = 0  # 0: the job's
    time_s: float = 0.0
    tokens: float = 0.0  # a second and device
    tflops: float = 0.0  # a device
    routing: Routing | None = None  # None: the job's, and its load with it
    load_factor: float = 1.0
    load_skew: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTableSpec:
    title: str
    row: tuple[SweepRowSpec, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJobSpec:
    """What all rows share. `file` is a job to run, beside the sweep file; else the rest says what
    to estimate."""

    model: str = ""
    on: str = ""
    file: str = ""
    seq_len: int = 0
    global_batch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    title: str
    job: SweepJobSpec
    table: tuple[SweepTableSpec, ...]
    source: str = ""
    memory: tuple[str, ...] = ()  # layouts whose memory is drawn by component and by module


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Of one step; zeros: not known."""

    time_s: float
    tokens: float
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTrial:
    """A line of trials.jsonl: a row that was run here. `failed` says why there are no figures."""

    layout: str
    global_batch: int
    time_s: float = 0.0
    tokens: float = 0.0
    tflops: float = 0.0
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    spec: SweepRowSpec
    seq_len: int
    global_batch: int
    devices: int
    predicted: Estimate | None
    refusal: str  # why there is no prediction
    measured: StepFigures | None  # published, or run here
    trial: SweepTrial | None


def read_sweep(path: Path) -> SweepSpec:
    """Raises BadInput that names file and key."""
    spec = from_data(SweepSpec, read_toml_data(path), where=path.name)
    if not spec.job.file and not (
        spec.job.model and spec.job.on and spec.job.seq_len and spec.job.global_batch
    ):
        rule = "needs file, or model, on, seq_len and global_batch"
        raise BadInput(
            Reason(field=f"{path.name}: job", rule=rule, nearest='model = "Qwen3-235B-A22B"')
        )
    faults = tuple(_wrong_loads(spec, path.name))
    if faults:
        raise BadInput(*faults)
    return spec


def _wrong_loads(spec: SweepSpec, where: str) -> Iterator[Reason]:
    for row in (row for table in spec.table for row in table.row):
        field = f'{where}: row "{row.name}"'
        if row.load_factor < 1:
            yield Reason(
                field=f"{field}: load_factor",
                value=f"{row.load_factor:g}",
                rule="is at least 1",
                nearest="1",
            )
        if row.load_skew < 0:
            yield Reason(
                field=f"{field}: load_skew",
                value=f"{row.load_skew:g}",
                rule="is at least 0",
                nearest="0",
            )
        if row.load_factor > 1 and row.routing is not Routing.LEARNED:
            yield Reason(
                field=f"{field}: load_factor",
                rule="is used with one routing alone",
                nearest='routing = "learned"',
            )
        if row.load_skew > 0 and row.routing is not Routing.SKEWED:
            yield Reason(
                field=f"{field}: load_skew",
                rule="is used with one routing alone",
                nearest='routing = "skewed"',
            )
        if row.routing is Routing.MEASURED:
            rule = "stands in a job, with its histogram"
            yield Reason(
                field=f"{field}: routing", value=row.routing, rule=rule, nearest=Routing.SKEWED
            )


def row_workload(spec: SweepRowSpec, workload: Workload) -> Workload:
    """The job's workload with the row's own batch, and the load that the row says its experts
    had."""
    batch = spec.global_batch or workload.global_batch
    if spec.routing is None:
        return replace(workload, global_batch=batch)
    return replace(
        workload,
        global_batch=batch,
        routing=spec.routing,
        load_factor=spec.load_factor,
        load_skew=spec.load_skew,
    )


def read_trials(folder: Path) -> tuple[SweepTrial, ...]:
    """What has been run so far; a torn last line is left out, and run again."""
    path = folder / TRIALS_FILE
    lines = read_complete_lines(path)
    return tuple(
        from_data(SweepTrial, parse_json(line, where=str(path)), where=str(path)) for line in lines
    )


def write_trial(folder: Path, trial: SweepTrial) -> None:
    """Add a finished trial."""
    append_line(folder / TRIALS_FILE, json.dumps(to_data(trial)))


def build_row(
    spec: SweepRowSpec,
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    trials: tuple[SweepTrial, ...],
) -> SweepRow:
    """The row with its prediction and what was measured: here, else as published."""
    predicted, refused = None, ""
    try:
        predicted = estimate(model, workload, hardware, row_layout(spec, hardware))
    except BadInput as error:
        refused = str(error)
    trial = next(
        (each for each in trials if (each.layout, each.global_batch) == trial_key(spec, workload)),
        None,
    )
    published = StepFigures(time_s=spec.time_s, tokens=spec.tokens, tflops=spec.tflops)
    ran = (
        StepFigures(time_s=trial.time_s, tokens=trial.tokens, tflops=trial.tflops)
        if trial
        else None
    )
    measured = (
        ran
        if ran and ran.time_s
        else published
        if spec.time_s or spec.tokens or spec.tflops
        else None
    )
    return SweepRow(
        spec=spec,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        devices=hardware.count,
        predicted=predicted,
        refusal=refused,
        measured=measured,
        trial=trial,
    )


def row_layout(spec: SweepRowSpec, hardware: Hardware) -> Layout:
    return parse_layout(spec.layout, world_size=hardware.count)


def trial_key(spec: SweepRowSpec, workload: Workload) -> tuple[str, int]:
    """What tells one trial of a sweep from another."""
    return spec.layout, workload.global_batch


def step_figures(found: Estimate) -> StepFigures:
    return StepFigures(
        time_s=found.step_s, tokens=found.tokens_per_s_per_device, tflops=found.tflops_per_device
    )


def peak_memory_by_part(found: Estimate) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Bytes of the fullest pipeline rank by component, then by module."""
    rows = found.ledgers[found.peak_rank].device_rows
    for name in ("component", "module"):
        held: dict[str, int] = {}
        for row in rows:
            key = str(getattr(row, name))
            held[key] = held.get(key, 0) + row.bytes
        yield name, dict(sorted(held.items(), key=lambda pair: -pair[1]))
