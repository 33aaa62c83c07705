"""`moewright train`: plan a job (or take up its plan), run it, and write its report."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.intake.job import Job
    from moewright.spec.hardware import Hardware
    from moewright.spec.plan import Plan

PLAN_FILE = "plan.json"
STEPS_FILE = "steps.jsonl"


def train(
    job: Path,
    /,
    *,
    nproc: int | None = None,
    out: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    extend: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a job. It resumes by itself where its run folder stands; the same command also runs under torchrun.

    Exit codes: 0 done, 2 bad input, 3 a rank failed, 143 saved on SIGTERM.

    Parameters
    ----------
    job
        The job file, with sections model, data, layout, train, checkpoint.
    nproc
        Processes to start; the job's own number when not given.
    out
        The run folder; runs/<name of the job file> when not given.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    extend
        When the run has done all its steps, do as many again.
    """
    from moewright.engine.env import torchrun
    from moewright.intake.job import read_job

    launched = torchrun()
    asked = read_job(job, tuple(set_ or ()))
    world = nproc if nproc is not None else launched.world if launched else asked.nproc
    if world < 1:
        raise BadInput(Reason(field="--nproc", value=str(world), rule="must be at least 1", nearest="1"))
    if launched and world != launched.world:
        rule = "is not the number of processes torchrun started"
        raise BadInput(Reason(field="--nproc", value=str(world), rule=rule, nearest=str(launched.world)))
    asked = replace(asked, nproc=world)
    if reasons := _untrainable(asked):
        raise BadInput(*reasons)
    run_dir = out or Path("runs") / job.stem
    leads = launched is None or launched.rank == 0
    plan = _plan(asked, run_dir, measure=launched is None, write=leads)

    from moewright.engine.train import run

    code = int(run(plan, run_dir, extend=extend))
    if code == 0 and leads:
        from moewright.cli.report import write_run_report

        print(f"wrote {write_run_report(run_dir, run_dir / 'report.html')}")
    return code


def _untrainable(job: Job) -> tuple[Reason, ...]:
    """What no layout can mend; said before anything is written."""
    from moewright.engine.support import unsupported_model

    steps = job.workload.steps
    few = (Reason(field="train.steps", value=str(steps), rule="must be at least 1", nearest="1"),) if steps < 1 else ()
    return (*few, *unsupported_model(job.model, job.workload))


def _plan(job: Job, run_dir: Path, *, measure: bool, write: bool) -> Plan:
    """The run's own plan when it is of this very job; else a new one, the best that the engine runs."""
    from moewright.codec import layout_text, read_json, write_json
    from moewright.spec.plan import Plan

    hardware = _hardware(job, measure=measure)
    path = run_dir / PLAN_FILE
    if path.exists():
        kept = read_json(Plan, path)
        changed = _changed(kept, job, hardware)
        if not changed:
            return kept
        if "model" in changed and (run_dir / STEPS_FILE).exists():
            rule = f"holds a run of another model ({kept.model.name})"
            raise BadInput(Reason(field="--out", value=str(run_dir), rule=rule, nearest=f"{run_dir}-2"))
        if write:
            print(f"the job changed ({', '.join(changed)}): planning again")
    plan = _search(job, hardware)
    if write:
        write_json(path, plan)
        print(f"planned {layout_text(plan.layout)} over {job.nproc} processes", flush=True)
    return plan


def _hardware(job: Job, *, measure: bool) -> Hardware:
    from moewright.cli.bench import measure_to
    from moewright.intake import catalogue

    path = Path(job.hardware)
    if path.suffix == ".toml" and not path.exists() and measure:
        print(f"{path} is not there: measuring this machine")
        measure_to(path, nproc=job.nproc)
    return catalogue.hardware(f"{job.nproc}x{job.hardware}")


def _changed(kept: Plan, job: Job, hardware: Hardware) -> tuple[str, ...]:
    """What of a kept plan is no longer what the job asks; () when it may be run as it is."""
    from moewright.codec import given_fields, parse_layout

    pinned = parse_layout(job.layout_text, world_size=job.nproc)
    old, new = kept.workload, job.workload
    changed = [] if kept.model == job.model else ["model"]
    changed += [field.name for field in fields(new) if getattr(old, field.name) != getattr(new, field.name)]
    changed += [] if kept.hardware == hardware else ["hardware"]
    keys = sorted({"world_size", *given_fields(job.layout_text)})
    changed += [key for key in keys if getattr(kept.layout, key) != getattr(pinned, key)]
    return tuple(changed)


def _search(job: Job, hardware: Hardware) -> Plan:
    from moewright.cli.jobs import nothing_fits
    from moewright.engine.support import unsupported_layout
    from moewright.search.search import search

    fixed = job.layout_text
    ranked = search(job.model, job.workload, hardware, fixed=fixed, top=1, allowed=unsupported_layout)
    if not ranked.plans:
        raise nothing_fits(job.model, job.workload, hardware, fixed=fixed, allowed=unsupported_layout, ranked=ranked)
    return ranked.plans[0]
