"""`moewright tune`: from a job's layout to a better one, by trials here or by predictions."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import Flag, SetOption
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.intake.job import JobFile
    from moewright.spec.hardware import Hardware
    from moewright.tuning.contract import Contract
    from moewright.tuning.decisions import AcceptanceRules, TuningResult
    from moewright.tuning.space import TuningSpace
    from moewright.tuning.trials import RunTrial, TrialFailure, TrialOutcome, TrialRequest

REPORT_FILE = "report.md"
PLAN_FILE = "plan.json"
MACHINE_FILE = "machine.toml"
MAX_MINUTES = 10_000.0
# Exit codes.
NOTHING_VALID = 1
STOPPED = 143
# What allocators, the kernel and the launcher say when there is no memory left, in lower case.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "killed by sigkill",
)
_MAX_MESSAGE = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRequest:
    """A tuning that can start."""

    job: JobFile
    space: TuningSpace
    contract: Contract


class _StoppedError(Exception):
    """A trial was stopped by SIGTERM or SIGINT."""


def tune(
    job: Path,
    /,
    *,
    budget_minutes: float = 0.0,
    on: str = "",
    predict: Flag = False,
    out: Path | None = None,
    set_: SetOption = None,
) -> int:
    """Tune the layout of a job by trials: fit, scale, profile, retune one variable, validate.

    A trial is a short run of the engine on this machine; a gain is one whose interval over pairs of
    runs, taken in turns, excludes noise. The winner runs 50 steps more. The same command goes on
    where it was stopped; report.md in the folder tells what was tried, plan.json is what `train`
    takes up, machine.toml the refitted hardware.

    Exit codes: 0 done, 1 nothing was found valid, 2 bad input, 143 stopped by a signal.

    Parameters
    ----------
    job
        The job file. Its layout is where tuning starts; its section tune says what may change,
        absent: whatever is usual.
    budget_minutes
        Stop trying after so long, and validate; no limit when not given.
    on
        Another machine, count x device; with --predict alone.
    predict
        Run nothing: the same procedure over predictions.
    out
        The folder of the tuning; runs/<name of the job file>_tune when not given.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    """
    from moewright.tuning.decisions import PREDICTION_RULES, AcceptanceRules
    from moewright.tuning.trials import predict_outcome

    _check_budget(budget_minutes)
    if on and not predict:
        rule = "trials run on this machine"
        raise BadInput(Reason(field="--on", value=on, rule=rule, nearest="--predict beside it"))
    folder = out or Path("runs") / f"{job.stem}_tune"
    request = read_tuning_request(job, on=on, predict=predict, overrides=tuple(set_ or ()))
    if predict:
        return _run_tuning(request, folder, predict_outcome, rules=PREDICTION_RULES, budget_s=0.0)
    try:
        return _run_tuning(
            request,
            folder,
            partial(run_trial, folder),
            rules=AcceptanceRules(),
            budget_s=60 * budget_minutes,
        )
    except _StoppedError:
        print(f"stopped; the same command goes on with {folder}", flush=True)
        return STOPPED


def _check_budget(minutes: float) -> None:
    if 0 <= minutes <= MAX_MINUTES:
        return
    nearest = "60" if isnan(minutes) else f"{min(max(minutes, 0.0), MAX_MINUTES):g}"
    rule = f"must be in 0..{MAX_MINUTES:g}, 0 for no limit"
    raise BadInput(
        Reason(field="--budget-minutes", value=f"{minutes:g}", rule=rule, nearest=nearest)
    )


def read_tuning_request(
    job: Path, *, on: str, predict: bool, overrides: tuple[str, ...]
) -> TuningRequest:
    """Return the space in which a job is tuned, with its contract.

    Raises:
        BadInput: The job cannot be tuned.
    """
    from moewright.api.requests import fill_attended_share, to_job_keys, translate_fields
    from moewright.codec import parse_layout
    from moewright.intake.job import read_job
    from moewright.rules.engine_limits import unsupported_layout
    from moewright.search.space import no_objections
    from moewright.tuning.contract import Label, build_contract, choose_label
    from moewright.tuning.space import TuningSpace, point_from_job
    from moewright.version import __version__

    job_file = read_job(job, overrides)
    data = ""
    torch_version = ""
    with translate_fields(to_job_keys(job)):
        if not predict:
            data, torch_version = _check_runnable(job_file)
        hardware = _read_hardware(job_file, on=on, predict=predict)
        workload = fill_attended_share(job_file.workload)
        job_file = replace(job_file, nproc=hardware.count, workload=workload)
        layout = parse_layout(job_file.layout_text, world_size=hardware.count)
        runs_here = partial(unsupported_layout, model=job_file.model, workload=workload)
        space = TuningSpace(
            model=job_file.model,
            workload=workload,
            hardware=hardware,
            start=point_from_job(layout, workload),
            axes=job_file.axes,
            allowed=no_objections if predict and on else runs_here,
        )
        if reasons := space.reasons_against(space.start):
            raise BadInput(*reasons)
    contract = build_contract(
        space,
        label=Label.PREDICTED if predict else choose_label(workload),
        versions=(__version__, torch_version),
        data=data,
    )
    return TuningRequest(job=job_file, space=space, contract=contract)


def _read_hardware(job: JobFile, *, on: str, predict: bool) -> Hardware:
    """Return the hardware to tune for; a machine file that trials need is measured if absent."""
    from moewright.api.requests import read_hardware
    from moewright.cli.bench import write_machine_file
    from moewright.intake import catalogue

    if on:
        return read_hardware(on)
    path = Path(job.hardware)
    if path.suffix == ".toml" and not path.exists() and not predict:
        print(f"{path} does not exist: measuring this machine")
        write_machine_file(path, nproc=job.nproc)
    return catalogue.hardware(f"{job.nproc}x{job.hardware}")


def _check_runnable(job: JobFile) -> tuple[str, str]:
    """Return the fingerprint of the data, and the version of torch.

    Raises:
        BadInput: Something other than the layout keeps the job from running.
    """
    import torch

    from moewright.engine.data.preflight import check_data
    from moewright.engine.run.env import read_torchrun_env
    from moewright.engine.run.process_limit import refuse_too_many_processes
    from moewright.rules.engine_limits import unsupported_model

    if read_torchrun_env() is not None:
        rule = "tuning starts its ranks itself"
        raise BadInput(Reason(field="torchrun", rule=rule, nearest="moewright tune"))
    refuse_too_many_processes(job.nproc, field="train.nproc")
    if reasons := unsupported_model(job.model, job.workload):
        raise BadInput(*reasons)
    return check_data(job.model, job.workload), str(torch.__version__)


def _run_tuning(
    request: TuningRequest,
    folder: Path,
    run_one: RunTrial,
    *,
    rules: AcceptanceRules,
    budget_s: float,
) -> int:
    """Carry the tuning out in its folder, and print each decision."""
    import time

    from moewright.codec import write_json, write_text, write_toml
    from moewright.engine.checkpoint.lock import lock_run_dir
    from moewright.report.tuning_markdown import format_decision, render_tuning
    from moewright.search.search import build_plan
    from moewright.spec.finding import Basis
    from moewright.tuning.contract import freeze_contract
    from moewright.tuning.journal import Journal
    from moewright.tuning.procedure import Tuner

    is_measured = rules.basis is Basis.MEASURED
    report_path = folder / REPORT_FILE
    printed = 0

    def watch(result: TuningResult) -> None:
        nonlocal printed
        for decision in result.decisions[printed:]:
            print(format_decision(decision, rules.basis), flush=True)
        printed = len(result.decisions)
        write_text(report_path, render_tuning(request.contract, result, basis=rules.basis))

    with lock_run_dir(folder):
        freeze_contract(request.contract, folder)
        if is_measured:
            run_one = Journal(folder, run_one, time.monotonic)
        tuner = Tuner(request.space, run_one, rules=rules, budget_s=budget_s, watch=watch)
        result = tuner.run()
        watch(result)
    if result.winner is None:
        print(f"no layout was found valid; {report_path} tells why")
        return NOTHING_VALID
    space = request.space
    hardware = tuner.predictor.learnt_hardware
    # Trials have no ramp of the batch; the plan has the job's own.
    workload = replace(result.winner.apply_to(space.workload), ramp=space.workload.ramp)
    plan = build_plan(space.model, workload, hardware, result.winner.layout)
    plan_path = folder / PLAN_FILE
    write_json(plan_path, plan)
    if is_measured:
        write_toml(folder / MACHINE_FILE, hardware)
    print(f"winner: {result.winner}; {report_path} tells what was tried, {plan_path} is its plan")
    return 0


def run_trial(folder: Path, request: TrialRequest) -> TrialOutcome:
    """Run the engine in a folder of its own, with its output beside it.

    The state that the run saved is deleted, its records stay.

    Raises:
        _StoppedError: A signal stopped the run.
    """
    from moewright.codec import fingerprint, read_run
    from moewright.engine.run.train import train
    from moewright.engine.run.worker import ExitCode
    from moewright.tuning.trials import TrialFailure, TrialOutcome, build_outcome

    name = f"{fingerprint(request.point)}-{request.length}-{request.repeat}"
    run_dir = folder / "trials" / name
    shutil.rmtree(run_dir, ignore_errors=True)  # of a trial that was killed
    run_dir.mkdir(parents=True)
    log = run_dir / "output.txt"
    try:
        with _redirect_output(log):
            code = train(request.plan, run_dir)
    except BadInput as error:
        return TrialOutcome(failure=TrialFailure.REFUSED, said=str(error))
    finally:
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    if code is ExitCode.STOPPED:
        raise _StoppedError
    if code is not ExitCode.DONE:
        output = log.read_text(encoding="utf-8", errors="replace")
        rank_lines = (line for line in output.splitlines() if line.startswith("rank "))
        message = next(rank_lines, f"ended with code {int(code)}")
        return TrialOutcome(failure=_classify_failure(output), said=message[:_MAX_MESSAGE])
    return build_outcome(read_run(run_dir), request.length)


def _classify_failure(output: str) -> TrialFailure:
    from moewright.tuning.trials import TrialFailure

    lowered = output.lower()
    if any(words in lowered for words in _NO_MEMORY):
        return TrialFailure.MEMORY
    return TrialFailure.OTHER


@contextmanager
def _redirect_output(path: Path) -> Iterator[None]:
    """Write standard output and error of this process, and of those it starts, into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with path.open("w", encoding="utf-8") as stream:
        try:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            with redirect_stdout(stream), redirect_stderr(stream):
                yield
        finally:
            for descriptor, old in enumerate(saved, 1):
                os.dup2(old, descriptor)
                os.close(old)
