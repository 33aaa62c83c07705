"""Training a job here: over how many ranks, on which hardware, by which plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from moewright.api.machines import is_unmeasured, measure_unmeasured, read_job_hardware
from moewright.api.planning import is_plan_file, plan_for_training
from moewright.api.requests import (
    fill_attended_share,
    request_training,
    to_job_keys,
    translate_fields,
)
from moewright.codec import (
    PLAN_FILE,
    STEPS_FILE,
    explicit_fields,
    fingerprint,
    format_layout,
    parse_layout,
    read_json,
)
from moewright.codec.layout_words import describe_layout
from moewright.engine.observe.display import STEP_LINES, RunDisplay
from moewright.engine.run.early_checks import refuse_too_many_processes
from moewright.engine.run.env import TorchrunEnv, read_torchrun_env
from moewright.intake import catalogue
from moewright.intake.job import JobFile, read_job
from moewright.rules.limits.engine_limits import unsupported_layout, unsupported_model
from moewright.search.search import DOES_NOT_FIT, search
from moewright.search.space import layout_objections
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import MAX_DEVICES, Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.options import Tell
from moewright.spec.plan import Plan
from moewright.spec.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """What is to be trained: a job file, or a plan that is run as it stands.

    `nproc` is None where the job or the plan decides on the number of ranks.
    """

    path: Path
    run_dir: Path
    nproc: int | None = None
    overrides: Sequence[str] = ()
    extend: bool = False  # do as many steps again when all are done
    falls_back: bool = False  # put damaged checkpoints aside
    supervises: bool = False  # start the ranks again when they fail
    min_ranks: int | None = None  # the fewest to go on with, where ranks are gone for good


def is_first_rank() -> bool:
    """Tell whether this process prints and writes for all ranks that torchrun started."""
    torchrun = read_torchrun_env()
    return torchrun is None or torchrun.rank == 0


def prepare_training(request: TrainingRequest, tell: Tell) -> Plan:
    """Return the plan to train: a plan file's own, the run folder's, or the best of a search.

    Raises:
        BadInput: the job cannot be trained, or the run folder holds a run of another model.
    """
    torchrun = read_torchrun_env()
    if is_plan_file(request.path):
        return _read_given_plan(request, torchrun)
    job = read_job(request.path, request.overrides)
    with translate_fields(to_job_keys(request.path)):
        nproc = _choose_world_size(request.nproc, torchrun, job.nproc)
        job = replace(job, nproc=nproc)
        _refuse_untrainable(job.model, job.workload)
    job = replace(job, workload=fill_attended_share(job.workload))
    # Under torchrun all ranks would measure at once, beside each other.
    if torchrun is None and is_unmeasured(job):
        _refuse_illegal(job, request.path)
        measure_unmeasured(job, tell)
    with translate_fields(to_job_keys(request.path)):
        hardware = read_job_hardware(job)
    return _choose_plan(job, request, hardware, tell)


def run_training(plan: Plan, request: TrainingRequest, display: RunDisplay = STEP_LINES) -> int:
    """Train a plan in the run folder of a request, and return the exit code of the run.

    `display` shows it; under torchrun, where every rank is a program, lines alone do.

    Raises:
        BadInput: the plan cannot be run here; fields are named as keys of the job.
    """
    from moewright.engine.run.launch import LaunchHooks
    from moewright.engine.run.supervise import Elasticity, supervise
    from moewright.engine.run.train import train

    torchrun = read_torchrun_env()
    with translate_fields(to_job_keys(request.path)):
        if not request.supervises or torchrun is not None:
            # torchrun's agent starts ranks again; to supervise is then to fall back alone.
            falls_back = request.falls_back or request.supervises
            hooks = LaunchHooks(display=STEP_LINES if torchrun is not None else display)
            code = train(
                plan, request.run_dir, extend=request.extend, falls_back=falls_back, hooks=hooks
            )
            return int(code)
        elasticity = None
        if request.min_ranks is not None:
            replan = partial(plan_for_ranks, plan)
            elasticity = Elasticity(replan=replan, min_ranks=request.min_ranks)
        code = supervise(
            plan,
            request.run_dir,
            extend=request.extend,
            elasticity=elasticity,
            display=display,
        )
        return int(code)


def plan_for_ranks(plan: Plan, count: int) -> Plan | None:
    """Return the best plan of the same job for so many ranks, or None where there is none.

    Global batch, data and numerics are those of the job; of the layout, that part is kept which
    decides what is learned: the sequences over which a balance loss is taken, and the tokens that a
    capacity drops.
    """
    if count < 1:
        return None
    layout = plan.layout
    kept = ""
    if plan.workload.loss.aux_coeff or layout.capacity:
        kept = f"mbs={layout.mbs}"
    if layout.capacity:
        kept += f",capacity={layout.capacity},capacity_fill={layout.capacity_fill}"
    result = search(
        plan.model,
        plan.workload,
        replace(plan.hardware, count=count),
        fixed=kept,
        top=1,
        allowed=layout_objections(plan.model, plan.workload, unsupported_layout),
    )
    return result.plans[0] if result.plans else None


def _read_given_plan(request: TrainingRequest, torchrun: TorchrunEnv | None) -> Plan:
    """Return the plan of a file, which states layout and ranks and takes no other values."""
    plan = read_json(Plan, request.path)
    if request.overrides:
        rule = "changes keys of a job file; a plan is run as it stands"
        raise BadInput(Reason(field="--set", value=request.overrides[0][:60], rule=rule))
    world_size = plan.layout.world_size
    with translate_fields(to_job_keys(request.path)):
        nproc = _choose_world_size(request.nproc, torchrun, world_size)
        if nproc != world_size:
            rule = "is not the world size of the plan"
            reason = Reason(field="--nproc", value=str(nproc), rule=rule, nearest=str(world_size))
            raise BadInput(reason)
        _refuse_untrainable(plan.model, plan.workload)
    folder_plan = request.run_dir / PLAN_FILE
    if folder_plan.exists() and (request.run_dir / STEPS_FILE).exists():
        try:
            old_plan = read_json(Plan, folder_plan)
        except BadInput:  # a damaged one is written anew; its checkpoints know their model too
            return plan
        _refuse_other_model(old_plan, plan.model, request.run_dir)
    return plan


def describe_stop(run_dir: Path) -> str:
    """Say what a run that was stopped has saved, and how to go on."""
    from moewright.engine.checkpoint.commit import find_latest

    latest = find_latest(run_dir / "checkpoints")
    if latest is None:
        return f"stopped; {run_dir} has no checkpoint, so the same command starts again"
    return f"stopped; {latest} is saved, and the same command goes on from it"


def _choose_world_size(option: int | None, torchrun: TorchrunEnv | None, default: int) -> int:
    """Return the ranks of the run: those of --nproc, of torchrun, or else of the job.

    Raises:
        BadInput: there are too few or too many, or not as many as torchrun started.
    """
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


def _refuse_untrainable(model: ModelSpec, workload: Workload) -> None:
    """Refuse what no layout can mend, before anything is measured or written.

    Raises:
        BadInput: the model, the workload or the data cannot be trained.
    """
    from moewright.engine.data.preflight import check_data

    reasons = list(unsupported_model(model, workload))
    steps = workload.steps
    if steps < 1:
        rule = "must be at least 1"
        reasons.insert(0, Reason(field="train.steps", value=str(steps), rule=rule, nearest="1"))
    if reasons:
        raise BadInput(*reasons)
    check_data(model, workload)


def _refuse_illegal(job: JobFile, path: Path) -> None:
    """Refuse a job without a legal layout, which any device tells as well as this machine.

    Raises:
        BadInput: no layout is legal.
    """
    any_device = catalogue.hardware(f"{job.nproc}x{catalogue.hardware_names()[0]}")
    try:
        plan_for_training(request_training(job, any_device), path)
    except BadInput as error:
        # The memory is that of a device that only stands in.
        if not any(DOES_NOT_FIT in reason.rule for reason in error.reasons):
            raise


def _choose_plan(job: JobFile, request: TrainingRequest, hardware: Hardware, tell: Tell) -> Plan:
    """Return the run folder's plan when it is of this very job, else the best that the engine runs.

    Raises:
        BadInput: the folder holds a run of another model, or no layout is legal and fits.
    """
    path = request.run_dir / PLAN_FILE
    if path.exists():
        old_plan = read_plan(path)
        with translate_fields(to_job_keys(request.path)):
            changes = _list_changes(old_plan, job, hardware)
        if not changes:
            return old_plan
        # Without steps the folder holds a plan alone, which may be replaced.
        if (request.run_dir / STEPS_FILE).exists():
            _refuse_other_model(old_plan, job.model, request.run_dir)
        tell(f"{path} is not of this job ({', '.join(changes)}): planning again")
    plan = plan_for_training(request_training(job, hardware), request.path)
    tell(f"planned for {job.nproc} processes: {describe_layout(plan.layout).sentence}")
    tell(f"as text {format_layout(plan.layout)}")
    return plan


def _refuse_other_model(old_plan: Plan, model: ModelSpec, run_dir: Path) -> None:
    """Refuse to train another model in the folder of a run."""
    if _is_same_model(old_plan.model, model):
        return
    rule = f"holds a run of another model ({old_plan.model.name})"
    nearest = f"{run_dir}-2"
    raise BadInput(Reason(field="--out", value=str(run_dir), rule=rule, nearest=nearest))


def read_plan(path: Path) -> Plan:
    """Read the plan of a run folder; a refusal says how to do without it."""
    try:
        return read_json(Plan, path)
    except BadInput as error:
        nearest = "delete it to plan again"
        raise BadInput(*(replace(reason, nearest=nearest) for reason in error.reasons)) from None


def _is_same_model(model: ModelSpec, other: ModelSpec) -> bool:
    """Tell whether two models differ in nothing but their name.

    The name of a config.json's model is that of its folder, which may move.
    """
    return replace(model, name=other.name) == other


def _list_changes(plan: Plan, job: JobFile, hardware: Hardware) -> list[str]:
    """List what of a plan is no longer what the job asks; none when it may be run as it is."""
    changes = []
    if not _is_same_model(plan.model, job.model):
        changes.append("model")
    changes += [
        field.name
        for field in fields(job.workload)
        if getattr(plan.workload, field.name) != getattr(job.workload, field.name)
    ]
    if plan.hardware != hardware:
        changes.append("hardware")
    pinned = parse_layout(job.layout_text, world_size=job.nproc)
    # What the job leaves to the planner may be anything.
    keys = sorted({"world_size", *explicit_fields(job.layout_text)})
    changes += [key for key in keys if getattr(plan.layout, key) != getattr(pinned, key)]
    # Of a file that was changed by hand, or by another release.
    if plan.fingerprint != fingerprint(plan.model, plan.workload, plan.hardware, plan.layout):
        changes.append("fingerprint")
    return changes
