"""Sweep files: their layouts estimated, or run one after the other, next to published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from moewright.api.machines import read_job_hardware
from moewright.api.requests import read_plan_request
from moewright.codec import fingerprint, parse_layout, read_run
from moewright.cost.estimate import estimate
from moewright.intake.job import read_job
from moewright.launching.launched_trials import LaunchedTrials, launch_trials
from moewright.launching.trial_results import plan_start
from moewright.report.document import Document, render_markdown
from moewright.report.sweep_table import (
    build_sweep_document,
    render_csv,
    render_memory_svg,
    render_svg,
)
from moewright.rules.steady_steps import steady_steps
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput, Reason, Verbatim
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.options import HERE, Tell, TrialPlace, WorkloadOptions
from moewright.spec.plan import Estimate, Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import TERA
from moewright.spec.workload import Workload
from moewright.tuning.sweep import (
    SweepRow,
    SweepRowSpec,
    SweepSpec,
    SweepTrial,
    build_row,
    predict_layout,
    read_sweep,
    read_trials,
    row_layout,
    row_workload,
    step_figures,
    trial_key,
    write_trial,
)
from moewright.tuning.trials import TrialFailure, TrialLength, TrialOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """The job that the rows of a sweep share."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SweepTables(Record):
    """The tables of a sweep file: each row with its prediction and what was measured.

    `memory` holds the estimates of the layouts whose memory is drawn.
    """

    spec: SweepSpec
    tables: Mapping[str, tuple[SweepRow, ...]]  # by title
    memory: Mapping[str, Estimate]

    def title(self) -> str:
        """Return the title of the sweep."""
        return self.spec.title

    def to_rows(self) -> list[Row]:
        """Return a row for each layout, with the predicted and the measured step."""
        return [_summarize_row(title, row) for title, rows in self.tables.items() for row in rows]

    def to_document(self) -> Document:
        """Return every table with its note, and the memory of the layouts that are drawn."""
        return build_sweep_document(
            self.spec.title,
            self.tables,
            self.memory,
            source=self.spec.source,
            notes={table.title: table.note for table in self.spec.table},
        )

    def render_files(self) -> Mapping[str, str]:
        """Return the files of the sweep by name: tables in Markdown and CSV, drawings in SVG."""
        files: dict[str, str] = {
            "table.md": render_markdown(self.to_document()),
            "table.csv": render_csv(self.tables),
            "table.svg": render_svg(self.tables),
        }
        if self.memory:
            files["memory.svg"] = render_memory_svg(self.memory)
        return files


def _summarize_row(title: str, row: SweepRow) -> Row:
    summary: dict[str, object] = {
        "table": title,
        "name": row.spec.name,
        "layout": row.spec.layout,
        "global_batch": row.global_batch,
        "refusal": row.refusal,
    }
    if row.predicted is not None:
        summary["predicted_step_s"] = step_figures(row.predicted).time_s
    if row.measured is not None:
        summary["measured_step_s"] = row.measured.time_s
    return summary


def read_sweep_tables(
    path: Path, folder: Path, *, predict: bool, tell: Tell, place: TrialPlace = HERE
) -> SweepTables:
    """Estimate the layouts of a sweep file; unless `predict` is set, also run them in a folder.

    A trial that is finished is not run again. `place` says where trials run, and what runs in them.

    Raises:
        BadInput: the file is no sweep, or names no job that could run.
    """
    spec = read_sweep(path)
    job = _read_sweep_job(spec, path)
    if not predict:
        start = plan_start(place)
        if not spec.job.file and not start.trainer_script:
            rule = "is needed to run a sweep; a model on other machines can be estimated"
            raise BadInput(Reason(field=f"{path.name}: job.file", rule=rule, nearest="--predict"))
        rows = [row for table in spec.table for row in table.row]
        if place.is_in_process:
            for row in rows:
                _run_row(row, job, folder, tell, _run_trial)
        else:
            with launch_trials(folder, place, tell) as launched:
                _run_launched(rows, job, folder, tell, launched)
    trials = read_trials(folder)
    tables = {}
    for table in spec.table:
        tables[table.title] = tuple(
            build_row(row, job.model, row_workload(row, job.workload), job.hardware, trials)
            for row in table.row
        )
    memory = {}
    for text in spec.memory:
        layout = parse_layout(text, world_size=job.hardware.count)
        memory[text] = estimate(job.model, job.workload, job.hardware, layout)
    return SweepTables(spec=spec, tables=tables, memory=memory)


def _read_sweep_job(spec: SweepSpec, path: Path) -> SweepJob:
    if spec.job.file:
        job = read_job(path.parent / spec.job.file)
        return SweepJob(model=job.model, workload=job.workload, hardware=read_job_hardware(job))
    options = WorkloadOptions(seq_len=spec.job.seq_len, global_batch=spec.job.global_batch)
    request = read_plan_request(spec.job.model, spec.job.on, options)
    workload = replace(request.workload, routing=spec.job.routing)
    return SweepJob(model=request.model, workload=workload, hardware=request.hardware)


_RunSweepTrial = Callable[[SweepRowSpec, SweepJob, Workload, Path], SweepTrial]


def _is_finished(row: SweepRowSpec, workload: Workload, folder: Path) -> bool:
    key = trial_key(row, workload)
    return any((trial.layout, trial.global_batch) == key for trial in read_trials(folder))


def _run_row(
    row: SweepRowSpec, job: SweepJob, folder: Path, tell: Tell, run: _RunSweepTrial
) -> None:
    """Run one row, unless it has been run; one that cannot run here is a failed trial."""
    workload = row_workload(row, job.workload)
    layout, batch = trial_key(row, workload)
    if _is_finished(row, workload, folder):
        return
    tell(f"running {row.name}")
    try:
        trial = run(row, job, workload, folder)
    except BadInput as error:
        trial = SweepTrial(layout=layout, global_batch=batch, failed=Verbatim(str(error)))
    write_trial(folder, trial)


def _run_launched(
    rows: Sequence[SweepRowSpec],
    job: SweepJob,
    folder: Path,
    tell: Tell,
    launched: LaunchedTrials,
) -> None:
    """Run rows as jobs, those that follow beside the one that is waited for."""

    def run(row: SweepRowSpec, job: SweepJob, workload: Workload, folder: Path) -> SweepTrial:
        plan = build_plan(job.model, workload, job.hardware, row_layout(row, job.hardware))
        name = fingerprint(plan.layout, plan.workload)
        return _to_sweep_trial(row, plan, launched.run(plan, name, TrialLength.SCREEN))

    for index, row in enumerate(rows):
        ahead = []
        for later in rows[index:]:
            workload = row_workload(later, job.workload)
            prediction = predict_layout(job.model, workload, job.hardware, later.layout)
            if prediction.plan is not None and not _is_finished(later, workload, folder):
                name = fingerprint(prediction.plan.layout, prediction.plan.workload)
                ahead.append((prediction.plan, name))
        launched.submit_ahead(ahead)
        _run_row(row, job, folder, tell, run)


def _to_sweep_trial(row: SweepRowSpec, plan: Plan, outcome: TrialOutcome) -> SweepTrial:
    layout, batch = trial_key(row, plan.workload)
    if outcome.failure is not TrialFailure.NONE:
        failed = f"{outcome.failure}: {outcome.said}"
        return SweepTrial(layout=layout, global_batch=batch, failed=Verbatim(failed))
    devices = plan.layout.world_size
    return SweepTrial(
        layout=layout,
        global_batch=batch,
        time_s=outcome.step_s,
        tokens=plan.workload.tokens_per_step / devices / outcome.step_s,
        tflops=plan.estimate.model_flops_per_step / devices / outcome.step_s / TERA,
    )


def _run_trial(row: SweepRowSpec, job: SweepJob, workload: Workload, folder: Path) -> SweepTrial:
    # Only what trains loads torch.
    from moewright.engine.run.train import train

    layout, batch = trial_key(row, workload)
    plan = build_plan(job.model, workload, job.hardware, row_layout(row, job.hardware))
    run_dir = folder / "trials" / fingerprint(plan.layout, plan.workload)
    code = int(train(plan, run_dir))
    if code:
        failed = f"the run ended with code {code}"
        return SweepTrial(layout=layout, global_batch=batch, failed=Verbatim(failed))
    steps = steady_steps(read_run(run_dir))
    return SweepTrial(
        layout=layout,
        global_batch=batch,
        time_s=median(step.step_s for step in steps),
        tokens=median(step.tokens_per_s_per_rank for step in steps),
        tflops=median(step.tflops_per_rank for step in steps),
    )
