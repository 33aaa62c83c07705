"""`moewright bench sweep`: a table of layouts, run or estimated, beside what was published."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.spec.hardware import Hardware
    from moewright.spec.model import ModelSpec
    from moewright.spec.workload import Workload
    from moewright.tuning.sweep import SweepRowSpec, SweepSpec, SweepTrial


def bench_sweep(
    sweep: Path,
    /,
    *,
    predict: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
) -> int:
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
    from moewright.report.sweep_table import (
        render_csv,
        render_markdown,
        render_memory_markdown,
        render_memory_svg,
        render_svg,
    )
    from moewright.tuning.sweep import build_row, read_sweep, read_trials, row_workload

    spec = read_sweep(sweep)
    folder = out or Path("runs") / sweep.stem
    model, workload, hardware = _job(spec, sweep)
    if not predict:
        if not spec.job.file:
            rule = "is needed to run a sweep; a model on other machines can be estimated"
            raise BadInput(Reason(field=f"{sweep.name}: job.file", rule=rule, nearest="--predict"))
        for row in (row for table in spec.table for row in table.row):
            _try(row, model, row_workload(row, workload), hardware, folder)
    trials = read_trials(folder)
    tables = {
        table.title: [
            build_row(row, model, row_workload(row, workload), hardware, trials)
            for row in table.row
        ]
        for table in spec.table
    }
    notes = {table.title: table.note for table in spec.table}
    text = [f"# {spec.title}", "", *([f"Measured: {spec.source}.", ""] if spec.source else [])]
    text += [render_markdown(title, rows, notes[title]) for title, rows in tables.items()]
    held = {
        layout: estimate(model, workload, hardware, parse_layout(layout, world_size=hardware.count))
        for layout in spec.memory
    }
    text += [render_memory_markdown(layout, found) for layout, found in held.items()]
    whole = "\n".join(text)
    console = make_console(sys.stdout)
    console.print(whole, soft_wrap=True)
    files = {"table.md": whole, "table.csv": render_csv(tables), "table.svg": render_svg(tables)}
    if held:
        files["memory.svg"] = render_memory_svg(held)
    for name, content in files.items():
        write_text(folder / name, content)
    console.print(f"wrote {folder}/{', '.join(files)}", soft_wrap=True)
    return 0


def _job(spec: SweepSpec, path: Path) -> tuple[ModelSpec, Workload, Hardware]:
    from moewright.cli.plan_request import read_plan_request
    from moewright.intake import catalogue
    from moewright.intake.job import read_job

    if spec.job.file:
        job = read_job(path.parent / spec.job.file)
        return job.model, job.workload, catalogue.hardware(f"{job.nproc}x{job.hardware}")
    asked = read_plan_request(
        spec.job.model,
        on=spec.job.on,
        seq_len=spec.job.seq_len,
        global_batch=spec.job.global_batch,
        precision=None,
    )
    return asked.model, asked.workload, asked.hardware


def _try(
    row: SweepRowSpec, model: ModelSpec, workload: Workload, hardware: Hardware, folder: Path
) -> None:
    """Run one row, unless it has been; what cannot run here is a trial that failed, with its
    reason."""
    from moewright.tuning.sweep import SweepTrial, read_trials, trial_key, write_trial

    layout, batch = trial_key(row, workload)
    if any((trial.layout, trial.global_batch) == (layout, batch) for trial in read_trials(folder)):
        return
    print(f"running {row.name}", flush=True)
    try:
        trial = _run(row, model, workload, hardware, folder)
    except BadInput as error:
        trial = SweepTrial(layout=layout, global_batch=batch, failed=str(error))
    write_trial(folder, trial)


def _run(
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
    place = folder / "trials" / fingerprint(plan.layout, plan.workload)
    code = int(train(plan, place))
    if code:
        return SweepTrial(
            layout=layout, global_batch=batch, failed=f"the run ended with code {code}"
        )
    steps = steady_steps(read_run(place))
    time_s = median(step.step_s for step in steps)
    return SweepTrial(
        layout=layout,
        global_batch=batch,
        time_s=time_s,
        tokens=median(step.tokens_per_s_per_rank for step in steps),
        tflops=median(step.tflops_per_rank for step in steps),
    )
