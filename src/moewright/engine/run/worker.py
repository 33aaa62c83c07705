"""What a rank has besides its model: who it is, a stop flag, a heartbeat, a note when it fails."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import IntEnum, StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import torch

from moewright.codec.processes import die_with_parent
from moewright.engine.observe.counters import NoteActivity, ignore_activity
from moewright.engine.run.rendezvous import Rendezvous, open_rendezvous

# torch.distributed re-exports these, but type checkers do not see it.
from moewright.engine.torch_private import FileStore, Store
from moewright.spec.errors import BadInput, Reason, lacks_memory
from moewright.spec.hardware import DeviceKind
from moewright.spec.run import IncidentKind
from moewright.spec.units import mention

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STACK_SIGNAL = signal.SIGUSR1
# A heartbeat: seconds of the monotonic clock, which all processes of a machine share; the step; the
# steps that this session has begun; whether the rank waits for others; what it does.
_BEAT = struct.Struct("<dqi??114s")
# Heartbeats that a file holds: it is the rank's flight record, which outlives the rank.
_RECORDS = 64
_PEER_LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out",
    "timed out",
    "wait timeout",
    "NCCL error",
    "remote process exited",
)
# What a pipe of Linux holds, and how much of each text of a failure is sent through one.
_PIPE_BYTES = 1 << 16
_MAX_NOTE_CHARACTERS = 1 << 13


class ExitCode(IntEnum):
    """The exit codes of a job."""

    DONE = 0
    BAD_INPUT = 2
    RANK_FAILED = 3
    STOPPED = 143  # saved on SIGTERM


class RankOutcome(StrEnum):
    """The end of a worker: DONE, or STOPPED because the ranks agreed on a stop and saved."""

    DONE = "done"
    STOPPED = "stopped"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a process that ends so."""
        return ExitCode[self.name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """The time that ranks wait for each other; the only place that states it.

    `collective_s` is the timeout of every process group. A rank that does not wait for others and
    has not beaten for `hang_s` and a margin is taken to hang, or any where all wait; 0: after
    `collective_s`. A worker notes what it does at least that often. Before the first step of a
    session patience is `start_s`, and in the first one `first_step_s`, where those are longer; with
    what it calls slow it is `collective_s`, for as long as the others wait for it.
    """

    rendezvous_s: float = 60.0
    collective_s: float = 600.0
    hang_s: float = 0.0
    start_s: float = 0.0
    first_step_s: float = 0.0


class StopFlag:
    """A flag that SIGTERM or SIGINT sets and the trainer polls.

    More signals change nothing, so a save is not interrupted.
    """

    def __init__(self) -> None:
        self._requested = False

    def install(self) -> None:
        """Take the signals of this process; main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._request)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A sign of life of a rank: what it began to do, and when on the monotonic clock."""

    time_s: float
    step: int
    steps_begun: int
    is_waiting: bool
    is_slow: bool
    activity: str


class Heartbeat:
    """A file with the last things that a rank began to do, for the launcher."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # All its room is taken now, so that a disk that fills up later does not stop it.
        os.pwrite(self._handle, bytes(_BEAT.size * _RECORDS), 0)
        self._step = 0
        self._steps_begun = 0
        self._count = 0

    @property
    def step(self) -> int:
        """The step of the last beat."""
        return self._step

    def beat(self, step: int) -> None:
        """Note that the rank starts a step now, or goes on with it; step 0 begins a session."""
        self._steps_begun = self._steps_begun + (step > self._step) if step else 0
        self._step = step
        self.note("begins the step")

    def note(self, activity: str, *, is_waiting: bool = False, is_slow: bool = False) -> None:
        """Note what the rank begins to do."""
        text = activity.encode()[:114]
        times = time.monotonic(), self._step, self._steps_begun
        record = _BEAT.pack(*times, is_waiting, is_slow, text)
        os.pwrite(self._handle, record, self._count % _RECORDS * _BEAT.size)
        self._count += 1


def read_beats(path: Path) -> list[Beat]:
    """Read the heartbeats of a rank, the oldest first; none before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    beats = []
    for fields in _BEAT.iter_unpack(data[: len(data) // _BEAT.size * _BEAT.size]):
        time_s, step, steps_begun, is_waiting, is_slow, text = fields
        if not time_s:  # no heartbeat yet
            continue
        beats.append(
            Beat(
                time_s=time_s,
                step=step,
                steps_begun=steps_begun,
                is_waiting=is_waiting,
                is_slow=is_slow,
                activity=text.rstrip(b"\0").decode(errors="replace"),
            )
        )
    return sorted(beats, key=lambda beat: beat.time_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The facts that a rank is told before it starts.

    Ranks meet over a file of the launcher, or at the address that torchrun gives.
    """

    rank: int
    local_rank: int
    world_size: int
    timeouts: Timeouts
    device: DeviceKind
    rendezvous: Path | Rendezvous


def rank_file_path(folder: Path, kind: str, rank: int) -> Path:
    """Return the file of a rank in the launcher's folder: "beat", "met" or "stack"."""
    return folder / f"{kind}-{rank:05d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The context that a worker is called with.

    It calls `beat(step)` at the start of every step, and `note` with what it begins to do in it;
    `stop.requested` is this rank's own flag. Over `calls` the launcher calls ranks together again
    when one has died (see run_in_sessions); `on_loss` are closed then.
    """

    info: RankInfo
    stop: StopFlag
    beat: Callable[[int], None]
    note: NoteActivity = ignore_activity
    calls: Connection | None = None
    on_loss: ExitStack = field(default_factory=ExitStack)

    def close_on_loss(self, close: Callable[[], None]) -> None:
        """Have `close` called when another rank is lost, before what was registered earlier."""

        def close_quietly() -> None:
            with suppress(Exception):  # of any kind: what is lost may not be closed in order
                close()

        self.on_loss.callback(close_quietly)

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def local_rank(self) -> int:
        return self.info.local_rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def timeouts(self) -> Timeouts:
        return self.info.timeouts

    @property
    def attempt(self) -> int:
        """How often torchrun has started the ranks again; 0 under the launcher."""
        rendezvous = self.info.rendezvous
        if isinstance(rendezvous, Rendezvous) and rendezvous.attempt.isdecimal():
            return int(rendezvous.attempt)
        return 0

    def open_store(self) -> Store:
        """Open the store over which the ranks meet; to be called once."""
        rendezvous = self.info.rendezvous
        timeout_s = self.timeouts.rendezvous_s
        if isinstance(rendezvous, Rendezvous):
            return open_rendezvous(
                rendezvous, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s
            )
        # The launcher blames a rank that lacks this file: the others wait for it.
        rank_file_path(rendezvous.parent, "met", self.rank).touch()
        store = FileStore(str(rendezvous), self.world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store


Worker = Callable[[RankContext], RankOutcome]


class FailureKind(IntEnum):
    """The kinds of failure, from the most to the least likely cause of the others."""

    CAUSE = 0
    ABORT = 1  # SIGABRT: collective libraries abort when a peer is gone, but not only then
    PEER_LOST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """A failure of a rank.

    `event` is what it did ("was killed by SIGKILL"), `error` one line, `detail` text for the log.
    """

    rank: int
    step: int
    time_s: float  # on the monotonic clock
    kind: FailureKind
    event: str
    error: str = ""
    detail: str = ""
    reasons: tuple[Reason, ...] = ()  # of a BadInput
    cause: IncidentKind = IncidentKind.CRASH
    is_certain: bool = True  # that it is this rank's fault, and not that of another one

    def __str__(self) -> str:
        when = mention("at step {}", self.step) or "before its first step"
        cause = mention(": {}", self.error)
        return f"rank {self.rank} {self.event} {when}{cause}"


def send_failure(notes: Connection, failure: RankFailure) -> None:
    """Hand the note of a failure to the launcher, which may be gone.

    It goes through a pipe: a full disk must not hide the failure itself.
    """
    short = replace(failure, error=_shorten(failure.error), detail=_shorten(failure.detail))
    # Nobody may read: a full pipe must not hold up the end of the rank.
    os.set_blocking(notes.fileno(), False)
    with suppress(OSError):
        os.write(notes.fileno(), json.dumps(asdict(short)).encode() + b"\n")


def _shorten(text: str) -> str:
    """Leave out the middle of what is too long for a pipe, which nobody reads meanwhile."""
    half = _MAX_NOTE_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def receive_failure(notes: Connection) -> RankFailure | None:
    """Return the note of a rank that has ended, or None where it left none, or a torn one."""
    os.set_blocking(notes.fileno(), False)
    text = b""
    with suppress(BlockingIOError):
        while block := os.read(notes.fileno(), _PIPE_BYTES):
            text += block
    if not text.endswith(b"\n"):
        return None
    data = json.loads(text)
    data["kind"] = FailureKind(data["kind"])
    data["cause"] = IncidentKind(data["cause"])
    data["reasons"] = tuple(Reason(**reason) for reason in data["reasons"])
    return RankFailure(**data)


class CorruptionError(RuntimeError):
    """State that has changed where nothing may change it, or work that comes out wrong.

    `is_certain` tells whether it is this rank's fault, and not maybe that of another one.
    """

    def __init__(self, message: str, *, is_certain: bool = True) -> None:
        super().__init__(message)
        self.is_certain = is_certain


def has_lost_peer(error: Exception) -> bool:
    """Tell whether an exception says that another rank does not answer any more."""
    text = " ".join(str(error).split())
    return any(sign in text for sign in _PEER_LOST)


def failure_from_error(error: Exception, *, rank: int, step: int) -> RankFailure:
    """Describe an exception that a worker raised."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    cause = IncidentKind.CRASH
    if isinstance(error, FloatingPointError):
        cause = IncidentKind.NOT_FINITE
    elif isinstance(error, CorruptionError):
        cause = IncidentKind.CORRUPTION
    detail = "".join(traceback.format_exception(error))
    if lacks_memory(error):
        # Where it happened to run out says less than what to do.
        hint = "raise the limits of this process (ulimit -v, ulimit -u), or free memory"
        text = mention("{}; ", text) + hint
        detail = ""
    return RankFailure(
        rank=rank,
        step=step,
        time_s=time.monotonic(),
        kind=FailureKind.PEER_LOST if has_lost_peer(error) else FailureKind.CAUSE,
        event="failed",
        error=name + mention(": {}", text),
        detail=detail,
        reasons=error.reasons if isinstance(error, BadInput) else (),
        cause=cause,
        is_certain=getattr(error, "is_certain", True),
    )


def run_child(
    worker: Worker, info: RankInfo, folder: Path, parent: int, notes: Connection, calls: Connection
) -> None:
    """Run `worker` as a launched rank, and end the process; this never returns.

    What it fails with goes into the pipe `notes`; over `calls` the launcher calls the ranks
    together again.
    """
    die_with_parent(parent)
    gc.freeze()  # the launcher's objects are shared, as long as no pass of the collector marks them
    _run_rank(worker, info, folder, notes, calls)


def run_spare(
    worker: Worker, folder: Path, parent: int, notes: Connection, calls: Connection
) -> None:
    """Wait to be called as a rank whose process has died, and be it; this never returns."""
    die_with_parent(parent)
    gc.freeze()
    _run_rank(worker, calls.recv(), folder, notes, calls)


def _run_rank(
    worker: Worker, info: RankInfo, folder: Path, notes: Connection, calls: Connection
) -> None:
    """Be a rank from now on; stop signals are blocked until its flag is in place."""
    stop = StopFlag()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    heartbeat = Heartbeat(rank_file_path(folder, "beat", info.rank))
    heartbeat.beat(0)
    # The launcher asks a rank that hangs for its stack.
    stack_file = rank_file_path(folder, "stack", info.rank).open("w", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stack_file)
    if info.device is DeviceKind.CPU:
        torch.set_num_threads(1)  # ranks share the cores
    code = ExitCode.RANK_FAILED
    try:
        outcome = worker(
            RankContext(info=info, stop=stop, beat=heartbeat.beat, note=heartbeat.note, calls=calls)
        )
        code = outcome.exit_code
    except Exception as error:
        failure = failure_from_error(error, rank=info.rank, step=heartbeat.step)
        code = ExitCode.BAD_INPUT if failure.reasons else ExitCode.RANK_FAILED
        send_failure(notes, failure)
    # os._exit flushes nothing.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # no teardown of process groups whose peers may be gone
