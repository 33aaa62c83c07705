"""Start the ranks of a job on this machine, watch them, and end them all when one fails."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from moewright.codec.folder_lock import lock_folder
from moewright.engine.observe.display import STEP_LINES, RunDisplay
from moewright.engine.run.early_checks import raise_file_limit, refuse_too_many_processes
from moewright.engine.run.env import TorchrunEnv, read_torchrun_env
from moewright.engine.run.rank_processes import RankProcesses
from moewright.engine.run.rendezvous import Rendezvous
from moewright.engine.run.torchrun_watch import sign_up
from moewright.engine.run.watch import watch_ranks
from moewright.engine.run.worker import (
    STOP_SIGNALS,
    ExitCode,
    Heartbeat,
    RankContext,
    RankFailure,
    RankInfo,
    RankOutcome,
    StopFlag,
    Timeouts,
    Worker,
    failure_from_error,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind


def print_failure(failure: RankFailure) -> None:
    """Print what failed, its first line first, and what to do."""
    with suppress(OSError, ValueError):
        print(f"{failure}; start again to go on from the last checkpoint", file=sys.stderr)
        print(failure.detail, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchHooks:
    """What the launcher calls meanwhile.

    `before_start` is called once a job, when the lock is held and no rank has started;
    `report_failure` when all ranks have ended because of that failure; `wants_stop` several times a
    second, with whether the user has asked for a stop: where it returns True, ranks save and end.
    `keeps_ranks` is asked when a rank has failed: where it returns True, another process takes the
    place of that rank, and the others stay. Without it none does, and no process waits for that.
    `display` shows the run while its ranks run here.
    """

    before_start: Callable[[], None] = lambda: None
    report_failure: Callable[[RankFailure], None] = print_failure
    wants_stop: Callable[[bool], bool] = lambda is_requested: False
    display: RunDisplay = STEP_LINES
    keeps_ranks: Callable[[RankFailure], bool] | None = None


def launch(
    worker: Worker,
    *,
    nproc: int,
    run_dir: Path,
    device: DeviceKind = DeviceKind.CPU,
    timeouts: Timeouts | None = None,
    hooks: LaunchHooks | None = None,
    local_ranks: Sequence[int] = (),
) -> ExitCode:
    """Run `worker` on `nproc` ranks and return the job's exit code.

    `run_dir` is locked meanwhile. `local_ranks` number the devices to use, where that is not the
    first of this machine.

    Ranks are forked for CPU (one thread each; the caller has not initialised CUDA) and spawned for
    CUDA, where `worker` must be importable. Under torchrun the worker runs in this process. Main
    thread only, Linux only.

    When a rank fails, all are ended: the first line on stderr is its own error, and RANK_FAILED is
    returned. SIGTERM and SIGINT are handed to every rank; STOPPED means that they agreed and saved.

    Raises:
        BadInput: what a rank refused, or a number of ranks that cannot be started here.
    """
    timeouts = timeouts or Timeouts()
    hooks = hooks or LaunchHooks()
    env = read_torchrun_env()
    if env is not None:
        return _run_in_process(
            worker,
            env,
            nproc=nproc,
            run_dir=run_dir,
            device=device,
            timeouts=timeouts,
            hooks=hooks,
        )
    refuse_too_many_processes(nproc)
    raise_file_limit(nproc)
    if sys.platform != "linux":
        raise BadInput(
            Reason(field="nproc", rule="ranks are started on Linux only", nearest="torchrun")
        )
    with lock_folder(run_dir), _launch_folder(run_dir) as folder:
        hooks.before_start()
        infos = [
            RankInfo(
                rank=rank,
                local_rank=local_ranks[rank] if local_ranks else rank,
                world_size=nproc,
                timeouts=timeouts,
                device=device,
                rendezvous=folder / "store",
            )
            for rank in range(nproc)
        ]
        failure_or_exit = _run_ranks(worker, infos, folder, hooks)
    hooks.display.end()
    if isinstance(failure_or_exit, ExitCode):
        return failure_or_exit
    return _report(failure_or_exit, hooks)


def _run_in_process(
    worker: Worker,
    env: TorchrunEnv,
    *,
    nproc: int,
    run_dir: Path,
    device: DeviceKind,
    timeouts: Timeouts,
    hooks: LaunchHooks,
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
    with lock_folder(run_dir) if env.rank == 0 else nullcontext(), _stop_flag() as stop:
        if env.rank == 0:
            hooks.before_start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            with sign_up(env, info, run_dir, hooks.report_failure) as watched:
                beats = watched.heartbeat
                context = RankContext(info=info, stop=stop, beat=beats.beat, note=beats.note)
                outcome: RankOutcome | RankFailure = _run_worker(worker, context, beats)
                watched.is_done = isinstance(outcome, RankOutcome)
        except BadInput as error:
            if env.local_rank == 0:
                raise
            # The command line speaks only for the first rank of a machine, and this refusal may be
            # another rank's alone.
            print(f"rank {env.rank}: {error}", file=sys.stderr, flush=True)
            return ExitCode.BAD_INPUT
        if isinstance(outcome, RankFailure):
            return _report(outcome, hooks)
    return outcome.exit_code


def _run_worker(
    worker: Worker, context: RankContext, heartbeat: Heartbeat
) -> RankOutcome | RankFailure:
    """Run the worker, and return what it failed with; a BadInput is raised."""
    try:
        return worker(context)
    except BadInput:
        raise
    except Exception as error:
        return failure_from_error(error, rank=context.rank, step=heartbeat.step)


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


def _run_ranks(
    worker: Worker, infos: Sequence[RankInfo], folder: Path, hooks: LaunchHooks
) -> ExitCode | RankFailure:
    keeps_ranks = hooks.keeps_ranks
    processes = RankProcesses(worker, infos, folder, has_spare=keeps_ranks is not None)
    with _stop_flag() as stop:
        try:
            processes.start()
            # Only now: processes that start inherit what is blocked.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            failure = watch_ranks(processes.ranks, stop, hooks.wants_stop, hooks.display.refresh)
            while failure is not None and keeps_ranks is not None:
                if not (processes.can_replace(failure) and keeps_ranks(failure)):
                    break
                processes.replace_dead()
                failure = watch_ranks(
                    processes.ranks, stop, hooks.wants_stop, hooks.display.refresh
                )
        finally:
            processes.end()
    if failure is not None:
        return failure
    stopped = any(rank.process.exitcode == ExitCode.STOPPED for rank in processes.ranks)
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


def _report(failure: RankFailure, hooks: LaunchHooks) -> ExitCode:
    """Report what failed; a BadInput is raised for the caller to print."""
    if failure.reasons:
        raise BadInput(*failure.reasons)
    hooks.report_failure(failure)
    return ExitCode.RANK_FAILED
