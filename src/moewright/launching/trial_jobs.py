"""Jobs of trials: processes of this machine, or jobs in Slurm's queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from moewright.spec.errors import BadInput, Reason, escape_controls
from moewright.spec.options import Tell

_PATIENCE_S = 10.0  # of a process that was told to end
_CALL_S = 60.0  # of a command of Slurm
_SHOWN = 200  # letters of a message
# What sbatch says where a queue takes no more for now, or nobody answers, in lower case.
_BUSY = (
    "qosmaxsubmitjob",
    "assocmaxsubmitjob",
    "job violates accounting/qos policy",
    "maxjobcount",
    "slurm temporarily unable to accept job",
    "unable to contact slurm controller",
    "socket timed out",
    "resource temporarily unavailable",
    "connection refused",
    "zero bytes were transmitted",
    "transport endpoint is not connected",
)


class JobState(StrEnum):
    """What a scheduler says of a job."""

    ACTIVE = "active"  # waiting, running, or ending
    ENDED = "ended"
    LOST = "lost"  # with its node, or by somebody else's hand
    MEMORY = "memory"  # ended by the limit of the host's memory
    TIME = "time"  # ended by its time limit
    UNKNOWN = "unknown"  # nobody knows it, or nobody answers


_STATES = {
    **dict.fromkeys(
        (
            *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"),
            *("REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"),
        ),
        JobState.ACTIVE,
    ),
    **dict.fromkeys(("COMPLETED", "FAILED"), JobState.ENDED),
    **dict.fromkeys(
        (
            "CANCELLED",
            "NODE_FAIL",
            "BOOT_FAIL",
            "PREEMPTED",
            "REVOKED",
            "DEADLINE",
            "LAUNCH_FAILED",
        ),
        JobState.LOST,
    ),
    "OUT_OF_MEMORY": JobState.MEMORY,
    "TIMEOUT": JobState.TIME,
}


class JobQueue(Protocol):
    """What starts scripts and knows what became of them."""

    poll_s: float  # between two questions after a job

    def submit(self, script: Path, output: Path) -> str:
        """Start a script and return the name of its job; "" while there is no room for it."""

    def submit_array(self, script: Path, tasks: int) -> tuple[str, ...]:
        """Start a script once for each task and return their jobs; none where it is not taken."""

    def find_state(self, job: str) -> JobState:
        """Return what is known of a job."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs that are waiting or running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    process: subprocess.Popen[bytes]


class LocalQueue:
    """Scripts that run on this machine, one as soon as it is submitted."""

    poll_s = 0.1

    def __init__(self) -> None:
        self._started: dict[str, _Started] = {}

    def submit(self, script: Path, output: Path) -> str:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job = f"{process.pid}:{script}"
        self._started[job] = _Started(process=process)
        return job

    def submit_array(self, script: Path, tasks: int) -> tuple[str, ...]:
        """Take no arrays: trials of one machine would slow each other."""
        return ()

    def find_state(self, job: str) -> JobState:
        """Return the state of a process that this program started, or an earlier start of it."""
        started = self._started.get(job)
        if started is None:
            if _is_alive(job):
                return JobState.ACTIVE
            return JobState.LOST
        code = started.process.poll()
        if code is None:
            return JobState.ACTIVE
        if code == -signal.SIGKILL:
            return JobState.MEMORY
        return JobState.ENDED

    def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            if job not in self._started and _is_alive(job):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(job.partition(":")[0]), signal.SIGKILL)
        processes = [self._started[job].process for job in jobs if job in self._started]
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            # Ranks that outlive the script that started them are of its session.
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _is_alive(job: str) -> bool:
    """Tell whether the process of a job still runs its script."""
    pid, _, script = job.partition(":")
    try:
        words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return False
    return script.encode() in words


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class SlurmQueue:
    """Slurm's queue, through sbatch, squeue, sacct and scancel.

    A queue that is full, and a controller that does not answer, are waited for.
    """

    poll_s = 2.0

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._is_told = False  # that the queue is full

    def submit(self, script: Path, output: Path) -> str:
        """Submit a script, whose output goes where its own options say; "" while there is no room.

        Raises:
            BadInput: sbatch is not there, or refuses the options.
        """
        number, answer = _submit(script)
        if number:
            return number
        if any(words in answer.error.lower() for words in _BUSY):
            if not self._is_told:
                self._tell(f"waiting to submit: {_shorten(answer.error)}")
            self._is_told = True
            return ""
        rule = f"sbatch refuses the trial: {_shorten(answer.error or answer.out)}"
        nearest = '--sbatch "--partition NAME --account NAME --time 30"'
        raise BadInput(Reason(field="--sbatch", rule=rule, nearest=nearest))

    def submit_array(self, script: Path, tasks: int) -> tuple[str, ...]:
        """Submit a job array; none where there is no room for the whole, or arrays are refused.

        Raises:
            BadInput: sbatch is not there.
        """
        number, _ = _submit(script)
        if number:
            return tuple(f"{number}_{task}" for task in range(tasks))
        return ()

    def find_state(self, job: str) -> JobState:
        """Return what squeue says of a job, or where it has forgotten the job, sacct."""
        answer = _call("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        if answer.code == 0 and answer.out.strip():
            return _read_state(answer.out)
        if any(words in answer.error.lower() for words in _BUSY):
            return JobState.ACTIVE  # of an unknown kind: asked again
        answer = _call("sacct", "-n", "-X", "-P", "-o", "State", "-j", job)
        if answer.code == 0 and answer.out.strip():
            return _read_state(answer.out)
        return JobState.UNKNOWN

    def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            _call("scancel", *jobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    code: int
    out: str
    error: str


def _submit(script: Path) -> tuple[str, _Answer]:
    """Return the number of the job that sbatch made of a script, "" for none, and its answer."""
    answer = _call("sbatch", "--parsable", str(script))
    match = re.search(r"^\s*(\d+)", answer.out, re.MULTILINE)
    return (match[1] if match and answer.code == 0 else ""), answer


def _call(*words: str) -> _Answer:
    """Call a command of Slurm.

    Raises:
        BadInput: it is not installed.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CALL_S,
            check=False,
            start_new_session=True,  # an interrupt at the terminal is not for it
        )
    except FileNotFoundError:
        if words[0] == "sacct":
            return _Answer(code=1, out="", error="no accounting")
        rule = f"needs Slurm: there is no {words[0]} here"
        raise BadInput(
            Reason(field="--launcher", value="slurm", rule=rule, nearest="a login node, or local")
        ) from None
    except subprocess.TimeoutExpired:
        return _Answer(code=1, out="", error="socket timed out")
    return _Answer(code=done.returncode, out=done.stdout, error=done.stderr)


def _read_state(text: str) -> JobState:
    """Return the state that a line of squeue or sacct says, such as "CANCELLED by 0"."""
    word = text.strip().splitlines()[-1].split()[0].rstrip("+")
    return _STATES.get(word, JobState.UNKNOWN)


def _shorten(text: str) -> str:
    return escape_controls(" ".join(text.split()))[:_SHOWN]
