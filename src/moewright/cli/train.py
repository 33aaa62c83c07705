"""`moewright train`: plan a job (or take up its plan), run it, and write its report."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.intake.job import JobFile
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
    """Train a job. It resumes by itself where its run folder stands; the same command also runs
    under torchrun.

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
    from moewright.cli.plan_request import fill_attended_share, to_job_keys, translate_fields
    from moewright.engine.run.env import read_torchrun_env
    from moewright.engine.run.process_limit import refuse_too_many_processes
    from moewright.intake.devices import MAX_DEVICES
    from moewright.intake.job import read_job

    launched = read_torchrun_env()
    asked = read_job(job, tuple(set_ or ()))
    world = nproc if nproc is not None else launched.world_size if launched else asked.nproc
    if not 1 <= world <= MAX_DEVICES:
        close = str(min(max(world, 1), MAX_DEVICES))
        raise BadInput(
            Reason(
                field="--nproc",
                value=str(world),
                rule=f"must be in 1..{MAX_DEVICES}",
                nearest=close,
            )
        )
    if launched and world != launched.world_size:
        rule = "is not the number of processes torchrun started"
        raise BadInput(
            Reason(field="--nproc", value=str(world), rule=rule, nearest=str(launched.world_size))
        )
    if launched is None:
        with translate_fields(to_job_keys(job)):
            refuse_too_many_processes(world, field="train.nproc" if nproc is None else "--nproc")
    asked = replace(asked, nproc=world)
    with translate_fields(to_job_keys(job)):
        _refuse_untrainable(asked)
    asked = replace(asked, workload=fill_attended_share(asked.workload))
    run_dir = out or Path("runs") / job.stem
    leads = launched is None or launched.rank == 0
    with translate_fields(to_job_keys(job)):
        plan = _plan(asked, run_dir, measure=launched is None, say=leads)

    from moewright.engine.run.train import train

    with translate_fields(to_job_keys(job)):
        code = int(train(plan, run_dir, extend=extend))
    if code == 0 and leads:
        from moewright.cli.report import write_run_report

        print(f"wrote {write_run_report(run_dir, run_dir / 'report.html')}")
    return code


def _refuse_untrainable(job: JobFile) -> None:
    """Raise BadInput for what no layout can mend, before anything is measured or written."""
    from moewright.engine.data.preflight import check_data
    from moewright.rules.engine_limits import unsupported_model

    steps = job.workload.steps
    few = (
        (Reason(field="train.steps", value=str(steps), rule="must be at least 1", nearest="1"),)
        if steps < 1
        else ()
    )
    if reasons := (*few, *unsupported_model(job.model, job.workload)):
        raise BadInput(*reasons)
    check_data(job.model, job.workload)


def _plan(job: JobFile, run_dir: Path, *, measure: bool, say: bool) -> Plan:
    """The run's own plan when it is of this very job; else a new one, the best that the engine
    runs."""
    from moewright.codec import format_layout

    hardware = _hardware(job, measure=measure)
    path = run_dir / PLAN_FILE
    if path.exists():
        kept = _read_plan(path)
        changed = _changed(kept, job, hardware)
        if not changed:
            return kept
        if "model" in changed and (run_dir / STEPS_FILE).exists():
            rule = f"holds a run of another model ({kept.model.name})"
            raise BadInput(
                Reason(field="--out", value=str(run_dir), rule=rule, nearest=f"{run_dir}-2")
            )
        if say:
            print(f"{path} is not of this job ({', '.join(changed)}): planning again")
    plan = _search(job, hardware)
    if say:
        print(f"planned {format_layout(plan.layout)} over {job.nproc} processes", flush=True)
    return plan


def _read_plan(path: Path) -> Plan:
    from moewright.codec import read_json
    from moewright.spec.plan import Plan

    try:
        return read_json(Plan, path)
    except BadInput as error:
        raise BadInput(
            *(replace(reason, nearest="delete it to plan again") for reason in error.reasons)
        ) from None


def _hardware(job: JobFile, *, measure: bool) -> Hardware:
    from moewright.cli.bench import write_machine_file
    from moewright.intake import catalogue

    path = Path(job.hardware)
    if path.suffix == ".toml" and not path.exists() and measure:
        _refuse_illegal(job)
        print(f"{path} is not there: measuring this machine")
        write_machine_file(path, nproc=job.nproc)
    return catalogue.hardware(f"{job.nproc}x{job.hardware}")


def _refuse_illegal(job: JobFile) -> None:
    """Raise BadInput when no layout of the job is legal, which any device tells as well as one yet
    to be measured."""
    from moewright.intake import catalogue
    from moewright.search.search import DOES_NOT_FIT

    try:
        _search(job, catalogue.hardware(f"{job.nproc}x{catalogue.hardware_names()[0]}"))
    except BadInput as error:
        if not any(DOES_NOT_FIT in reason.rule for reason in error.reasons):
            raise


def _changed(kept: Plan, job: JobFile, hardware: Hardware) -> tuple[str, ...]:
    """What of a kept plan is no longer what the job asks; () when it may be run as it is."""
    from moewright.codec import explicit_fields, fingerprint, parse_layout

    pinned = parse_layout(job.layout_text, world_size=job.nproc)
    old, new = kept.workload, job.workload
    changed = [] if kept.model == job.model else ["model"]
    changed += [
        field.name for field in fields(new) if getattr(old, field.name) != getattr(new, field.name)
    ]
    changed += [] if kept.hardware == hardware else ["hardware"]
    keys = sorted({"world_size", *explicit_fields(job.layout_text)})
    changed += [key for key in keys if getattr(kept.layout, key) != getattr(pinned, key)]
    if kept.fingerprint != fingerprint(kept.model, kept.workload, kept.hardware, kept.layout):
        changed.append("fingerprint")
    return tuple(changed)


def _search(job: JobFile, hardware: Hardware) -> Plan:
    from moewright.cli.plan_request import explain_empty_search
    from moewright.rules.engine_limits import unsupported_layout
    from moewright.search.search import search

    fixed = job.layout_text
    allowed = partial(unsupported_layout, model=job.model, workload=job.workload)
    ranked = search(job.model, job.workload, hardware, fixed=fixed, top=1, allowed=allowed)
    if not ranked.plans:
        raise explain_empty_search(
            job.model, job.workload, hardware, fixed=fixed, allowed=allowed, ranked=ranked
        )
    return ranked.plans[0]
