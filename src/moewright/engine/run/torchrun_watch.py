"""The hang watch of ranks that torchrun started: torchrun itself sees only processes that end.

Each rank tells of itself in files, as under our own launcher. The first rank of a machine has a
process beside it that looks at the ranks of that machine, and ends them when one hangs: torchrun
then ends or starts again all of them. Where all ranks of all machines wait for each other, the
watchers learn that over the store of the job.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

from moewright.codec.processes import die_with_parent
from moewright.engine.run.env import TorchrunEnv
from moewright.engine.run.watch import (
    WatchedRank,
    WatchedTime,
    blame_hanging_rank,
    read_process_stat,
    write_flight_record,
)
from moewright.engine.run.worker import (
    STACK_SIGNAL,
    STOP_SIGNALS,
    ExitCode,
    Heartbeat,
    RankFailure,
    RankInfo,
    rank_file_path,
)

# torch.distributed re-exports these, but type checkers do not see it.
from moewright.engine.torch_private import PrefixStore, TCPStore
from moewright.spec.errors import BadInput, Reason

_POLL_S = 0.2  # how late a hang is noticed
# Time that ranks which have lost a peer have to say so, and other machines to write their stacks.
_GRACE_S = 2.0
_STORE_S = 10.0
# The key that tells the watchers of all machines of a hang.
_HANG = "hang"


class WatchedSelf:
    """This rank as those who watch it see it; `is_done` once it has nothing to wait for."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.is_done = False


@contextmanager
def sign_up(
    env: TorchrunEnv, info: RankInfo, run_dir: Path, report: Callable[[RankFailure], None]
) -> Iterator[WatchedSelf]:
    """Have this rank watched meanwhile.

    When a rank of this machine hangs, `report` is called in the process that watches, and the ranks
    are killed. The first rank of a machine that is done stays until the others have ended.

    Raises:
        BadInput: the folder of the run cannot be written.
    """
    attempt = env.attempt if env.attempt.isdecimal() else "0"
    folder = run_dir.absolute() / ".launch" / f"torchrun-{attempt}-{env.machine}"
    identity = rank_file_path(folder, "pid", info.rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        heartbeat = Heartbeat(rank_file_path(folder, "beat", info.rank))
        rank_file_path(folder, "met", info.rank).touch()
        # With its start: the number of a process that has ended is given to another.
        identity.write_text(f"{os.getpid()} {_read_start(os.getpid())}", "ascii")
        stack_file = rank_file_path(folder, "stack", info.rank).open("w", encoding="utf-8")
    except OSError as error:
        rule = f"cannot be used as a folder to write in ({error.strerror})"
        raise BadInput(Reason(field=str(run_dir), rule=rule)) from error
    heartbeat.beat(0)
    watcher = None
    if env.local_rank == 0:
        _remove_earlier_attempts(folder)
        watcher = _start_watcher(env, info, folder, run_dir, report)
    watched = WatchedSelf(heartbeat)
    faulthandler.register(STACK_SIGNAL, file=stack_file)
    try:
        yield watched
    finally:
        identity.unlink(missing_ok=True)
        if watcher is not None:
            if not watched.is_done:
                watcher.kill()
            watcher.join()
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.parent.rmdir()
        faulthandler.unregister(STACK_SIGNAL)
        stack_file.close()


def _remove_earlier_attempts(folder: Path) -> None:
    """Remove what earlier starts on this machine have left: they were killed."""
    machine = folder.name.rpartition("-")[2]
    for stale in folder.parent.glob(f"torchrun-*-{machine}"):
        if stale != folder:
            shutil.rmtree(stale, ignore_errors=True)


def _start_watcher(
    env: TorchrunEnv,
    info: RankInfo,
    folder: Path,
    run_dir: Path,
    report: Callable[[RankFailure], None],
) -> BaseProcess:
    watch = _MachineWatch(env=env, info=info, folder=folder, run_dir=run_dir, report=report)
    process = multiprocessing.get_context("fork").Process(
        target=watch.run_child, args=(os.getpid(),), daemon=True
    )
    process.start()
    return process


@dataclass(frozen=True, kw_only=True, slots=True)
class _MachineWatch:
    """The watch over the ranks of one machine; `info` is that of its first rank."""

    env: TorchrunEnv
    info: RankInfo
    folder: Path
    run_dir: Path
    report: Callable[[RankFailure], None]

    def run_child(self, parent: int) -> None:
        """Watch until all ranks have ended, and end this process."""
        # torchrun signals the whole process group of a rank, and a signal is the rank's to follow.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        die_with_parent(parent)
        try:
            self._watch()
        except Exception as error:  # of any kind: a run is not ended for want of a watch
            print(f"the hang watch has ended: {error!r}", file=sys.stderr, flush=True)
        os._exit(ExitCode.DONE)

    def _watch(self) -> None:
        watched = WatchedTime()
        others: _OtherMachines | None = None
        while ranks := self._list_ranks():
            time.sleep(_POLL_S)
            watched.look()
            live = [rank for rank in ranks if _is_alive(rank)]
            silent = [rank for rank in live if rank.silence_s(watched) > rank.patience_s()]
            # Who waits for others may wait for as long as they show life.
            is_hang = any(not rank.is_waiting() or rank.is_suspended() for rank in silent)
            is_hang = is_hang or len(silent) == self.env.world_size
            # The first step begins when the ranks have met, so that the store is there.
            is_part = len(ranks) < self.env.world_size
            if others is None and is_part and any(rank.last_step() for rank in ranks):
                others = _OtherMachines(self.env)
            is_elsewhere = False
            if others is not None:
                is_hang = others.is_whole_world_silent(silent) or is_hang
                is_elsewhere = others.blame(is_hang)
            if is_elsewhere:
                write_flight_record(live, self.run_dir, part=f"-{self.env.machine}")
            elif is_hang:
                failure = blame_hanging_rank(live, watched, self.run_dir)
                self.report(failure)
                _kill([rank for rank in live if rank.info.rank == failure.rank])
            if is_elsewhere or is_hang:
                time.sleep(_GRACE_S)
                _kill(live)
                return

    def _list_ranks(self) -> list[WatchedRank]:
        """List the ranks of this machine that have signed up and live."""
        ranks = []
        for path in self.folder.glob("pid-*"):
            with suppress(OSError, ValueError):
                pid, start = path.read_text("ascii").split()
                rank = WatchedRank(
                    info=self._describe(int(path.name.removeprefix("pid-"))),
                    folder=self.folder,
                    pid=int(pid),
                )
                if _read_start(rank.pid) == start:
                    ranks.append(rank)
        return sorted(ranks, key=lambda rank: rank.info.rank)

    def _describe(self, rank: int) -> RankInfo:
        return replace(self.info, rank=rank, local_rank=rank - self.info.rank)


class _OtherMachines:
    """What the watchers of all machines tell each other over the store of the job."""

    def __init__(self, env: TorchrunEnv) -> None:
        store = TCPStore(
            env.host,
            env.port,
            is_master=False,
            timeout=timedelta(seconds=_STORE_S),
            wait_for_workers=False,
        )
        self._store = PrefixStore(f"moewright/{env.attempt}/watch", store)
        self._silent_keys = [_silent_key(rank) for rank in range(env.world_size)]
        self._published: set[int] = set()

    def is_whole_world_silent(self, silent: Sequence[WatchedRank]) -> bool:
        """Tell the others which ranks of this machine are silent, and whether all ranks are."""
        numbers = {rank.info.rank for rank in silent}
        for number in numbers - self._published:
            self._store.set(_silent_key(number), "")
        for number in self._published - numbers:
            self._store.delete_key(_silent_key(number))
        self._published = numbers
        return bool(numbers) and self._store.check(self._silent_keys)

    def blame(self, is_hang: bool) -> bool:
        """Return whether another machine has told of a hang; else tell of one that is here."""
        if is_hang:
            # The first that counts has told of it, and the others follow.
            return self._store.add(_HANG, 1) > 1
        return self._store.check([_HANG])


def _silent_key(rank: int) -> str:
    return f"silent {rank}"


def _read_start(pid: int) -> str:
    """Return when a process was started, in ticks since the boot; "" when it has ended."""
    state, *fields = read_process_stat(pid) or ["Z"]
    # proc(5): the start is field 22 of the line, of which the state is field 3.
    return "" if state == "Z" else fields[18]


def _is_alive(rank: WatchedRank) -> bool:
    return bool(_read_start(rank.pid))


def _kill(ranks: Sequence[WatchedRank]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)
