"""Trials where the GPUs are: each a job of its own, of our engine or of Megatron-LM."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from moewright.codec import PLAN_FILE, fingerprint, write_json, write_text
from moewright.codec.files import name_shards
from moewright.exporters.slurm import (
    EXIT_FILE,
    OUTPUT_FILE,
    RUN_FOLDER,
    SCRIPT_FILE,
    render_trial_array,
    render_trial_script,
    sbatch_options,
)
from moewright.launching.trial_jobs import JobQueue, JobState, LocalQueue, SlurmQueue
from moewright.launching.trial_results import (
    TrialProgress,
    classify_failure,
    describe_failure,
    plan_start,
    read_engine_outcome,
    read_engine_progress,
    read_megatron_outcome,
    read_megatron_progress,
    read_output,
    shorten_message,
)
from moewright.spec.errors import BadInput, Verbatim
from moewright.spec.options import Launcher, Tell, TrialPlace, TrialTrainer
from moewright.spec.plan import Plan
from moewright.tuning.trials import TrialFailure, TrialLength, TrialOutcome, TrialRequest

TRIALS_FOLDER = "trials"
_JOB_FILE = "job.json"
_MOST_SUBMISSIONS = 3  # of a trial that is lost again and again
_UNKNOWN_POLLS = 5  # in a row after which a job that nobody knows is lost
# What Slurm says in the output of a job whose node went away, in lower case.
_NODE_LOST = ("due to node failure", "node failure on", "unable to confirm allocation for job")
_LONGEST_WAIT_S = 60.0  # for room in a queue
_LOOK_S = 0.2  # between two looks for a trial's exit code, which is a file
_MAX_TASKS = 1000  # of an array; Slurm takes 1,000 by default (MaxArraySize=1001)
_LEAST_STEPS = 3  # steady ones, by which a hopeless trial is told


class TrialStoppedError(Exception):
    """A trial was stopped by SIGTERM or SIGINT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A submitted trial: the name of its job, and how often it was submitted."""

    id: str
    submissions: int


class _SignalGate:
    """A gate that a signal waits at while a job is submitted and noted."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_stopped = False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise TrialStoppedError now, or when the gate opens."""
        self._is_stopped = True
        if not self._is_held:
            raise TrialStoppedError

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let no signal through meanwhile."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_stopped:
            raise TrialStoppedError


class LaunchedTrials:
    """Trials that run as jobs of a queue.

    A trial whose job outlived this program is found again by its folder; one whose job was lost,
    with its node or by a hand that was not ours, is submitted again.
    """

    def __init__(
        self, folder: Path, place: TrialPlace, queue: JobQueue, gate: _SignalGate | None = None
    ) -> None:
        self._gate = gate or _SignalGate()
        self._folder = folder / TRIALS_FOLDER
        self._start = plan_start(place)
        self._trainer = place.trainer
        self._at_once = place.at_once
        self._queue = queue
        self._jobs: dict[str, _Job] = {}  # by the name of the trial

    def __call__(self, request: TrialRequest) -> TrialOutcome:
        """Run a trial of a tuning to its end."""
        return self.run(request.plan, name_trial(request), request.length, request.hopeless_s)

    def announce(self, requests: Sequence[TrialRequest]) -> None:
        """Submit trials that will be asked for, as many as may be in the queue at once."""
        self.submit_ahead([(request.plan, name_trial(request)) for request in requests])

    def submit_ahead(self, trials: Sequence[tuple[Plan, str]]) -> None:
        """Submit plans under the names of their trials, so that `at_once` of them run.

        Those that ask the same of Slurm are one job array where nothing of ours is in the queue,
        jobs of their own while there is room otherwise. Where one trial at a time is asked for,
        nothing is submitted ahead.
        """
        if self._at_once == 1:
            return
        scripts: dict[str, str] = {}
        plans = {name: plan for plan, name in trials if not self._take_up(name)}
        for name, plan in plans.items():
            with suppress(BadInput):  # it is refused where it is asked for
                scripts[name] = self._render(plan, name)
        if len(scripts) > 1 and not self._jobs:
            self._submit_array(plans, scripts)
        for name in scripts:
            if len(self._jobs) < self._at_once and name not in self._jobs:
                with suppress(BadInput):
                    self._submit(plans[name], name)

    def run(
        self, plan: Plan, name: str, length: TrialLength, hopeless_s: float = 0.0
    ) -> TrialOutcome:
        """Run a plan's trial and return what it showed.

        Raises:
            TrialStoppedError: a signal stopped this program; the trial's job is cancelled.
        """
        folder = self._folder / name
        try:
            if name not in self._jobs:
                self._submit(plan, name)
        except BadInput as error:
            if any(reason.field in ("--sbatch", "--launcher") for reason in error.reasons):
                raise
            return TrialOutcome(failure=TrialFailure.REFUSED, said=Verbatim(str(error)))
        state = self._wait(name, plan, hopeless_s)
        self._jobs.pop(name, None)
        if state is JobState.LOST:
            message = f"its job was lost {_MOST_SUBMISSIONS} times"
            return TrialOutcome(failure=TrialFailure.OTHER, said=Verbatim(message))
        outcome = self._read(folder, plan, length, state)
        shutil.rmtree(folder / RUN_FOLDER / "checkpoints", ignore_errors=True)
        return outcome

    def stop(self) -> None:
        """Cancel every job that is still in the queue."""
        self._queue.cancel([job.id for job in self._jobs.values() if job.id])
        self._jobs.clear()

    def _submit(self, plan: Plan, name: str, submissions: int = 0) -> None:
        """Submit a trial, or take up the job that an earlier start of this program left."""
        folder = self._folder / name
        if not submissions and self._take_up(name):
            return
        self._jobs.pop(name, None)
        _write_trial(folder, plan, self._render(plan, name))
        wait_s = self._queue.poll_s
        while name not in self._jobs:
            with self._gate.hold():  # a job that was submitted and not noted would be left behind
                if job_id := self._queue.submit(folder / SCRIPT_FILE, folder / OUTPUT_FILE):
                    self._note_job(name, job_id, submissions + 1)
            if not job_id:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _submit_array(self, plans: Mapping[str, Plan], scripts: Mapping[str, str]) -> None:
        """Submit the trials that ask the same of Slurm as the first as one job array."""
        options = sbatch_options(next(iter(scripts.values())))
        alike = [name for name, script in scripts.items() if sbatch_options(script) == options]
        names = alike[:_MAX_TASKS]
        folder = self._folder / f"array-{fingerprint(tuple(names))}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for task, name in enumerate(names):
            _write_trial(self._folder / name, plans[name], scripts[name])
            # What Slurm itself says of a task, such as that its node went away, is printed there.
            (self._folder / name / OUTPUT_FILE).symlink_to(Path("..", folder.name, f"{task}.txt"))
        paths = [(self._folder / name / SCRIPT_FILE).resolve() for name in names]
        text = render_trial_array(paths, options, folder, self._at_once)
        write_text(folder / SCRIPT_FILE, text)
        with self._gate.hold():
            jobs = self._queue.submit_array(folder / SCRIPT_FILE, len(names))
            for name, job_id in zip(names, jobs, strict=False):  # all, or none was taken
                self._note_job(name, job_id, 1)

    def _render(self, plan: Plan, name: str) -> str:
        """Return the script of a trial; Megatron-LM is told each shard of the data."""
        is_megatron = self._trainer is TrialTrainer.MEGATRON
        plan = name_shards(plan) if is_megatron else plan
        return render_trial_script(plan, self._folder / name, self._start)

    def _note_job(self, name: str, job_id: str, submissions: int) -> None:
        self._jobs[name] = _Job(id=job_id, submissions=submissions)
        write_text(self._folder / name / _JOB_FILE, json.dumps({"job": job_id}))

    def _take_up(self, name: str) -> bool:
        """Tell whether a trial has a job, which an earlier start of this program may have left."""
        if name not in self._jobs and (job := self._find_left_job(self._folder / name)) is not None:
            self._jobs[name] = job
        return name in self._jobs

    def _find_left_job(self, folder: Path) -> _Job | None:
        """Return the job of a trial that ended, or still runs, after this program was killed."""
        try:
            job_id = str(json.loads((folder / _JOB_FILE).read_text(encoding="utf-8"))["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        state = self._queue.find_state(job_id)
        # In this order: a job may end while its state is asked for.
        if state in (JobState.LOST, JobState.UNKNOWN) and not (folder / EXIT_FILE).exists():
            return None
        return _Job(id=job_id, submissions=1)

    def _wait(self, name: str, plan: Plan, hopeless_s: float) -> JobState:
        """Wait for the end of a trial, submitting it again where its job is lost."""
        folder = self._folder / name
        unknown = 0
        while True:
            has_ended = self._ends_soon(folder)
            if has_ended and not _has_lost_node(folder):
                return JobState.ENDED
            state = self._queue.find_state(self._jobs[name].id)
            unknown = unknown + 1 if state is JobState.UNKNOWN else 0
            # What a node took with it is queued again, by Slurm itself or here.
            is_lost = state is JobState.LOST or unknown >= _UNKNOWN_POLLS
            is_lost = is_lost or (has_ended and state is JobState.ENDED)
            if is_lost:
                if self._jobs[name].submissions >= _MOST_SUBMISSIONS:
                    return JobState.LOST
                self._submit(plan, name, self._jobs[name].submissions)
                unknown = 0
            elif state in (JobState.ENDED, JobState.MEMORY, JobState.TIME):
                return state
            elif hopeless_s and self._is_hopeless(folder, hopeless_s):
                self._queue.cancel([self._jobs[name].id])
                return JobState.ENDED

    def _ends_soon(self, folder: Path) -> bool:
        """Wait until the queue may be asked again; True as soon as a trial has left its code."""
        deadline = time.monotonic() + self._queue.poll_s
        while time.monotonic() < deadline:
            if (folder / EXIT_FILE).exists():
                return True
            time.sleep(min(_LOOK_S, self._queue.poll_s))
        return (folder / EXIT_FILE).exists()

    def _is_hopeless(self, folder: Path, hopeless_s: float) -> bool:
        progress = self._read_progress(folder)
        return progress.steps >= _LEAST_STEPS and progress.step_s > hopeless_s

    def _read_progress(self, folder: Path) -> TrialProgress:
        if self._trainer is TrialTrainer.OURS:
            return read_engine_progress(folder)
        return read_megatron_progress(folder)

    def _read(self, folder: Path, plan: Plan, length: TrialLength, state: JobState) -> TrialOutcome:
        """Return what a trial that ended showed."""
        if state is JobState.MEMORY:
            message = "ended by the limit of the host's memory"
            return TrialOutcome(failure=TrialFailure.MEMORY, said=Verbatim(message))
        if state is JobState.TIME:
            message = "took longer than its time limit"
            return TrialOutcome(failure=TrialFailure.OTHER, said=Verbatim(message))
        code = _read_exit_code(folder)
        if code not in (0, None):  # None: cancelled because it is hopeless
            return _describe_end(read_output(folder), code)
        try:
            if self._trainer is TrialTrainer.MEGATRON:
                return read_megatron_outcome(folder, plan, length)
            return read_engine_outcome(folder, length)
        except BadInput as error:
            output = read_output(folder)
            message = describe_failure(output, str(error))
            return TrialOutcome(failure=classify_failure(output), said=Verbatim(message))


def _write_trial(folder: Path, plan: Plan, script: str) -> None:
    """Write what a trial needs into its folder, and nothing else is left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / PLAN_FILE, plan)
    write_text(folder / SCRIPT_FILE, script)


def _has_lost_node(folder: Path) -> bool:
    """Tell whether a trial failed because a node of it went away."""
    if _read_exit_code(folder) in (0, None):
        return False
    lowered = read_output(folder).lower()
    return any(words in lowered for words in _NODE_LOST)


def _describe_end(output: str, code: int | None) -> TrialOutcome:
    refusals = [line for line in output.splitlines() if line.startswith("moewright: ")]
    failure = classify_failure(output)
    if refusals and failure is not TrialFailure.MEMORY:
        return TrialOutcome(
            failure=TrialFailure.REFUSED, said=Verbatim(shorten_message(refusals[0]))
        )
    return TrialOutcome(
        failure=failure, said=Verbatim(describe_failure(output, f"ended with code {code}"))
    )


def _read_exit_code(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((folder / EXIT_FILE).read_text(encoding="utf-8"))
    return None


def name_trial(request: TrialRequest) -> str:
    """Return the name of a trial's folder."""
    return f"{fingerprint(request.point)}-{request.length}-{request.repeat}"


@contextmanager
def launch_trials(folder: Path, place: TrialPlace, tell: Tell) -> Iterator[LaunchedTrials]:
    """Run trials as jobs; whatever ends this, no job of theirs is left in the queue.

    Raises:
        TrialStoppedError: SIGTERM or SIGINT came meanwhile.
    """
    queue: JobQueue = SlurmQueue(tell) if place.launcher is Launcher.SLURM else LocalQueue()
    gate = _SignalGate()
    trials = LaunchedTrials(folder, place, queue, gate)
    try:
        with _raise_on(gate, signal.SIGTERM, signal.SIGINT):
            yield trials
    finally:
        trials.stop()


@contextmanager
def _raise_on(gate: _SignalGate, *numbers: signal.Signals) -> Iterator[None]:
    """Turn signals into TrialStoppedError; other threads than the first cannot be told so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before: list[tuple[signal.Signals, Callable[..., object] | int | None]] = [
        (number, signal.signal(number, gate.stop)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
