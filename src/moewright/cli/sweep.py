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
    from moewright.tuning.sweep import RowSpec, SweepSpec, Trial


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
    from moewright.report.console import console_for
    from moewright.report.sweep_table import csv_of, drawing, markdown, memory_drawing, memory_text
    from moewright.tuning.sweep import read_sweep, read_trials, row_of, workload_of

    spec = read_sweep(sweep)
    folder = out or Path("runs") / sweep.stem
    model, workload, hardware = _job(spec, sweep)
    if not predict:
        if not spec.job.file:
            rule = "is needed to run a sweep; a model on other machines can be estimated"
            raise BadInput(Reason(field=f"{sweep.name}: job.file", rule=rule, nearest="--predict"))
        for row in (row for table in spec.table for row in table.row):
            _try(row, model, workload_of(row, workload), hardware, folder)
    trials = read_trials(folder)
    tables = {
        table.title: [
            row_of(row, model, workload_of(row, workload), hardware, trials) for row in table.row
        ]
        for table in spec.table
    }
    notes = {table.title: table.note for table in spec.table}
    text = [f"# {spec.title}", "", *([f"Measured: {spec.source}.", ""] if spec.source else [])]
    text += [markdown(title, rows, notes[title]) for title, rows in tables.items()]
    held = {
        layout: estimate(model, workload, hardware, parse_layout(layout, world_size=hardware.count))
        for layout in spec.memory
    }
    text += [memory_text(layout, found) for layout, found in held.items()]
    whole = "\n".join(text)
    console = console_for(sys.stdout)
    console.print(whole, soft_wrap=True)
    files = {"table.md": whole, "table.csv": csv_of(tables), "table.svg": drawing(tables)}
    if held:
        files["memory.svg"] = memory_drawing(held)
    for name, content in files.items():
        write_text(folder / name, content)
    console.print(f"wrote {folder}/{', '.join(files)}", soft_wrap=True)
    return 0


def _job(spec: SweepSpec, path: Path) -> tuple[ModelSpec, Workload, Hardware]:
    from moewright.cli.jobs import read_asked
    from moewright.intake import catalogue
    from moewright.intake.job import read_job

    if spec.job.file:
        job = read_job(path.parent / spec.job.file)
        return job.model, job.workload, catalogue.hardware(f"{job.nproc}x{job.hardware}")
    asked = read_asked(
        spec.job.model,
        on=spec.job.on,
        seq_len=spec.job.seq_len,
        global_batch=spec.job.global_batch,
        precision=None,
    )
    return asked.model, asked.workload, asked.hardware


def _try(
    row: RowSpec, model: ModelSpec, workload: Workload, hardware: Hardware, folder: Path
) -> None:
    """Run one row, unless it has been; what cannot run here is a trial that failed, with its
    reason."""
    from moewright.tuning.sweep import Trial, key_of, read_trials, write_trial

    layout, batch = key_of(row, workload)
    if any((trial.layout, trial.global_batch) == (layout, batch) for trial in read_trials(folder)):
        return
    print(f"running {row.name}", flush=True)
    try:
        trial = _run(row, model, workload, hardware, folder)
    except BadInput as error:
        trial = Trial(layout=layout, global_batch=batch, failed=str(error))
    write_trial(folder, trial)


def _run(
    row: RowSpec, model: ModelSpec, workload: Workload, hardware: Hardware, folder: Path
) -> Trial:
    from statistics import median

    from moewright.codec import fingerprint, read_run
    from moewright.engine.run.train import run
    from moewright.rules.settled_steps import settled
    from moewright.search.search import plan_of
    from moewright.tuning.sweep import Trial, key_of, layout_of

    layout, batch = key_of(row, workload)
    plan = plan_of(model, workload, hardware, layout_of(row, hardware))
    place = folder / "trials" / fingerprint(plan.layout, plan.workload)
    code = int(run(plan, place))
    if code:
        return Trial(layout=layout, global_batch=batch, failed=f"the run ended with code {code}")
    steps = settled(read_run(place))
    time_s = median(step.step_s for step in steps)
    return Trial(
        layout=layout,
        global_batch=batch,
        time_s=time_s,
        tokens=median(step.tokens_per_s_per_rank for step in steps),
        tflops=median(step.tflops_per_rank for step in steps),
    )
