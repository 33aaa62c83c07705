"""The thread that copies checkpoints elsewhere, and what is known of the copies meanwhile."""

from __future__ import annotations

import os
import queue
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

from moewright.engine.checkpoint.commit import find_latest
from moewright.engine.checkpoint.coordinator import yield_to_training
from moewright.engine.checkpoint.remote import (
    JOURNALS,
    PATIENCE_S,
    RemoteFolder,
    SilentServerError,
    shorten_error,
)
from moewright.spec.workload import CheckpointSpec

_COPYING = ".copying-"
# How long the end of a run waits for the last copy, though it makes progress.
MOST_END_S = 600.0
# Threads that wait for a server that never answered; with so many, nothing more is asked of it.
_MOST_LEFT_BEHIND = 3


class RemoteCopier:
    """A copier of checkpoints to a folder elsewhere, one after the other, in a thread.

    A copy that fails is told of, and never ends the run: the next checkpoint is tried again. What
    is copied is held by links, so that a checkpoint may be purged here meanwhile. The records of
    the run go with each copy, as they were then.
    """

    def __init__(self, directory: Path, spec: CheckpointSpec, note: Callable[[str], None]) -> None:
        self._directory = directory
        self._spec = spec
        self._note = note
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_failing = False
        self._left_behind = 0
        self.copied_step = 0
        # Links that a killed run has left.
        for stale in directory.glob(f"{_COPYING}*"):
            shutil.rmtree(stale, ignore_errors=True)
        self._turn = _Turn(self)
        if (newest := find_latest(directory)) is not None:
            self.submit(newest)  # its copy may have been cut off

    def submit(self, checkpoint: Path) -> None:
        """Have a checkpoint copied; one that still waits for its turn is left out."""
        # A thread inside a call to a server cannot be ended, only left for a new one.
        if self._turn.is_silent() and self._left_behind < _MOST_LEFT_BEHIND:
            self._left_behind += 1
            self._turn.leave()
            self._turn = _Turn(self)
        self._turn.submit(self._hold(checkpoint))

    def _hold(self, checkpoint: Path) -> Path:
        """Return a folder of links to what a checkpoint holds now, and to the records of the run.

        Where the file system has no links, it is the checkpoint itself.
        """
        # Unique, for a step may come twice; it ends in the name that `explain_failure` reads.
        snapshot = checkpoint.with_name(f"{_COPYING}{time.monotonic_ns()}-{checkpoint.name}")
        try:
            snapshot.mkdir()
            for path in checkpoint.iterdir():
                os.link(path, snapshot / path.name)
            for name in JOURNALS:
                # A young run has not written each of its records yet.
                with suppress(FileNotFoundError):
                    os.link(self._directory.parent / name, snapshot / name)
        except OSError:
            shutil.rmtree(snapshot, ignore_errors=True)
            return checkpoint
        return snapshot

    def take_failures(self) -> list[str]:
        """Return what has gone wrong since the last call; of an outage, its beginning alone."""
        if self._turn.is_silent() and not self._is_failing:
            self.see_failure(f"{self._spec.copy_to} shows no sign of life")
        failures = []
        with suppress(queue.Empty):
            while True:
                failures.append(self._news.get_nowait())
        return failures

    def close(self) -> None:
        """Wait for the last copy, as long as it makes progress, but not for ever."""
        turn = self._turn
        turn.begin_end()
        deadline_s = time.monotonic() + MOST_END_S
        while turn.is_alive():
            self._note("waits for the copy of a checkpoint")
            turn.join()
            if turn.is_silent() or time.monotonic() > deadline_s:
                turn.leave()
                self._is_failing = False  # an outage that began earlier has a new consequence
                self.see_failure(f"{self._spec.copy_to} does not answer: the last copy is left out")
                return

    def leave(self) -> None:
        """Leave the copy under way, which ends at its next sign of life; others are dropped."""
        self._turn.leave()

    def copy(self, snapshot: Path, remote: RemoteFolder, note: Callable[[str], None]) -> None:
        """Copy a checkpoint, and remove older copies."""
        journals = snapshot if snapshot.name.startswith(_COPYING) else self._directory.parent
        step = remote.upload(snapshot, note, journals=journals)
        self.copied_step = max(self.copied_step, step)
        self._is_failing = False
        remote.prune(self._spec)

    def see_failure(self, message: str) -> None:
        """Tell of a failure, and keep the first of an outage for the journal."""
        _tell(message)
        if not self._is_failing:
            self._is_failing = True
            self._news.put(message)

    def explain_failure(self, snapshot: Path, error: Exception) -> str:
        name = f"step-{snapshot.name.rpartition('step-')[2]}"
        return f"{name} was not copied to {self._spec.copy_to}: {shorten_error(error)}"

    @property
    def url(self) -> str:
        """Where the copies go."""
        return self._spec.copy_to


class _Turn:
    """One thread of a copier, and what waits for it; it is left when the server is silent."""

    def __init__(self, copier: RemoteCopier) -> None:
        self._copier = copier
        self._tasks: queue.Queue[Path | None] = queue.Queue()
        self._progress_s = time.monotonic()
        # The thread begins with a question to the server.
        self._is_busy = True
        self._is_left = False
        # A daemon: a server that does not answer must not keep the process alive.
        self._thread = Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Path) -> None:
        self._drop_waiting()
        self._tasks.put(snapshot)

    def begin_end(self) -> None:
        self._tasks.put(None)
        # Patience begins anew: the end waits as long for a sign of life as any copy.
        self._progress_s = time.monotonic()

    def leave(self) -> None:
        """Leave the thread to itself: it ends at the next sign of life."""
        self._is_left = True
        self._drop_waiting()
        self._tasks.put(None)

    def is_silent(self) -> bool:
        return self._is_busy and time.monotonic() - self._progress_s > PATIENCE_S

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        # Short, so that who waits can say so and look at the deadline.
        self._thread.join(0.2)

    def _drop_waiting(self) -> None:
        with suppress(queue.Empty):
            while waiting := self._tasks.get_nowait():
                _release(waiting)

    def _run(self) -> None:
        yield_to_training()
        remote: RemoteFolder | None = None
        with suppress(Exception):  # of any kind; the first copy says what is wrong
            remote = RemoteFolder(self._copier.url)
            steps = remote.list_steps()
            self._copier.copied_step = max((self._copier.copied_step, *steps))
        self._is_busy = False
        while (snapshot := self._tasks.get()) is not None:
            self._progress_s = time.monotonic()
            self._is_busy = True
            try:
                remote = remote or RemoteFolder(self._copier.url)
                self._copier.copy(snapshot, remote, self._see_progress)
            except Exception as error:  # of any kind: each file system has its own
                if not self._is_left:
                    self._copier.see_failure(self._copier.explain_failure(snapshot, error))
            self._is_busy = False
            _release(snapshot)

    def _see_progress(self, piece: str) -> None:
        if self._is_left:
            raise SilentServerError("nobody waits for it any more")
        self._progress_s = time.monotonic()


def _release(snapshot: Path) -> None:
    if snapshot.name.startswith(_COPYING):
        shutil.rmtree(snapshot, ignore_errors=True)


def _tell(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
