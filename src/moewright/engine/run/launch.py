"""Start the ranks of a job on this machine, watch them, and end them all when one fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from moewright.codec.folder_lock import lock_folder
from moewright.engine.run.env import TorchrunEnv, read_torchrun_env
from moewright.engine.run.process_limit import refuse_too_many_processes
from moewright.engine.run.rendezvous import Rendezvous
from moewright.engine.run.worker import (
    STACK_SIGNAL,
    STOP_SIGNALS,
    Beat,
    ExitCode,
    FailureKind,
    Heartbeat,
    RankContext,
    RankFailure,
    RankInfo,
    RankOutcome,
    StopFlag,
    Timeouts,
    Worker,
    failure_from_error,
    rank_file_path,
    read_beats,
    receive_failure,
    run_child,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind

_POLL_S = 0.2
# Time to wait for the cause of the first failure, when that failure is only a consequence.
_SETTLE_S = 0.7
# Time between SIGTERM and SIGKILL for the ranks that are left.
_GRACE_S = 1.0
# Time past the collective timeout, so that a rank that times out can report that itself.
_HANG_MARGIN_S = 3.0
# Time for ranks that hang to write their stacks.
_STACK_S = 0.3
FLIGHT_RECORD_FILE = "flight_record.json"


def launch(
    worker: Worker,
    *,
    nproc: int,
    run_dir: Path,
    device: DeviceKind = DeviceKind.CPU,
    timeouts: Timeouts | None = None,
    before_start: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Run `worker` on `nproc` ranks and return the job's exit code.

    `run_dir` is locked meanwhile; `before_start` is called once a job, when the lock is held and no
    rank has started.

    Ranks are forked for CPU (one thread each; the caller has not initialised CUDA) and spawned for
    CUDA, where `worker` must be importable. Under torchrun the worker runs in this process. Main
    thread only, Linux only.

    When a rank fails, all are ended: the first line on stderr is its own error, and RANK_FAILED is
    returned. SIGTERM and SIGINT are handed to every rank; STOPPED means that they agreed and saved.

    Raises:
        BadInput: what a rank refused, or a number of ranks that cannot be started here.
    """
    timeouts = timeouts or Timeouts()
    env = read_torchrun_env()
    if env is not None:
        return _run_in_process(
            worker,
            env,
            nproc=nproc,
            run_dir=run_dir,
            device=device,
            timeouts=timeouts,
            before_start=before_start,
        )
    refuse_too_many_processes(nproc)
    if sys.platform != "linux":
        raise BadInput(
            Reason(field="nproc", rule="ranks are started on Linux only", nearest="torchrun")
        )
    with lock_folder(run_dir), _launch_folder(run_dir) as folder:
        before_start()
        infos = [
            RankInfo(
                rank=rank,
                local_rank=rank,
                world_size=nproc,
                timeouts=timeouts,
                device=device,
                rendezvous=folder / "store",
            )
            for rank in range(nproc)
        ]
        failure_or_exit = _run_ranks(worker, infos, folder)
    if isinstance(failure_or_exit, ExitCode):
        return failure_or_exit
    return _report(failure_or_exit)


def _run_in_process(
    worker: Worker,
    env: TorchrunEnv,
    *,
    nproc: int,
    run_dir: Path,
    device: DeviceKind,
    timeouts: Timeouts,
    before_start: Callable[[], None],
) -> ExitCode:
    """Run the worker here: this process is a rank already, and torchrun watches it."""
    if nproc != env.world_size:
        raise BadInput(
            Reason(
                field="nproc",
                value=str(nproc),
                rule=f"torchrun started {env.world_size} ranks",
                nearest=str(env.world_size),
            )
        )
    rendezvous = Rendezvous(
        host=env.host,
        port=env.port,
        hosts_store=env.rank == 0 and not env.store_is_open,
        attempt=env.attempt,
    )
    info = RankInfo(
        rank=env.rank,
        local_rank=env.local_rank,
        world_size=env.world_size,
        timeouts=timeouts,
        device=device,
        rendezvous=rendezvous,
    )
    heartbeat = Heartbeat(None)
    with lock_folder(run_dir) if env.rank == 0 else nullcontext(), _stop_flag() as stop:
        if env.rank == 0:
            before_start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            outcome = worker(RankContext(info=info, stop=stop, beat=heartbeat.beat))
        except BadInput as error:
            if env.local_rank == 0:
                raise
            # The command line speaks only for the first rank of a machine, and this refusal may be
            # another rank's alone.
            print(f"rank {env.rank}: {error}", file=sys.stderr, flush=True)
            return ExitCode.BAD_INPUT
        except Exception as error:
            return _report(failure_from_error(error, rank=env.rank, step=heartbeat.step))
    return ExitCode.DONE if outcome is RankOutcome.DONE else ExitCode.STOPPED


@contextmanager
def _launch_folder(run_dir: Path) -> Iterator[Path]:
    """Make a fresh folder for store, heartbeats and failure notes, and remove it in the end.

    One that a killed launcher left is removed first.
    """
    folder = run_dir.absolute() / ".launch"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankProcess:
    info: RankInfo
    process: BaseProcess
    folder: Path
    notes: Connection

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def has_failed(self) -> bool:
        return self.process.exitcode not in (None, ExitCode.DONE, ExitCode.STOPPED)

    def note_path(self, kind: str) -> Path:
        return rank_file_path(self.folder, kind, self.info.rank)

    def beats(self) -> list[Beat]:
        """Return the last heartbeats, the oldest first; none before the first."""
        return read_beats(self.note_path("beat"))

    def last_step(self) -> int:
        """Return the step of the last heartbeat; 0 before the first step."""
        beats = self.beats()
        return beats[-1].step if beats else 0

    def silence_s(self, started_s: float) -> float:
        """Return the time since the last heartbeat, or since the start."""
        beats = self.beats()
        return time.monotonic() - (beats[-1].time_s if beats else started_s)

    def is_waiting(self) -> bool:
        """Tell whether the last thing that the rank began was to wait for others."""
        beats = self.beats()
        return bool(beats) and beats[-1].is_waiting

    def activity(self) -> str:
        """Return what the rank began last; nothing before its first heartbeat."""
        beats = self.beats()
        return beats[-1].activity if beats else ""

    def patience_s(self) -> float:
        """Return how long the rank may be silent before it is taken to hang."""
        timeouts = self.info.timeouts
        beats = self.beats()
        if not beats:
            return timeouts.rendezvous_s + _HANG_MARGIN_S
        patience_s = timeouts.hang_s or timeouts.collective_s
        if beats[-1].steps_begun < 2:
            patience_s = max(patience_s, timeouts.first_step_s)
        return patience_s + _HANG_MARGIN_S

    def is_suspended(self) -> bool:
        """Tell whether Linux reports state T; the state follows the last ")" of the stat line."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def _run_ranks(worker: Worker, infos: Sequence[RankInfo], folder: Path) -> ExitCode | RankFailure:
    context: ForkContext | SpawnContext
    if infos[0].device is DeviceKind.CPU:
        context = multiprocessing.get_context("fork")
    else:
        context = multiprocessing.get_context("spawn")
    ranks: list[_RankProcess] = []
    with _stop_flag() as stop:
        try:
            for info in infos:
                notes, send_end = context.Pipe(duplex=False)
                process = context.Process(
                    target=run_child, args=(worker, info, folder, os.getpid(), send_end)
                )
                process.start()
                send_end.close()
                ranks.append(_RankProcess(info=info, process=process, folder=folder, notes=notes))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            failure = _watch_ranks(ranks, stop)
        finally:
            _end_ranks(ranks)
    if failure is not None:
        return failure
    stopped = any(rank.process.exitcode == ExitCode.STOPPED for rank in ranks)
    return ExitCode.STOPPED if stopped else ExitCode.DONE


@contextmanager
def _stop_flag() -> Iterator[StopFlag]:
    """Install this process's own stop flag.

    Stop signals start blocked: ranks inherit that, and unblock them when their flag is in place.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    stop = StopFlag()
    stop.install()
    try:
        yield stop
    finally:
        for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _watch_ranks(ranks: Sequence[_RankProcess], stop: StopFlag) -> RankFailure | None:
    """Wait until all ranks are done, or one has failed or hangs; return that rank's failure."""
    started_s = time.monotonic()
    has_forwarded_stop = False
    while live := [rank for rank in ranks if rank.is_alive]:
        if stop.requested and not has_forwarded_stop:
            _send_signal(live, signal.SIGTERM)
            has_forwarded_stop = True
        wait([rank.process.sentinel for rank in live], timeout=_POLL_S)
        if any(rank.has_failed for rank in ranks):
            break
        silent = [rank for rank in live if rank.silence_s(started_s) > rank.patience_s()]
        # Who waits for others may wait for as long as they show life.
        if len(silent) == len(live) or any(not rank.is_waiting() for rank in silent):
            return _blame_hanging_rank(live, started_s)
    return _find_first_failure(ranks, started_s)


def _find_first_failure(ranks: Sequence[_RankProcess], started_s: float) -> RankFailure | None:
    """Return the failure to blame, once ranks have had time to settle; None when none failed."""
    deadline_s = time.monotonic() + _SETTLE_S
    failures: dict[int, RankFailure] = {}
    while True:
        for rank in ranks:
            if rank.has_failed and rank.info.rank not in failures:
                failures[rank.info.rank] = _describe_failure(rank)
        live = [rank for rank in ranks if rank.is_alive]
        first = min(
            failures.values(), key=lambda failure: (failure.kind, failure.time_s), default=None
        )
        if first is None or first.kind is FailureKind.CAUSE or not live:
            return first
        if time.monotonic() > deadline_s:
            if first.kind is FailureKind.PEER_LOST:
                return _blame_hanging_rank(live, started_s)
            return first
        wait([rank.process.sentinel for rank in live], timeout=_POLL_S)


def _describe_failure(rank: _RankProcess) -> RankFailure:
    """Return what a failed rank noted itself, else what its exit code says."""
    note = receive_failure(rank.notes)
    if note is not None:
        return note
    code = rank.process.exitcode or 0
    kind = FailureKind.CAUSE
    event = f"exited with code {code}"
    if code < 0:
        killer = signal.Signals(-code)
        event = f"was killed by {killer.name}"
        if killer is signal.SIGABRT:
            kind = FailureKind.ABORT
    return RankFailure(
        rank=rank.info.rank,
        step=rank.last_step(),
        time_s=time.monotonic(),
        kind=kind,
        event=event,
    )


def _blame_hanging_rank(live: Sequence[_RankProcess], started_s: float) -> RankFailure:
    """Blame one of the ranks that still live.

    That is a suspended one, else one that never came to meet the others, else one that does not
    wait for others, else the one that has been silent for longest. What every rank did last, and
    its stack, go to the flight record in the folder of the run.
    """

    def suspicion(rank: _RankProcess) -> tuple[bool, bool, bool, float]:
        has_met = rank.note_path("met").exists()
        return rank.is_suspended(), not has_met, not rank.is_waiting(), rank.silence_s(started_s)

    rank = max(live, key=suspicion)
    cause = "the others wait for it" if rank.info.world_size > 1 else "it shows no life"
    if rank.is_suspended():
        cause = "it is suspended (SIGSTOP)"
    silence_s = rank.silence_s(started_s)
    activity = f" in: {rank.activity()}" if rank.activity() else ""
    record = write_flight_record(live, rank.folder.parent)
    return RankFailure(
        rank=rank.info.rank,
        step=rank.last_step(),
        time_s=time.monotonic(),
        kind=FailureKind.CAUSE,
        event="stopped answering",
        error=f"{cause}, silent for {silence_s:.0f} s{activity}",
        detail=record,
    )


def write_flight_record(ranks: Sequence[_RankProcess], run_dir: Path) -> str:
    """Write what each rank did last, and its stack, and return the stacks as text."""
    _send_signal([rank for rank in ranks if not rank.is_suspended()], STACK_SIGNAL)
    time.sleep(_STACK_S)
    now_s = time.monotonic()
    record = []
    text = ""
    for rank in ranks:
        stack = ""
        with suppress(OSError):
            stack = rank.note_path("stack").read_text("utf-8", errors="replace")
        beats = [
            {
                "age_s": round(now_s - beat.time_s, 3),
                "step": beat.step,
                "activity": beat.activity,
                "is_waiting": beat.is_waiting,
            }
            for beat in rank.beats()
        ]
        record.append({"rank": rank.info.rank, "beats": beats, "stack": stack})
        text += f"rank {rank.info.rank}, {rank.activity()}:\n{stack}"
    path = run_dir / FLIGHT_RECORD_FILE
    with suppress(OSError):
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return f"{text}flight record: {path}\n"


def _send_signal(ranks: Sequence[_RankProcess], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.is_alive and rank.process.pid is not None:
            os.kill(rank.process.pid, number)


def _end_ranks(ranks: Sequence[_RankProcess]) -> None:
    """Leave no rank behind: SIGTERM, then SIGKILL, which a suspended rank takes too."""
    _send_signal(ranks, signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline_s - time.monotonic()))
    _send_signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.join()


def _report(failure: RankFailure) -> ExitCode:
    """Print what failed, the first line first; a BadInput is raised for the caller to print."""
    if failure.reasons:
        raise BadInput(*failure.reasons)
    with suppress(OSError, ValueError):
        print(f"{failure}; start again to go on from the last checkpoint", file=sys.stderr)
        print(failure.detail, end="", file=sys.stderr, flush=True)
    return ExitCode.RANK_FAILED
