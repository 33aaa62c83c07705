"""Whether a layout trains what one process trains: a job's first steps, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.api.planning import is_plan_file
from moewright.api.requests import to_job_keys, translate_fields
from moewright.api.training import read_plan
from moewright.codec import parse_layout, write_text
from moewright.engine.run.process_limit import refuse_too_many_processes
from moewright.intake.job import read_job
from moewright.rules.job import Job, plan_job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.spec.errors import BadInput, Reason
from moewright.spec.record import format_json
from moewright.spec.training_check import TrainingCheck
from moewright.spec.workload import Dtype

CHECKED_STEPS = 3
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
