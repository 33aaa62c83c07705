"""Training, top to bottom: a Plan comes in, a run directory comes out.

`train` is called once a job. It refuses what the engine cannot do, then starts one process for each
rank (or joins those of torchrun). Each process runs `train_rank` of `training_loop`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from moewright.codec import PLAN_FILE, read_json, write_json
from moewright.codec.run_files import MERGED_TRACE_FILE, TRACE_FOLDER
from moewright.engine.checkpoint import (
    find_latest,
    find_readable,
    probe_copies,
    require_space,
)
from moewright.engine.data.preflight import check_data
from moewright.engine.kernels.fused.table import unavailable_reasons
from moewright.engine.model.routes import prepare_routes
from moewright.engine.run.env import (
    is_triton_interpreted,
    read_device_queues,
    read_torchrun_env,
)
from moewright.engine.run.launch import LaunchHooks, launch
from moewright.engine.run.rank_checks import (
    describe_device_queues,
    missing_devices,
    refuse_peer_copies,
    refuse_run_folder,
)
from moewright.engine.run.restore import (
    build_identity,
    fetch_remote_checkpoint,
    read_steps_done,
)
from moewright.engine.run.run_records import (
    note_copy_failure,
    note_failure,
)
from moewright.engine.run.training_loop import train_rank
from moewright.engine.run.worker import (
    ExitCode,
    FailureKind,
    RankFailure,
    Timeouts,
)
from moewright.rules.adapters import is_frozen
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.rules.optimizers import stored_nbytes
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan
from moewright.spec.workload import FusedKernels, Workload

# Without train.hang_timeout_s, a rank hangs that shows no life for so many predicted steps, or for
# this long where that is longer.
_STEPS_OF_A_HANG = 20
_MIN_HANG_S = 60.0
# The timeout of collectives, which a watch makes needless.
_COLLECTIVE_S = 86_400.0
# Kernels that torch makes ahead of time; any other may be compiled where it is first called.
_COMPILED_BEFORE = (FusedKernels.AUTO, FusedKernels.PLAIN)


def train(
    plan: Plan,
    run_dir: Path,
    *,
    extend: bool = False,
    falls_back: bool = False,
    hooks: LaunchHooks | None = None,
    local_ranks: Sequence[int] = (),
) -> ExitCode:
    """Train `plan` in `run_dir` from its last checkpoint on, and return the job's exit code.

    A run that has done all its steps ends at once, unless `extend` asks for as many again. With
    `falls_back`, damaged checkpoints are put aside, and the last whole one is taken. plan.json is
    written as soon as this job holds the lock of `run_dir`; a failure goes to its incidents.jsonl.
    `hooks` and `local_ranks` are those of `launch`.

    Raises:
        BadInput: before anything is written or started, when the plan is not legal or asks for
            what the engine or this machine cannot run, or when the data or the checkpoint are not
            those of this job.
    """
    require_runnable(plan_job(plan))
    kind = plan.hardware.device.kind
    interpreted = is_triton_interpreted()
    reasons = (
        *missing_devices(plan),
        *refuse_peer_copies(plan),
        *refuse_run_folder(run_dir),
        *unavailable_reasons(plan.workload.fused_kernels, kind, interpreted=interpreted),
    )
    if reasons:
        raise BadInput(*reasons)
    identity = build_identity(plan, check_data(plan.model, plan.workload))
    prepare_routes(plan.model, plan.workload, identity["data"]["fingerprint"])
    find_newest = find_readable if falls_back else find_latest
    # Before the steps are read: a copy elsewhere may be the newest checkpoint.
    fetch_remote_checkpoint(plan, run_dir, identity, find_newest=find_newest)
    steps_done = read_steps_done(plan, run_dir, identity, falls_back=falls_back)
    last_step = _find_last_step(plan.workload, steps_done, extend)
    if steps_done >= last_step:
        _restore_plan(plan, run_dir)
        print(f"{run_dir}: all {last_step} steps are done", flush=True)
        return ExitCode.DONE
    if steps_done:
        _tell_other_weights(plan, run_dir, steps_done)
    note = describe_device_queues(plan.layout, kind, read_device_queues())
    if note:
        print(note, file=sys.stderr, flush=True)
    # A checkpoint holds the master weight (fp32) and two moments of every parameter.
    bytes_per_parameter = 4 + stored_nbytes(plan.workload.optimizer)
    require_space(run_dir, bytes_per_parameter * count_parameters(plan.model).total)
    copy_failure = _probe_copies(plan, run_dir, must_answer=not steps_done)
    hooks = hooks or LaunchHooks()
    report_failure = partial(_report_failure, plan, run_dir, hooks.report_failure)
    hooks.display.begin(plan, run_dir, last_step)
    keeps_ranks = hooks.keeps_ranks and partial(_keep_ranks, plan, run_dir, hooks.keeps_ranks)
    code = launch(
        partial(train_rank, plan, run_dir, last_step, falls_back, hooks.display.prints_steps),
        nproc=plan.layout.world_size,
        run_dir=run_dir,
        device=kind,
        timeouts=_choose_timeouts(plan),
        hooks=replace(
            hooks,
            before_start=partial(_begin_run, plan, run_dir, steps_done, copy_failure),
            report_failure=report_failure,
            keeps_ranks=keeps_ranks,
        ),
        local_ranks=local_ranks,
    )
    if _hosts_first_rank():
        _restore_plan(plan, run_dir)
    return code


def _report_failure(
    plan: Plan, run_dir: Path, report: Callable[[RankFailure], None], failure: RankFailure
) -> None:
    """Note a failure in the folder of the run, and report it.

    Under torchrun, where every rank reports its own, those that have only lost a peer note nothing.
    """
    if failure.kind is FailureKind.CAUSE or read_torchrun_env() is None:
        note_failure(run_dir, plan.layout, failure)
    report(failure)


def _keep_ranks(
    plan: Plan, run_dir: Path, keeps_ranks: Callable[[RankFailure], bool], failure: RankFailure
) -> bool:
    """Return whether the ranks that have not failed stay, and note the failure if they do."""
    is_kept = keeps_ranks(failure)
    if is_kept:
        note_failure(run_dir, plan.layout, failure)
    return is_kept


def _choose_timeouts(plan: Plan) -> Timeouts:
    """Return how long ranks wait for each other, and who watches them for a sign of life.

    The watch finds a hang long before a collective gives up.
    """
    workload = plan.workload
    hang_s = workload.hang_timeout_s
    if not hang_s:
        hang_s = max(_MIN_HANG_S, _STEPS_OF_A_HANG * plan.estimate.step_s)
    is_cpu = plan.hardware.device.kind is DeviceKind.CPU
    first_step_s = workload.first_step_timeout_s
    if not is_cpu or workload.fused_kernels not in _COMPILED_BEFORE:
        first_step_s = workload.compile_timeout_s
    return Timeouts(
        collective_s=max(_COLLECTIVE_S, hang_s),
        hang_s=hang_s,
        start_s=workload.start_timeout_s,
        first_step_s=first_step_s,
    )


def _tell_other_weights(plan: Plan, run_dir: Path, steps_done: int) -> None:
    """Say that weights are not read which the job names now, and did not when the run began.

    Adapters need the weights that they were trained beside: other ones are refused.
    """
    weights = plan.workload.weights
    with suppress(BadInput):
        before = read_json(Plan, run_dir / PLAN_FILE).workload.weights
        if weights not in ("", before) and not is_frozen(plan.workload):
            line = (
                f"model.weights: {weights} is not read: {run_dir} goes on from its own step "
                f"{steps_done}; it began with {before or 'weights of its own'}"
            )
            print(line, file=sys.stderr, flush=True)


def _probe_copies(plan: Plan, run_dir: Path, *, must_answer: bool) -> str:
    """Return why no copies can be made elsewhere, before the first step; "" where they can.

    Raises:
        BadInput: they must be possible, for nobody should learn it after a day of training; or
            they would be in the folder of the run.
    """
    url = plan.workload.checkpoint.copy_to
    if not url or not _hosts_first_rank():
        return ""
    failure = probe_copies(url, run_dir)
    if failure and must_answer:
        raise BadInput(Reason(field="checkpoint.copy_to", value=url, rule=failure))
    return failure and f"{url} {failure}"


def _begin_run(plan: Plan, run_dir: Path, steps_done: int, copy_failure: str) -> None:
    """Write the plan, and note that no copies can be made, where that was found."""
    _write_plan(plan, run_dir)
    if copy_failure:
        print(f"{copy_failure}: going on without", file=sys.stderr, flush=True)
        note_copy_failure(run_dir, plan.layout, step=steps_done, message=copy_failure)


def _write_plan(plan: Plan, run_dir: Path) -> None:
    """Write plan.json, and remove ledgers that were counted under another plan.

    A report predicts every ledger of the folder from plan.json, so all must be of one plan. Traces
    of another layout are put aside: a diagnosis reads them by the layout of plan.json.
    """
    path = run_dir / PLAN_FILE
    with suppress(BadInput):  # a damaged one is written anew
        before = read_json(Plan, path) if path.exists() else plan
        if path.exists() and before == plan:
            return
        if before.layout != plan.layout and (run_dir / TRACE_FOLDER).exists():
            aside = run_dir / f"earlier-{TRACE_FOLDER}"
            shutil.rmtree(aside, ignore_errors=True)
            (run_dir / TRACE_FOLDER).rename(aside)
            (run_dir / MERGED_TRACE_FILE).unlink(missing_ok=True)
    shutil.rmtree(run_dir / "ledger", ignore_errors=True)
    write_json(path, plan)


def _hosts_first_rank() -> bool:
    torchrun = read_torchrun_env()
    return torchrun is None or torchrun.rank == 0


def _restore_plan(plan: Plan, run_dir: Path) -> None:
    """Write plan.json where it is not there, or was damaged while the run went on.

    It is not there where all of a run came from a copy elsewhere.
    """
    path = run_dir / PLAN_FILE
    try:
        if path.exists():
            read_json(Plan, path)
            return
    except BadInput:
        pass
    write_json(path, plan)


def _find_last_step(workload: Workload, steps_done: int, extend: bool) -> int:
    """Return the step to stop at: the end of the recipe (`workload.steps` steps) under way.

    With `extend`, a run that stands at the end of a recipe goes on for one more.
    """
    recipes = max(1, -(-steps_done // workload.steps))
    if extend and steps_done == recipes * workload.steps:
        recipes += 1
    return recipes * workload.steps
