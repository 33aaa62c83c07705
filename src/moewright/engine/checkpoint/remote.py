"""Copies of checkpoints in a folder elsewhere: another disk, or a bucket of S3 or GCS, by fsspec.

The index of a copy is written last, so that a copy without one is none. Every file is read back and
compared with the checksum of the index.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

from moewright.engine.checkpoint.commit import (
    checkpoint_path,
    checkpoint_step,
    find_latest,
)
from moewright.engine.checkpoint.coordinator import yield_to_training
from moewright.engine.checkpoint.fall_back import put_aside
from moewright.engine.checkpoint.files import damage_error, fsync_directory
from moewright.engine.checkpoint.index import INDEX_FILE, CheckpointIndex, FileEntry, read_index
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import CheckpointSpec

_FIELD = "checkpoint.copy_to"
_COPYING = ".copying-"
_FETCHING = ".saving-fetch-"  # a name that the next save sweeps
_CHUNK_BYTES = 1 << 24
# How long the end of a run waits for a copy that makes no progress.
_PATIENCE_S = 60.0


class RemoteFolder:
    """A folder of copies at a URL that fsspec knows: a path, file:, s3:, gs:, memory: ..."""

    def __init__(self, url: str) -> None:
        """Open the folder, which need not exist.

        Raises:
            BadInput: fsspec, or what it needs for this kind of URL, is not installed.
        """
        self.url = url
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            rule = f"cannot be opened ({error})"
            nearest = "pip install fsspec, with s3fs for s3: and gcsfs for gs:"
            raise BadInput(Reason(field=_FIELD, value=url, rule=rule, nearest=nearest)) from error

    def list_steps(self) -> list[int]:
        """List the steps of which there is a whole copy, the oldest first.

        Raises:
            Exception: of any kind, by the file system, when it does not answer.
        """
        self._files.invalidate_cache()
        try:
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in self._list(self._root)]
        except FileNotFoundError:
            return []
        steps = [step for name in names if (step := checkpoint_step(name)) is not None]
        return sorted(step for step in steps if self._files.exists(self._path(step, INDEX_FILE)))

    def _list(self, path: str) -> list[str]:
        listed: list[str] = self._files.ls(path, detail=False)
        return listed

    def _path(self, step: int, name: str = "") -> str:
        folder = f"{self._root}/{checkpoint_path(Path(), step).name}"
        return f"{folder}/{name}" if name else folder

    def upload(self, checkpoint: Path, note: Callable[[str], None]) -> None:
        """Copy a checkpoint, and read the copy back; one of the same bytes is left as it is.

        `note` is called with each piece before it is moved.

        Raises:
            Exception: of any kind, by the file system; OSError where the copy is not what was
                written, or where another job has a copy of this step.
        """
        index = read_index(checkpoint)
        text = (checkpoint / INDEX_FILE).read_bytes()
        target = self._path(index.step, INDEX_FILE)
        if self._files.exists(target):
            present = self._files.cat_file(target)
            if present == text:
                return
            if json.loads(present)["body"]["extra"] != json.loads(text)["body"]["extra"]:
                raise OSError(f"{target} is the same step of another job")
            self._files.rm_file(target)
        self._files.makedirs(self._path(index.step), exist_ok=True)
        for entry in index.files:
            note(f"copies {entry.name} of step {index.step}")
            self._files.put_file(str(checkpoint / entry.name), self._path(index.step, entry.name))
            path = self._path(index.step, entry.name)
            digest = hashlib.sha256()
            for block in self._read(path, note):
                digest.update(block)
            if digest.hexdigest() != entry.sha256:
                raise OSError(f"{path} is not what was written")
        self._files.pipe_file(target, text)
        if self._files.cat_file(target) != text:
            raise OSError(f"{target} is not what was written")

    def _read(self, path: str, note: Callable[[str], None]) -> Iterator[bytes]:
        """Yield the blocks of a file."""
        self._files.invalidate_cache()
        with self._files.open(path, "rb", cache_type="none") as stream:
            while block := stream.read(_CHUNK_BYTES):
                note(f"reads the copy {path}")
                yield block

    def prune(self, retention: CheckpointSpec) -> None:
        """Remove the oldest copies: the index of each goes first."""
        steps = self.list_steps()
        for step in steps[: max(0, len(steps) - retention.copy_keep)]:
            if retention.keeps_for_good(step):
                continue
            self._files.rm_file(self._path(step, INDEX_FILE))
            self._files.rm(self._path(step), recursive=True)

    def download(
        self,
        step: int,
        directory: Path,
        accept: Callable[[CheckpointIndex], None],
        note: Callable[[str], None],
    ) -> Path:
        """Bring a copy into `directory`, where it is committed once all its checksums hold.

        `accept` raises where the checkpoint is not wanted; `note` is called with each piece. What
        has the copy's place there is damaged, and is put aside.

        Raises:
            BadInput: the copy is damaged, or not accepted.
            Exception: of any kind, by the file system.
        """
        path = checkpoint_path(directory, step)
        working = path.with_name(_FETCHING + path.name)
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        try:
            (working / INDEX_FILE).write_bytes(self._files.cat_file(self._path(step, INDEX_FILE)))
            index = read_index(working)
            accept(index)
            for entry in index.files:
                self._fetch(step, entry, working, note)
            fsync_directory(working)
            if (path / INDEX_FILE).is_file():
                put_aside(path)
            shutil.rmtree(path, ignore_errors=True)  # without an index
            working.rename(path)
            fsync_directory(directory)
        finally:
            shutil.rmtree(working, ignore_errors=True)
        return path

    def _fetch(
        self, step: int, entry: FileEntry, folder: Path, note: Callable[[str], None]
    ) -> None:
        """Bring a file of a copy into a folder, and hold it against its checksum."""
        digest = hashlib.sha256()
        with (folder / entry.name).open("xb") as file:
            for block in self._read(self._path(step, entry.name), note):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != entry.sha256:
            raise damage_error(folder / entry.name, "is damaged: its checksum does not hold")


def fetch_newer(
    url: str,
    directory: Path,
    accept: Callable[[CheckpointIndex], None],
    *,
    find_newest: Callable[[Path], Path | None] = find_latest,
    note: Callable[[str], None] = lambda piece: None,
) -> Path | None:
    """Bring the newest whole copy into `directory`, where it is newer than what is there.

    What is there is what `find_newest` says. Processes that do so at the same time wait for the
    first of them. Returns the checkpoint that came.

    Raises:
        BadInput: the newest copy is not accepted; or there is no checkpoint here, and the copies
            cannot be listed, so that nobody knows where the run stands.
    """
    remote = RemoteFolder(url)
    with _alone(directory):
        newest = find_newest(directory)
        local_step = (checkpoint_step(newest.name) or 0) if newest else 0
        try:
            steps = [step for step in remote.list_steps() if step > local_step]
        except Exception as error:  # of any kind: each file system has its own
            if newest is None:
                rule = f"cannot be listed ({_shorten(error)}), and {directory} has no checkpoint"
                raise BadInput(Reason(field=_FIELD, value=url, rule=rule)) from error
            _tell(f"{url} cannot be listed ({_shorten(error)}): going on from {newest.name}")
            return None
        for step in reversed(steps):
            try:
                path = remote.download(step, directory, accept, note)
            except (OSError, BadInput) as error:
                if isinstance(error, BadInput) and not _is_damage(error):
                    raise
                _tell(f"the copy of step {step} in {url} is passed over: {_shorten(error)}")
                continue
            _tell(f"{path} came from {url}")
            return path
    return None


def _is_damage(refusal: BadInput) -> bool:
    return all(_FETCHING in reason.field for reason in refusal.reasons)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / ".fetch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise BadInput(Reason(field=str(directory), rule=rule)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class RemoteCopier:
    """A thread that copies checkpoints to a folder elsewhere, one after the other.

    A copy that fails is told of, and never ends the run: the next checkpoint is tried again. What
    is copied is held by links, so that a checkpoint may be purged here meanwhile.
    """

    def __init__(self, directory: Path, spec: CheckpointSpec, note: Callable[[str], None]) -> None:
        self._directory = directory
        self._spec = spec
        self._note = note
        self._tasks: queue.Queue[Path | None] = queue.Queue()
        self._progress_s = time.monotonic()
        for stale in directory.glob(f"{_COPYING}*"):
            shutil.rmtree(stale, ignore_errors=True)
        self._thread = Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()
        if (newest := find_latest(directory)) is not None:
            self.submit(newest)  # its copy may have been cut off

    def submit(self, checkpoint: Path) -> None:
        """Have a checkpoint copied; one that still waits for its turn is left out."""
        snapshot = checkpoint.with_name(_COPYING + checkpoint.name)
        try:
            shutil.rmtree(snapshot, ignore_errors=True)
            snapshot.mkdir()
            for path in checkpoint.iterdir():
                os.link(path, snapshot / path.name)
        except OSError:  # a file system without links
            shutil.rmtree(snapshot, ignore_errors=True)
            snapshot = checkpoint
        with suppress(queue.Empty):
            while waiting := self._tasks.get_nowait():
                self._release(waiting)
        self._tasks.put(snapshot)

    def close(self) -> None:
        """Wait for the last copy, as long as it makes progress."""
        self._tasks.put(None)
        self._progress_s = time.monotonic()
        while self._thread.is_alive():
            self._note("waits for the copy of a checkpoint")
            self._thread.join(0.2)
            if time.monotonic() - self._progress_s > _PATIENCE_S:
                _tell(f"{self._spec.copy_to} does not answer: the last copy is left out")
                return

    def _run(self) -> None:
        yield_to_training()
        remote: RemoteFolder | None = None
        while (snapshot := self._tasks.get()) is not None:
            try:
                remote = remote or RemoteFolder(self._spec.copy_to)
                remote.upload(snapshot, self._see_progress)
                remote.prune(self._spec)
            except Exception as error:  # of any kind: each file system has its own
                name = snapshot.name.removeprefix(_COPYING)
                _tell(f"{name} was not copied to {self._spec.copy_to}: {_shorten(error)}")
            self._release(snapshot)

    def _see_progress(self, activity: str) -> None:
        self._progress_s = time.monotonic()

    def _release(self, snapshot: Path) -> None:
        if snapshot.name.startswith(_COPYING):
            shutil.rmtree(snapshot, ignore_errors=True)


def _shorten(error: Any) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _tell(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
