"""`moewright train`: plan a job (or take up its plan), run it, and write its report."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import Flag, SetOption
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.engine.run.env import TorchrunEnv
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
    set_: SetOption = None,
    extend: Flag = False,
) -> int:
    """Train a job, and resume it where its run folder stands.

    The same command also runs under torchrun. Exit codes: 0 done, 2 bad input, 3 a rank failed,
    143 saved on SIGTERM.

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
    from moewright.api.requests import fill_attended_share, to_job_keys, translate_fields
    from moewright.engine.run.env import read_torchrun_env
    from moewright.intake.job import read_job

    torchrun = read_torchrun_env()
    job_file = read_job(job, tuple(set_ or ()))
    with translate_fields(to_job_keys(job)):
        job_file = replace(job_file, nproc=_choose_world_size(nproc, torchrun, job_file.nproc))
        _refuse_untrainable(job_file)
    job_file = replace(job_file, workload=fill_attended_share(job_file.workload))
    run_dir = out or Path("runs") / job.stem
    reports = torchrun is None or torchrun.rank == 0
    hardware = _read_hardware(job_file, job, may_measure=torchrun is None)
    plan = _choose_plan(job_file, job, hardware, run_dir, reports=reports)

    from moewright.engine.run.train import train as run_training

    with translate_fields(to_job_keys(job)):
        code = int(run_training(plan, run_dir, extend=extend))
    if code == 0 and reports:
        from moewright.cli.report import write_run_report

        print(f"wrote {write_run_report(run_dir, run_dir / 'report.html')}")
    return code


def _choose_world_size(option: int | None, torchrun: TorchrunEnv | None, default: int) -> int:
    """Return the ranks of the run: those of --nproc, of torchrun, or else of the job.

    Raises:
        BadInput: There are too few or too many, or not as many as torchrun started.
    """
    from moewright.engine.run.process_limit import refuse_too_many_processes
    from moewright.intake.devices import MAX_DEVICES

    if option is not None:
        world_size = option
    elif torchrun is not None:
        world_size = torchrun.world_size
    else:
        world_size = default
    value = str(world_size)
    if not 1 <= world_size <= MAX_DEVICES:
        nearest = str(min(max(world_size, 1), MAX_DEVICES))
        rule = f"must be in 1..{MAX_DEVICES}"
        raise BadInput(Reason(field="--nproc", value=value, rule=rule, nearest=nearest))
    if torchrun is None:
        field = "train.nproc" if option is None else "--nproc"
        refuse_too_many_processes(world_size, field=field)
    elif world_size != torchrun.world_size:
        nearest = str(torchrun.world_size)
        rule = "is not the number of processes torchrun started"
        raise BadInput(Reason(field="--nproc", value=value, rule=rule, nearest=nearest))
    return world_size


def _refuse_untrainable(job: JobFile) -> None:
    """Refuse what no layout can mend, before anything is measured or written.

    Raises:
        BadInput: The model, the workload or the data cannot be trained.
    """
    from moewright.engine.data.preflight import check_data
    from moewright.rules.engine_limits import unsupported_model

    reasons = list(unsupported_model(job.model, job.workload))
    steps = job.workload.steps
    if steps < 1:
        rule = "must be at least 1"
        reasons.insert(0, Reason(field="train.steps", value=str(steps), rule=rule, nearest="1"))
    if reasons:
        raise BadInput(*reasons)
    check_data(job.model, job.workload)


def _read_hardware(job: JobFile, job_path: Path, *, may_measure: bool) -> Hardware:
    """Return the job's hardware; a machine file that does not exist is measured and written."""
    from moewright.api.requests import to_job_keys, translate_fields
    from moewright.cli.bench import write_machine_file
    from moewright.intake import catalogue

    path = Path(job.hardware)
    if path.suffix == ".toml" and not path.exists() and may_measure:
        _refuse_illegal(job, job_path)
        print(f"{path} does not exist: measuring this machine")
        write_machine_file(path, nproc=job.nproc)
    with translate_fields(to_job_keys(job_path)):
        return catalogue.hardware(f"{job.nproc}x{job.hardware}")


def _refuse_illegal(job: JobFile, job_path: Path) -> None:
    """Refuse a job without a legal layout, which any device tells as well as this machine.

    Raises:
        BadInput: No layout is legal.
    """
    from moewright.intake import catalogue
    from moewright.search.search import DOES_NOT_FIT

    any_device = catalogue.hardware(f"{job.nproc}x{catalogue.hardware_names()[0]}")
    try:
        _search_best_plan(job, job_path, any_device)
    except BadInput as error:
        if not any(DOES_NOT_FIT in reason.rule for reason in error.reasons):
            raise


def _choose_plan(
    job: JobFile, job_path: Path, hardware: Hardware, run_dir: Path, *, reports: bool
) -> Plan:
    """Return the run folder's plan when it is of this very job, else the best that the engine runs.

    Raises:
        BadInput: The folder holds a run of another model, or no layout is legal and fits.
    """
    from moewright.api.requests import to_job_keys, translate_fields
    from moewright.codec import format_layout

    path = run_dir / PLAN_FILE
    if path.exists():
        old_plan = _read_plan(path)
        with translate_fields(to_job_keys(job_path)):
            changes = _list_changes(old_plan, job, hardware)
        if not changes:
            return old_plan
        if "model" in changes and (run_dir / STEPS_FILE).exists():
            rule = f"holds a run of another model ({old_plan.model.name})"
            nearest = f"{run_dir}-2"
            raise BadInput(Reason(field="--out", value=str(run_dir), rule=rule, nearest=nearest))
        if reports:
            print(f"{path} is not of this job ({', '.join(changes)}): planning again")
    plan = _search_best_plan(job, job_path, hardware)
    if reports:
        print(f"planned {format_layout(plan.layout)} over {job.nproc} processes", flush=True)
    return plan


def _read_plan(path: Path) -> Plan:
    from moewright.codec import read_json
    from moewright.spec.plan import Plan

    try:
        return read_json(Plan, path)
    except BadInput as error:
        nearest = "delete it to plan again"
        raise BadInput(*(replace(reason, nearest=nearest) for reason in error.reasons)) from None


def _list_changes(plan: Plan, job: JobFile, hardware: Hardware) -> list[str]:
    """List what of a plan is no longer what the job asks; none when it may be run as it is."""
    from moewright.codec import explicit_fields, fingerprint, parse_layout

    changes = []
    if plan.model != job.model:
        changes.append("model")
    changes += [
        field.name
        for field in fields(job.workload)
        if getattr(plan.workload, field.name) != getattr(job.workload, field.name)
    ]
    if plan.hardware != hardware:
        changes.append("hardware")
    pinned = parse_layout(job.layout_text, world_size=job.nproc)
    keys = sorted({"world_size", *explicit_fields(job.layout_text)})
    changes += [key for key in keys if getattr(plan.layout, key) != getattr(pinned, key)]
    if plan.fingerprint != fingerprint(plan.model, plan.workload, plan.hardware, plan.layout):
        changes.append("fingerprint")
    return changes


def _search_best_plan(job: JobFile, job_path: Path, hardware: Hardware) -> Plan:
    from moewright.api.planning import Plans, explain_empty_search
    from moewright.api.requests import PlanRequest, Purpose, to_job_keys, translate_fields
    from moewright.rules.engine_limits import unsupported_layout
    from moewright.search.search import search

    pinned = job.layout_text
    allowed = partial(unsupported_layout, model=job.model, workload=job.workload)
    with translate_fields(to_job_keys(job_path)):
        result = search(job.model, job.workload, hardware, fixed=pinned, top=1, allowed=allowed)
    if result.plans:
        return result.plans[0]
    request = PlanRequest(
        model=job.model,
        workload=job.workload,
        hardware=hardware,
        layout_text=pinned,
        purpose=Purpose.TRAIN,
        defaults=(),
    )
    empty = Plans(
        request=request,
        plans=(),
        best=None,
        even_routing=None,
        why=result.why,
        rejected=result.rejected,
        search=result,
    )
    raise explain_empty_search(empty, job_path)
