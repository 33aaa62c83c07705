"""Tuning a job: the space it is tuned in, its trials on this machine, and what they led to."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path

from moewright.api.machines import measure_unmeasured, read_job_hardware
from moewright.api.requests import (
    fill_attended_share,
    read_hardware,
    to_job_keys,
    translate_fields,
)
from moewright.codec import (
    PLAN_FILE,
    parse_layout,
    read_run,
    write_json,
    write_text,
    write_toml,
)
from moewright.engine.observe.display import STEP_LINES, RunDisplay
from moewright.engine.run.early_checks import refuse_too_many_processes
from moewright.engine.run.env import read_torchrun_env
from moewright.intake.job import JobFile, read_job
from moewright.launching.launched_trials import (
    TRIALS_FOLDER,
    TrialStoppedError,
    launch_trials,
    name_trial,
)
from moewright.launching.trial_results import classify_failure, describe_failure, plan_start
from moewright.report.document import render_markdown
from moewright.report.tuning_document import build_tuning_document, format_decision
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout, unsupported_model
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.search.search import build_plan
from moewright.search.space import layout_objections, no_objections
from moewright.spec.errors import BadInput, Reason, Verbatim
from moewright.spec.finding import Basis
from moewright.spec.hardware import Hardware
from moewright.spec.options import HERE, Launcher, Tell, TrialPlace
from moewright.spec.plan import Plan
from moewright.tuning.decisions import PREDICTION_RULES, AcceptanceRules, TuningResult
from moewright.tuning.journal import (
    Contract,
    Journal,
    Label,
    announce_new,
    build_contract,
    choose_label,
    freeze_contract,
)
from moewright.tuning.procedure import Tuner
from moewright.tuning.space import TuningSpace, point_from_job
from moewright.tuning.trials import (
    Announce,
    RunTrial,
    TrialFailure,
    TrialOutcome,
    TrialRequest,
    announce_nothing,
    build_outcome,
    predict_outcome,
)
from moewright.version import __version__

REPORT_FILE = "report.md"
MACHINE_FILE = "machine.toml"
MAX_MINUTES = 10_000.0  # about a week


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRequest:
    """A tuning that can start."""

    space: TuningSpace
    contract: Contract


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningAnswer:
    """What a tuning came to; `plan` is None where no layout was found valid."""

    result: TuningResult
    plan: Plan | None
    folder: Path


def tune_by_trials(
    request: TuningRequest,
    folder: Path,
    *,
    budget_minutes: float,
    tell: Tell,
    place: TrialPlace = HERE,
    display: RunDisplay = STEP_LINES,
) -> TuningAnswer:
    """Tune by short runs, of the engine on this machine or as the place says.

    A budget of 0 minutes is none. `display` shows each run of the engine here.

    Raises:
        TrialStoppedError: a signal stopped a trial; the same call goes on with the folder.
    """
    rules = AcceptanceRules()
    budget_s = 60 * budget_minutes
    if place.is_in_process:
        run_one = partial(run_trial, folder, display)
        return _tune(request, folder, run_one, rules=rules, budget_s=budget_s, tell=tell)
    with launch_trials(folder, place, tell) as trials:
        return _tune(
            request,
            folder,
            trials,
            rules=rules,
            budget_s=budget_s,
            tell=tell,
            announce=trials.announce,
        )


def tune_by_predictions(request: TuningRequest, folder: Path, tell: Tell) -> TuningAnswer:
    """Tune by the same procedure over predictions: nothing is run."""
    return _tune(request, folder, predict_outcome, rules=PREDICTION_RULES, budget_s=0.0, tell=tell)


def check_budget(minutes: float) -> None:
    """Refuse a budget that is no number of minutes."""
    if 0 <= minutes <= MAX_MINUTES:
        return
    nearest = "60"
    if not isnan(minutes):
        nearest = f"{min(max(minutes, 0.0), MAX_MINUTES):g}"
    rule = f"must be in 0..{MAX_MINUTES:g}, 0 for no limit"
    raise BadInput(
        Reason(field="--budget-minutes", value=f"{minutes:g}", rule=rule, nearest=nearest)
    )


def read_tuning_request(
    job: Path,
    *,
    on: str,
    predict: bool,
    overrides: tuple[str, ...],
    tell: Tell,
    place: TrialPlace = HERE,
) -> TuningRequest:
    """Return the space in which a job is tuned, with its contract.

    Raises:
        BadInput: the job cannot be tuned.
    """
    job_file = read_job(job, overrides)
    data = ""
    torch_version = ""
    with translate_fields(to_job_keys(job)):
        start = plan_start(place)
        if not predict and not start.trainer_script:
            data, torch_version = _check_runnable(job_file, place)
        # Trials of Slurm run on other machines than this one.
        measures_here = not predict and place.launcher is not Launcher.SLURM
        measures_here = measures_here and not start.trainer_script
        hardware = _read_tuning_hardware(job_file, on=on, measures=measures_here, tell=tell)
        workload = fill_attended_share(job_file.workload)
        layout = parse_layout(job_file.layout_text, world_size=hardware.count)
        refuse: Callable[[Job], tuple[Reason, ...]] = unsupported_layout
        if start.trainer_script:
            refuse = partial(megatron_refusals, hardware=hardware)
        allowed = layout_objections(job_file.model, workload, refuse)
        space = TuningSpace(
            model=job_file.model,
            workload=workload,
            hardware=hardware,
            start=point_from_job(layout, workload),
            axes=job_file.axes,
            # A prediction for other devices is of no engine's layouts.
            allowed=no_objections if predict and on else allowed,
        )
        if reasons := space.reasons_against(space.start):
            raise BadInput(*reasons)
    label = Label.PREDICTED if predict else choose_label(workload)
    versions = (__version__, torch_version)
    contract = build_contract(
        space,
        label=label,
        versions=versions,
        data=data,
        trainer=start.trainer_script or "moewright",
    )
    return TuningRequest(space=space, contract=contract)


def _read_tuning_hardware(job: JobFile, *, on: str, measures: bool, tell: Tell) -> Hardware:
    """Return the hardware to tune for; a machine file that trials need is measured if absent."""
    if on:
        return read_hardware(on)
    if measures:
        measure_unmeasured(job, tell)
    return read_job_hardware(job)


def _check_runnable(job: JobFile, place: TrialPlace) -> tuple[str, str]:
    """Return the fingerprint of the data, and the version of torch.

    Raises:
        BadInput: something other than the layout keeps the job from running.
    """
    import torch

    from moewright.engine.data.preflight import check_data

    if read_torchrun_env() is not None:
        rule = "tuning starts its ranks itself"
        raise BadInput(Reason(field="torchrun", rule=rule, nearest="moewright tune"))
    if place.launcher is not Launcher.SLURM:
        refuse_too_many_processes(job.nproc, field="train.nproc")
    if reasons := unsupported_model(job.model, job.workload):
        raise BadInput(*reasons)
    return check_data(job.model, job.workload), str(torch.__version__)


def _tune(
    request: TuningRequest,
    folder: Path,
    run_one: RunTrial,
    *,
    rules: AcceptanceRules,
    budget_s: float,
    tell: Tell,
    announce: Announce = announce_nothing,
) -> TuningAnswer:
    """Carry the tuning out in its folder, and tell each decision."""
    from moewright.codec.folder_lock import lock_folder

    told = 0

    def watch(result: TuningResult) -> None:
        nonlocal told
        for decision in result.decisions[told:]:
            tell(format_decision(decision, rules.basis))
        told = len(result.decisions)
        document = build_tuning_document(request.contract, result, basis=rules.basis)
        text = render_markdown(document)
        write_text(folder / REPORT_FILE, text)

    # Two tunings of a folder would write one journal.
    with lock_folder(folder):
        freeze_contract(request.contract, folder)
        if rules.basis is Basis.MEASURED:
            journal = Journal(folder, run_one, time.monotonic)
            run_one = journal
            announce = announce_new(journal, announce)
        tuner = Tuner(
            request.space,
            run_one,
            rules=rules,
            budget_s=budget_s,
            watch=watch,
            announce=announce,
        )
        result = tuner.run()
        watch(result)
    if result.winner is None:
        return TuningAnswer(result=result, plan=None, folder=folder)
    space = request.space
    hardware = tuner.predictor.learnt_hardware
    # Trials have no ramp of the batch; the plan has the job's own.
    workload = replace(result.winner.apply_to(space.workload), ramp=space.workload.ramp)
    plan = build_plan(space.model, workload, hardware, result.winner.layout)
    write_json(folder / PLAN_FILE, plan)
    if rules.basis is Basis.MEASURED:
        # With the constants that the trials have taught.
        write_toml(folder / MACHINE_FILE, hardware)
    return TuningAnswer(result=result, plan=plan, folder=folder)


def run_trial(folder: Path, display: RunDisplay, request: TrialRequest) -> TrialOutcome:
    """Run the engine in a folder of its own, with its output in a file of that folder.

    The state that the run saved is deleted, its records stay.

    Raises:
        TrialStoppedError: a signal stopped the run.
    """
    from moewright.engine.run.launch import LaunchHooks
    from moewright.engine.run.train import train
    from moewright.engine.run.worker import ExitCode

    run_dir = folder / TRIALS_FOLDER / name_trial(request)
    shutil.rmtree(run_dir, ignore_errors=True)  # of a trial that was killed
    run_dir.mkdir(parents=True)
    log = run_dir / "output.txt"
    try:
        with _redirect_output(log):
            code = train(request.plan, run_dir, hooks=LaunchHooks(display=display))
    except BadInput as error:
        return TrialOutcome(failure=TrialFailure.REFUSED, said=Verbatim(str(error)))
    finally:
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    if code is ExitCode.STOPPED:
        raise TrialStoppedError
    if code is not ExitCode.DONE:
        output = log.read_text(encoding="utf-8", errors="replace")
        message = describe_failure(output, f"ended with code {int(code)}")
        return TrialOutcome(failure=classify_failure(output), said=Verbatim(message))
    return build_outcome(read_run(run_dir), request.length)


@contextmanager
def _redirect_output(path: Path) -> Iterator[None]:
    """Write standard output and error of this process, and of those it starts, into a file."""
    # What is buffered belongs to what came before.
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with path.open("w", encoding="utf-8") as stream:
        try:
            # Descriptors too: ranks are processes of their own, which inherit them.
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            with redirect_stdout(stream), redirect_stderr(stream):
                yield
        finally:
            for descriptor, old in enumerate(saved, 1):
                os.dup2(old, descriptor)
                os.close(old)
