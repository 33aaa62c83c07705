"""`moewright bench sweep`: a table of layouts, run or estimated, beside what was published."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import Flag
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.spec.hardware import Hardware
    from moewright.spec.model import ModelSpec
    from moewright.spec.plan import Estimate
    from moewright.spec.workload import Workload
    from moewright.tuning.sweep import SweepRow, SweepRowSpec, SweepSpec, SweepTrial


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """The job that the rows of a sweep share."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware


def bench_sweep(sweep: Path, /, *, predict: Flag = False, out: Path | None = None) -> int:
    """Run the layouts of a sweep one after the other, or only estimate them, and print the table.

    A trial that is finished is not run again: the same command goes on where it was stopped. Beside
    the table in Markdown the folder gets it as CSV and as a drawing.

    Parameters
    ----------
    sweep
        A sweep file, with sections job and table; recipes/seed0_best.toml is one.
    predict
        Estimate only: nothing is run.
    out
        The folder of the sweep; runs/<name of the sweep file> when not given.
    """
    from moewright.codec import parse_layout, write_text
    from moewright.cost.estimate import estimate
    from moewright.report.console import make_console
    from moewright.tuning.sweep import build_row, read_sweep, read_trials, row_workload

    spec = read_sweep(sweep)
    folder = out or Path("runs") / sweep.stem
    job = _read_job(spec, sweep)
    if not predict:
        if not spec.job.file:
            rule = "is needed to run a sweep; a model on other machines can be estimated"
            raise BadInput(Reason(field=f"{sweep.name}: job.file", rule=rule, nearest="--predict"))
        for table in spec.table:
            for row in table.row:
                _run_row(row, job, folder)
    trials = read_trials(folder)
    tables = {
        table.title: [
            build_row(row, job.model, row_workload(row, job.workload), job.hardware, trials)
            for row in table.row
        ]
        for table in spec.table
    }
    memory = {
        text: estimate(
            job.model,
            job.workload,
            job.hardware,
            parse_layout(text, world_size=job.hardware.count),
        )
        for text in spec.memory
    }
    files = _render_files(spec, tables, memory)
    console = make_console(sys.stdout)
    console.print(files["table.md"], soft_wrap=True)
    for name, content in files.items():
        write_text(folder / name, content)
    console.print(f"wrote {folder}/{', '.join(files)}", soft_wrap=True)
    return 0


def _read_job(spec: SweepSpec, path: Path) -> SweepJob:
    from moewright.api.requests import WorkloadOptions, read_plan_request
    from moewright.intake import catalogue
    from moewright.intake.job import read_job

    if spec.job.file:
        job = read_job(path.parent / spec.job.file)
        hardware = catalogue.hardware(f"{job.nproc}x{job.hardware}")
        return SweepJob(model=job.model, workload=job.workload, hardware=hardware)
    options = WorkloadOptions(seq_len=spec.job.seq_len, global_batch=spec.job.global_batch)
    request = read_plan_request(spec.job.model, spec.job.on, options)
    return SweepJob(model=request.model, workload=request.workload, hardware=request.hardware)


def _render_files(
    spec: SweepSpec,
    tables: Mapping[str, Sequence[SweepRow]],
    memory: Mapping[str, Estimate],
) -> Mapping[str, str]:
    """Return the files of a sweep by name; `memory` holds the layouts whose memory is drawn."""
    from moewright.report.sweep_table import (
        render_csv,
        render_markdown,
        render_memory_markdown,
        render_memory_svg,
        render_svg,
    )

    text = [f"# {spec.title}", ""]
    if spec.source:
        text += [f"Measured: {spec.source}.", ""]
    notes = {table.title: table.note for table in spec.table}
    text += [render_markdown(title, rows, notes[title]) for title, rows in tables.items()]
    text += [render_memory_markdown(layout, estimate) for layout, estimate in memory.items()]
    files = {
        "table.md": "\n".join(text),
        "table.csv": render_csv(tables),
        "table.svg": render_svg(tables),
    }
    if memory:
        files["memory.svg"] = render_memory_svg(memory)
    return files


def _run_row(row: SweepRowSpec, job: SweepJob, folder: Path) -> None:
    """Run one row, unless it has been run; one that cannot run here is a failed trial."""
    from moewright.tuning.sweep import (
        SweepTrial,
        read_trials,
        row_workload,
        trial_key,
        write_trial,
    )

    workload = row_workload(row, job.workload)
    layout, batch = trial_key(row, workload)
    finished = {(trial.layout, trial.global_batch) for trial in read_trials(folder)}
    if (layout, batch) in finished:
        return
    print(f"running {row.name}", flush=True)
    try:
        trial = _run_trial(row, job.model, workload, job.hardware, folder)
    except BadInput as error:
        trial = SweepTrial(layout=layout, global_batch=batch, failed=str(error))
    write_trial(folder, trial)


def _run_trial(
    row: SweepRowSpec, model: ModelSpec, workload: Workload, hardware: Hardware, folder: Path
) -> SweepTrial:
    from statistics import median

    from moewright.codec import fingerprint, read_run
    from moewright.engine.run.train import train
    from moewright.rules.steady_steps import steady_steps
    from moewright.search.search import build_plan
    from moewright.tuning.sweep import SweepTrial, row_layout, trial_key

    layout, batch = trial_key(row, workload)
    plan = build_plan(model, workload, hardware, row_layout(row, hardware))
    run_dir = folder / "trials" / fingerprint(plan.layout, plan.workload)
    code = int(train(plan, run_dir))
    if code:
        failed = f"the run ended with code {code}"
        return SweepTrial(layout=layout, global_batch=batch, failed=failed)
    steps = steady_steps(read_run(run_dir))
    return SweepTrial(
        layout=layout,
        global_batch=batch,
        time_s=median(step.step_s for step in steps),
        tokens=median(step.tokens_per_s_per_rank for step in steps),
        tflops=median(step.tflops_per_rank for step in steps),
    )
