"""The engine beside what is expected of it: a layout beside one process, a rank counted dry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.api.machines import is_unmeasured, read_job_hardware
from moewright.api.planning import is_plan_file
from moewright.api.requests import to_job_keys, translate_fields
from moewright.api.training import read_plan
from moewright.codec import parse_layout, write_text
from moewright.cost.ledger import predict_rank_ledger
from moewright.cost.memory.peak import steady_micro_batches
from moewright.diagnosis.compare_ledgers import LedgerComparison, compare_ledgers
from moewright.engine.run.early_checks import refuse_too_many_processes
from moewright.intake.job import read_job
from moewright.rules.grid import coordinate, with_fabric_nodes
from moewright.rules.job import Job, micro_batches, plan_job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.rules.routing import round_robin_selection
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger, Module
from moewright.spec.model import ModelSpec
from moewright.spec.record import format_json
from moewright.spec.training_check import TrainingCheck
from moewright.spec.workload import Dtype, SaveMode

if TYPE_CHECKING:
    from moewright.engine.run.dry_run import DryRun


CHECKED_STEPS = 3  # the second has moments, the third shows that they were kept
CHECK_FILE = "training.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCheckRequest:
    """What is to be verified: a job file or a plan, for some steps.

    `layout` and `nproc` replace those of a job file, where they are given.
    """

    path: Path
    out: Path
    layout: str = ""
    nproc: int | None = None
    steps: int = CHECKED_STEPS
    overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingChecks:
    """The comparisons of a job: in fp32, and in its own format; `code` is of a run that failed."""

    checks: tuple[TrainingCheck, ...]
    code: int = 0

    @property
    def holds(self) -> bool:
        """Whether all runs ended and every figure is within its bound."""
        return not self.code and all(check.holds for check in self.checks)


def verify_training(
    request: TrainingCheckRequest, tell: Callable[[str], None] = lambda line: None
) -> TrainingChecks:
    """Train the first steps of a job in its layout and in one process, and compare them.

    In fp32 the bounds are those of sums in another order; in the job's own format they are measured
    (engine.run.check_training). training.json in the folder has every figure.

    Raises:
        BadInput: the job cannot be trained, or no one process computes the same.
    """
    with translate_fields(to_job_keys(request.path)):
        job = _read_job(request)
        require_runnable(job)
        refuse_too_many_processes(job.layout.world_size, field="--nproc")

        # torch takes seconds, so it comes after what is refused without it.
        from moewright.engine.run.check_training import check_training

        own = job.workload.precision
        checks: list[TrainingCheck] = []
        for precision in dict.fromkeys((Dtype.FP32, own)):
            tell(f"training {request.steps} steps in {precision}, in the layout and in one process")
            workload = replace(job.workload, precision=precision)
            folder = request.out / precision.value
            check = check_training(replace(job, workload=workload), folder, steps=request.steps)
            if not isinstance(check, TrainingCheck):
                return TrainingChecks(checks=tuple(checks), code=int(check))
            checks.append(check)
    answer = TrainingChecks(checks=tuple(checks))
    write_text(request.out / CHECK_FILE, format_json(answer))
    return answer


def _read_job(request: TrainingCheckRequest) -> Job:
    if is_plan_file(request.path):
        if request.overrides or request.layout or request.nproc is not None:
            rule = "is run as it stands: --set, --layout and --nproc are for a job file"
            raise BadInput(Reason(field=str(request.path), rule=rule))
        return plan_job(read_plan(request.path))
    job_file = read_job(request.path, request.overrides)
    nproc = job_file.nproc if request.nproc is None else request.nproc
    layout = parse_layout(request.layout or job_file.layout_text, world_size=nproc)
    return Job(model=job_file.model, workload=job_file.workload, layout=layout)


# How the engine's notes of what a rank begins to do start, for each pass of a micro-batch.
_PASSES = ("forward of", "backward of")


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunRecord:
    """A dry run as its file has it: the counts, and each next to its prediction.

    The fields before `comparison` are those of a DryRun. `planned` is the ledger of the whole step;
    None where the hardware is not known.
    """

    ledger: Ledger
    states_bytes: int
    peak_by_module: tuple[tuple[Module, int], ...]
    comparison: LedgerComparison
    planned: Ledger | None
    run_micro_batches: int
    step_micro_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunAnswer:
    """The counts of one rank, next to the planner's prediction for the same micro-batches."""

    model: ModelSpec
    layout: Layout
    counted: DryRun
    comparison: LedgerComparison
    planned: Ledger | None  # of the whole step; None where the hardware is not known
    run_micro_batches: int
    step_micro_batches: int

    def to_record(self) -> DryRunRecord:
        """Return what the file of the answer has."""
        return DryRunRecord(
            ledger=self.counted.ledger,
            states_bytes=self.counted.states_bytes,
            peak_by_module=self.counted.peak_by_module,
            comparison=self.comparison,
            planned=self.planned,
            run_micro_batches=self.run_micro_batches,
            step_micro_batches=self.step_micro_batches,
        )


def _read_plan_job(path: Path, overrides: Sequence[str]) -> tuple[Job, Hardware | None]:
    """Return the job of a plan, which is counted as it stands, and its hardware."""
    if overrides:
        rule = "changes keys of a job file; a plan is counted as it stands"
        raise BadInput(Reason(field="--set", value=overrides[0][:60], rule=rule))
    plan = read_plan(path)
    return plan_job(plan), plan.hardware


def _read_file_job(path: Path, overrides: Sequence[str]) -> tuple[Job, Hardware | None]:
    """Return the job of a file, and its hardware where it is measured."""
    job_file = read_job(path, overrides)
    hardware = None if is_unmeasured(job_file) else read_job_hardware(job_file)
    layout = parse_layout(job_file.layout_text, world_size=job_file.nproc)
    if hardware is not None:
        layout = with_fabric_nodes(layout, hardware.fabric.domain_size)
    return Job(model=job_file.model, workload=job_file.workload, layout=layout), hardware


def count_rank(
    path: Path,
    rank: int,
    overrides: Sequence[str],
    show_share: Callable[[float], None] = lambda share: None,
) -> DryRunAnswer:
    """Count a step of one rank of a job or a plan, with even routing, and predict the same.

    `show_share` is called with the share of the step's passes that have begun.

    Raises:
        BadInput: the job is not legal, or has no such rank.
    """
    read = _read_plan_job if is_plan_file(path) else _read_file_job
    to_keys = to_job_keys(path)
    with translate_fields(lambda field: "--rank" if field == "rank" else to_keys(field)):
        whole_job, hardware = read(path, overrides)
        model, layout = whole_job.model, whole_job.layout
        require_runnable(whole_job)
        coordinate(layout, rank, "pp")  # refuses a rank outside of the world

        # torch takes seconds, so it comes after what is refused without it.
        from moewright.engine.run.dry_run import dry_run

        step_micro_batches = micro_batches(whole_job.workload, layout)
        run_micro_batches = steady_micro_batches(layout, step_micro_batches)
        # Sequences without data have no documents.
        data = replace(whole_job.workload.data, attended_share=1.0)
        global_batch = run_micro_batches * layout.mbs * layout.dp
        # Nothing is saved, and nothing kept for other ranks.
        checkpoint = replace(whole_job.workload.checkpoint, mode=SaveMode.SYNC, peer_every_steps=0)
        workload = replace(
            whole_job.workload, global_batch=global_batch, data=data, checkpoint=checkpoint
        )
        job = Job(model=model, workload=workload, layout=layout)
        passes = run_micro_batches * layout.vpp * len(_PASSES)
        begun = 0

        def note(activity: str, *, is_waiting: bool = False, is_slow: bool = False) -> None:
            nonlocal begun
            if activity.startswith(_PASSES):
                begun += 1
                show_share(begun / passes)

        counted = dry_run(job, rank=rank, note=note)
    selection = round_robin_selection(job)
    predicted = predict_rank_ledger(job, rank=rank, selection=selection)
    planned = None
    if hardware is not None:
        plan = build_plan(model, whole_job.workload, hardware, layout)
        planned = plan.estimate.ledgers[counted.ledger.pp_rank]
    return DryRunAnswer(
        model=model,
        layout=layout,
        counted=counted,
        comparison=compare_ledgers(predicted, counted.ledger),
        planned=planned,
        run_micro_batches=run_micro_batches,
        step_micro_batches=step_micro_batches,
    )
