"""`moewright tune`: from a job's layout to a better one, by trials here or by predictions for
another machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.intake.job import JobFile
    from moewright.spec.hardware import Hardware
    from moewright.tuning.contract import Contract
    from moewright.tuning.decisions import AcceptanceRules, TuningResult
    from moewright.tuning.space import TuningSpace
    from moewright.tuning.trials import RunTrial, TrialOutcome, TrialRequest

REPORT_FILE, PLAN_FILE, MACHINE_FILE = "report.md", "plan.json", "machine.toml"
MAX_MINUTES = 10_000.0
NOTHING_VALID, STOPPED = 1, 143
# What allocators, the kernel and the launcher say when there is no memory left.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "MemoryError",
    "killed by SIGKILL",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRequest:
    """A tuning that can start."""

    job: JobFile
    space: TuningSpace
    contract: Contract


class _StoppedError(Exception):
    """SIGTERM or SIGINT came during a trial."""


def tune(
    job: Path,
    /,
    *,
    budget_minutes: float = 0.0,
    on: str = "",
    predict: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
) -> int:
    """Tune the layout of a job by trials on this machine: fit, scale, profile, retune one variable,
    validate.

    A trial is a short run of the engine; a gain is one whose interval over pairs of runs, taken in
    turns, excludes noise. The winner runs 50 steps more. The same command goes on where it was
    stopped; report.md in the folder tells what was tried, plan.json is what `train` takes up,
    machine.toml the refitted hardware.

    Exit codes: 0 done, 1 nothing was found valid, 2 bad input, 143 stopped by a signal.

    Parameters
    ----------
    job
        The job file. Its layout is where tuning starts; its section tune says what may change, absent: whatever is
        usual.
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

    if not 0 <= budget_minutes <= MAX_MINUTES:
        close = (
            f"{min(max(budget_minutes, 0.0), MAX_MINUTES):g}"
            if budget_minutes == budget_minutes
            else "60"
        )
        rule = f"must be in 0..{MAX_MINUTES:g}, 0 for no limit"
        raise BadInput(
            Reason(field="--budget-minutes", value=f"{budget_minutes:g}", rule=rule, nearest=close)
        )
    if on and not predict:
        raise BadInput(
            Reason(
                field="--on",
                value=on,
                rule="trials run on this machine",
                nearest="--predict beside it",
            )
        )
    folder = out or Path("runs") / f"{job.stem}_tune"
    asked = read_tuning_request(job, on=on, predict=predict, overrides=tuple(set_ or ()))
    if predict:
        return _tuned(asked, folder, predict_outcome, rules=PREDICTION_RULES, budget_s=0.0)
    try:
        return _tuned(
            asked,
            folder,
            partial(run_trial, folder),
            rules=AcceptanceRules(),
            budget_s=60 * budget_minutes,
        )
    except _StoppedError:
        print(f"stopped; the same command goes on with {folder}", flush=True)
        return STOPPED


def read_tuning_request(
    job: Path, *, on: str, predict: bool, overrides: tuple[str, ...]
) -> TuningRequest:
    """The job as a space to tune in, with its contract. Raises BadInput for a job that cannot be
    tuned."""
    from moewright import __version__
    from moewright.cli.plan_request import fill_attended_share, to_job_keys, translate_fields
    from moewright.codec import parse_layout
    from moewright.intake.job import read_job
    from moewright.rules.engine_limits import unsupported_layout
    from moewright.search.space import no_objections
    from moewright.tuning.contract import Label, build_contract, choose_label
    from moewright.tuning.space import TuningSpace, point_from_job

    asked = read_job(job, overrides)
    with translate_fields(to_job_keys(job)):
        data, torch = ("", "") if predict else _runnable(asked)
        hardware = _hardware(asked, on=on, predict=predict)
        asked = replace(asked, nproc=hardware.count, workload=fill_attended_share(asked.workload))
        layout = parse_layout(asked.layout_text, world_size=hardware.count)
        allowed = partial(unsupported_layout, model=asked.model, workload=asked.workload)
        space = TuningSpace(
            model=asked.model,
            workload=asked.workload,
            hardware=hardware,
            start=point_from_job(layout, asked.workload),
            axes=asked.axes,
            allowed=no_objections if predict and on else allowed,
        )
        if reasons := space.reasons_against(space.start):
            raise BadInput(*reasons)
    contract = build_contract(
        asked.model,
        asked.workload,
        hardware,
        start=space.start,
        axes=asked.axes,
        label=Label.PREDICTED if predict else choose_label(asked.workload),
        versions=(__version__, torch),
        data=data,
    )
    return TuningRequest(job=asked, space=space, contract=contract)


def _hardware(job: JobFile, *, on: str, predict: bool) -> Hardware:
    from moewright.cli.bench import write_machine_file
    from moewright.cli.plan_request import translate_fields
    from moewright.intake import catalogue

    if on:
        with translate_fields(lambda field: "--on" if field == "hardware" else field):
            return catalogue.hardware(on)
    path = Path(job.hardware)
    if path.suffix == ".toml" and not path.exists() and not predict:
        print(f"{path} is not there: measuring this machine")
        write_machine_file(path, nproc=job.nproc)
    return catalogue.hardware(f"{job.nproc}x{job.hardware}")


def _runnable(job: JobFile) -> tuple[str, str]:
    """Fingerprint of the data and version of torch, once nothing but the layout can keep the job
    from running."""
    import torch

    from moewright.engine.data.preflight import check_data
    from moewright.engine.run.env import read_torchrun_env
    from moewright.engine.run.process_limit import refuse_too_many_processes
    from moewright.rules.engine_limits import unsupported_model

    if read_torchrun_env() is not None:
        raise BadInput(
            Reason(
                field="torchrun", rule="tuning starts its ranks itself", nearest="moewright tune"
            )
        )
    refuse_too_many_processes(job.nproc, field="train.nproc")
    if reasons := unsupported_model(job.model, job.workload):
        raise BadInput(*reasons)
    return check_data(job.model, job.workload), str(torch.__version__)


def _tuned(
    asked: TuningRequest,
    folder: Path,
    run_one: RunTrial,
    *,
    rules: AcceptanceRules,
    budget_s: float,
) -> int:
    """Carry the tuning out in its folder, and say at each decision where it stands."""
    import time

    from moewright.codec import write_json, write_text, write_toml
    from moewright.engine.checkpoint.lock import lock_run_dir
    from moewright.report.tuning_markdown import format_decision, render_tuning
    from moewright.search.search import build_plan
    from moewright.spec.finding import Basis
    from moewright.tuning.contract import freeze_contract
    from moewright.tuning.journal import Journal
    from moewright.tuning.procedure import Tuner

    measured = rules.basis is Basis.MEASURED
    said = 0

    def watch(result: TuningResult) -> None:
        nonlocal said
        for decision in result.decisions[said:]:
            print(format_decision(decision, rules.basis), flush=True)
        said = len(result.decisions)
        write_text(folder / REPORT_FILE, render_tuning(asked.contract, result, basis=rules.basis))

    with lock_run_dir(folder):
        freeze_contract(asked.contract, folder)
        journal = Journal(folder, run_one, time.monotonic) if measured else run_one
        tuning = Tuner(asked.space, journal, rules=rules, budget_s=budget_s, watch=watch)
        result = tuning.run()
        watch(result)
    if result.winner is None:
        print(f"nothing was found valid; {folder / REPORT_FILE} tells why")
        return NOTHING_VALID
    space, winner = asked.space, result.winner
    workload = replace(winner.apply_to(space.workload), ramp=space.workload.ramp)
    plan = build_plan(space.model, workload, tuning.predictor.learnt_hardware, winner.layout)
    write_json(folder / PLAN_FILE, plan)
    if measured:
        write_toml(folder / MACHINE_FILE, tuning.predictor.learnt_hardware)
    print(
        f"winner: {winner}; {folder / REPORT_FILE} tells what was tried, {folder / PLAN_FILE} is its plan"
    )
    return 0


def run_trial(folder: Path, ask: TrialRequest) -> TrialOutcome:
    """Run the engine in a folder of its own, its output beside it; the state that it saved goes,
    its records stay."""
    from moewright.codec import fingerprint, read_run
    from moewright.engine.run.train import train
    from moewright.engine.run.worker import ExitCode
    from moewright.tuning.trials import TrialFailure, TrialOutcome, build_outcome

    place = folder / "trials" / f"{fingerprint(ask.point)}-{ask.length}-{ask.repeat}"
    shutil.rmtree(place, ignore_errors=True)  # of a trial that was killed
    place.mkdir(parents=True)
    log = place / "output.txt"
    try:
        with _output_to(log):
            code = train(ask.plan, place)
    except BadInput as error:
        return TrialOutcome(failure=TrialFailure.REFUSED, said=str(error))
    finally:
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    if code is ExitCode.STOPPED:
        raise _StoppedError
    if code is not ExitCode.DONE:
        text = log.read_text(encoding="utf-8", errors="replace")
        failure = (
            TrialFailure.MEMORY
            if any(word.lower() in text.lower() for word in _NO_MEMORY)
            else TrialFailure.OTHER
        )
        said = next(
            (one for one in text.splitlines() if one.startswith("rank ")),
            f"ended with code {int(code)}",
        )
        return TrialOutcome(failure=failure, said=said[:200])
    return build_outcome(read_run(place), ask.length)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Standard output and error of this process, and of those it starts, into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("w", encoding="utf-8") as stream:
        try:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            with redirect_stdout(stream), redirect_stderr(stream):
                yield
        finally:
            for place, old in enumerate(kept, 1):
                os.dup2(old, place)
                os.close(old)
