"""The processes of the ranks on this machine, and the spare one that takes a dead one's place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from moewright.engine.run.watch import RankProcess, send_signal
from moewright.engine.run.worker import (
    STOP_SIGNALS,
    ExitCode,
    RankFailure,
    RankInfo,
    Worker,
    rank_file_path,
    run_child,
    run_spare,
)
from moewright.spec.hardware import DeviceKind

# Time between SIGTERM and SIGKILL for the ranks that are left.
_GRACE_S = 1.0
# Time between the ends of ranks that one cause has ended.
_TOGETHER_S = 0.3


class RankProcesses:
    """The processes of the ranks, and a spare one where `has_spare`, which waits for a rank to die.

    The files of the ranks lie in `folder`.
    """

    def __init__(
        self, worker: Worker, infos: Sequence[RankInfo], folder: Path, *, has_spare: bool
    ) -> None:
        self._context: ForkContext | SpawnContext
        # A fork has torch already, which takes seconds to import; CUDA does not survive one.
        if infos[0].device is DeviceKind.CPU:
            self._context = multiprocessing.get_context("fork")
        else:
            self._context = multiprocessing.get_context("spawn")
        self._worker = worker
        self._infos = infos
        self._folder = folder
        self._has_spare = has_spare
        self._meetings = 0  # again, after the first one
        self._spares: list[_StartedProcess] = []
        self.ranks: list[RankProcess] = []

    def start(self) -> None:
        """Start all ranks, and the spare process."""
        for info in self._infos:
            self.ranks.append(self._start_rank(info))
        self._start_spare()

    def can_replace(self, failure: RankFailure) -> bool:
        """End the rank that has failed, where it hangs, and tell whether others can go on with it.

        They cannot where no rank is left, or one has ended as it should.
        """
        failed = self.ranks[failure.rank]
        if failed.is_alive:
            os.kill(failed.pid, signal.SIGKILL)
            failed.process.join()
        codes = [rank.process.exitcode for rank in self.ranks]
        ended = {ExitCode.DONE, ExitCode.STOPPED, ExitCode.BAD_INPUT}
        return None in codes and not ended.intersection(code for code in codes if code is not None)

    def replace_dead(self) -> None:
        """Put new processes into the places of dead ranks, and call all ranks together.

        Ranks that end within a moment of each other are replaced together: each for itself would be
        two failures of one step, after which a run is given up.
        """
        time.sleep(_TOGETHER_S)
        self._meetings += 1
        # Another file for each meeting: the keys of the last one are still in it.
        store = self._folder / f"store-{self._meetings}"
        infos = [replace(info, rendezvous=store) for info in self._infos]
        for info in infos:
            # They have to meet again, and who has not is blamed by this file.
            rank_file_path(self._folder, "met", info.rank).unlink(missing_ok=True)
        for number, info in enumerate(infos):
            if self.ranks[number].is_alive:
                with suppress(OSError):  # it has died just now, which is noticed next
                    self.ranks[number].calls.send(info)
            else:
                # The new process must not be judged by the heartbeats of the dead one.
                rank_file_path(self._folder, "beat", info.rank).unlink(missing_ok=True)
                self.ranks[number] = self._take_place(info)
        self._start_spare()

    def end(self) -> None:
        """Leave no process behind: SIGTERM, then SIGKILL, which a suspended rank takes too."""
        for spare in self._spares:
            spare.process.kill()
            spare.process.join()
        send_signal(self.ranks, signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline_s - time.monotonic()))
        send_signal(self.ranks, signal.SIGKILL)
        for rank in self.ranks:
            rank.process.join()

    def _start_rank(self, info: RankInfo) -> RankProcess:
        started = self._start(run_child, info)
        return self._seat(started, info)

    def _start_spare(self) -> None:
        if self._has_spare and not self._spares:
            self._spares.append(self._start(run_spare))

    def _take_place(self, info: RankInfo) -> RankProcess:
        """Return the spare process as this rank; a new one where there is none."""
        if not self._spares:
            return self._start_rank(info)
        spare = self._spares.pop()
        with suppress(OSError):  # it has died just now, which is noticed next
            spare.calls.send(info)
        return self._seat(spare, info)

    def _start(self, run: Callable[..., None], *info: RankInfo) -> _StartedProcess:
        """Start a process, with stop signals blocked until it takes them as a rank."""
        notes, send_end = self._context.Pipe(duplex=False)
        call_end, calls = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=run,
            args=(self._worker, *info, self._folder, os.getpid(), send_end, call_end),
        )
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # The child alone holds these ends now, so that its death ends them.
        send_end.close()
        call_end.close()
        return _StartedProcess(process=process, notes=notes, calls=calls)

    def _seat(self, started: _StartedProcess, info: RankInfo) -> RankProcess:
        assert started.process.pid is not None
        return RankProcess(
            info=info,
            folder=self._folder,
            pid=started.process.pid,
            process=started.process,
            notes=started.notes,
            calls=started.calls,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _StartedProcess:
    """A process with the pipes over which it tells of a failure and is called."""

    process: BaseProcess
    notes: Connection
    calls: Connection
