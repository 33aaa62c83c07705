"""Copies of checkpoints in a folder elsewhere: another disk, or a bucket of S3 or GCS, by fsspec.

The index of a copy is written last, so that a copy without one is none. Every file is read back and
compared with the checksum of the index. The records of the run lie beside it, as they were then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Generic, TypeVar

from moewright.codec import (
    INCIDENTS_FILE,
    STEPS_FILE,
    FloatPolicy,
    parse_json,
    read_complete_lines,
    write_text,
)
from moewright.engine.checkpoint.commit import (
    checkpoint_path,
    checkpoint_step,
    find_latest,
    folder_step,
)
from moewright.engine.checkpoint.files import damage_error, fsync_directory
from moewright.engine.checkpoint.index import INDEX_FILE, CheckpointIndex, FileEntry, read_index
from moewright.engine.checkpoint.loader import put_aside
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import mention
from moewright.spec.workload import CheckpointSpec

T = TypeVar("T")
_POLL_S = 0.2  # how late the end of a copy is noticed


class SilentServerError(OSError):
    """A server that has shown no sign of life for as long as anybody waits."""


class _Call(Generic[T]):
    """An action in a thread of its own, which is left behind when it does not answer."""

    def __init__(self, action: Callable[[Callable[[str], None]], T]) -> None:
        self._action = action
        self._progress_s = time.monotonic()
        self._results: list[T] = []
        self._errors: list[Exception] = []
        self._is_left = Event()
        self._thread = Thread(target=self._run, name="elsewhere", daemon=True)

    def _run(self) -> None:
        try:
            self._results.append(self._action(self._see_progress))
        except Exception as error:  # of any kind: it is raised in the thread that waits
            self._errors.append(error)

    def _see_progress(self, piece: str) -> None:
        if self._is_left.is_set():
            raise SilentServerError("nobody waits for it any more")
        self._progress_s = time.monotonic()

    def wait(self, patience_s: float, tell: Callable[[], None]) -> T:
        self._thread.start()
        while self._thread.is_alive():
            tell()
            self._thread.join(_POLL_S)
            if time.monotonic() - self._progress_s > patience_s:
                self._is_left.set()
                raise SilentServerError(f"no sign of life for {patience_s:.0f} s")
        if self._errors:
            raise self._errors[0]
        return self._results[0]


def wait_patiently(
    action: Callable[[Callable[[str], None]], T],
    patience_s: float,
    tell: Callable[[], None] = lambda: None,
) -> T:
    """Return what an action returns, which is called with what to call at each sign of progress.

    `tell` is called again and again meanwhile.

    Raises:
        SilentServerError: there was none for `patience_s`.
        Exception: of any kind, by the action.
    """
    return _Call(action).wait(patience_s, tell)


_FIELD = "checkpoint.copy_to"
_FETCHING = ".saving-fetch-"  # a name that the next save sweeps
_CHUNK_BYTES = 1 << 24
# How long anybody waits for a server that shows no sign of life.
PATIENCE_S = 60.0
_PROBE_S = 30.0
# What a run has noted of itself, which goes on growing: it is not in the index.
JOURNALS = (STEPS_FILE, INCIDENTS_FILE)


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

    def is_within(self, directory: Path) -> bool:
        """Tell whether this is a folder of this machine's that is, or is in, `directory`."""
        if "file" not in self._files.protocol:
            return False
        return Path(self._root).resolve().is_relative_to(directory.resolve())

    def list_steps(self) -> list[int]:
        """List the steps of which there is a whole copy, the oldest first.

        Raises:
            Exception: of any kind, by the file system, when it does not answer.
        """
        # fsspec keeps listings, and others write here too.
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
        return folder + mention("/{}", name)

    def probe(self, note: Callable[[str], None]) -> None:
        """Write a small file into the folder, read it back, and remove it.

        Raises:
            Exception: of any kind, by the file system, where that cannot be done.
        """
        # Unique: two runs may probe one folder.
        name = f"{self._root}/.probe-{uuid.uuid4().hex}"
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(name, name.encode())
        note("reads what it has written")
        content = self._files.cat_file(name)
        self._files.rm_file(name)
        if content != name.encode():
            raise OSError(f"{name} is not what was written")

    def upload(
        self, checkpoint: Path, note: Callable[[str], None], *, journals: Path | None = None
    ) -> int:
        """Copy a checkpoint, and read the copy back; one of the same bytes is left as it is.

        `note` is called with each piece before it is moved. In the folder `journals` lie the
        records of the run, as far as there are any. Returns the step.

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
                return index.step
            if json.loads(present)["body"]["extra"] != json.loads(text)["body"]["extra"]:
                raise OSError(f"{target} is the same step of another job")
            # Before its files change: a copy without an index is none.
            self._files.rm_file(target)
        self._files.makedirs(self._path(index.step), exist_ok=True)
        for entry in index.files:
            note(f"copies {entry.name} of step {index.step}")
            path = self._path(index.step, entry.name)
            self._put(checkpoint / entry.name, path, note)
            digest = hashlib.sha256()
            for block in self._read(path, note):
                digest.update(block)
            if digest.hexdigest() != entry.sha256:
                raise OSError(f"{path} is not what was written")
        for name in JOURNALS if journals else ():
            source = Path(journals or "", name)
            if source.exists():
                self._put(source, self._path(index.step, name), note)
        self._files.pipe_file(target, text)
        if self._files.cat_file(target) != text:
            raise OSError(f"{target} is not what was written")
        return index.step

    def _put(self, source: Path, target: str, note: Callable[[str], None]) -> None:
        """Write a file, with a note of each piece.

        Clients of buckets send parts beside each other. A mount is written piece by piece, for it
        tells of nothing.
        """
        from fsspec.callbacks import Callback
        from fsspec.implementations.local import LocalFileSystem

        if not isinstance(self._files, LocalFileSystem):
            progress = Callback(hooks={"note": lambda *_, **__: note(f"copies {source.name}")})
            self._files.put_file(str(source), target, callback=progress)
            return
        with source.open("rb") as stream, self._files.open(target, "wb") as copy:
            while block := stream.read(_CHUNK_BYTES):
                note(f"copies {source.name}")
                copy.write(block)

    def _read(self, path: str, note: Callable[[str], None]) -> Iterator[bytes]:
        """Yield the blocks of a file."""
        self._files.invalidate_cache()
        # No read-ahead: each block is asked for once.
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

    def download_journals(self, step: int, run_dir: Path, note: Callable[[str], None]) -> None:
        """Bring the records of a run that lie beside a copy, where those here end earlier.

        Raises:
            Exception: of any kind, by the file system.
            BadInput: they cannot be written, or those here cannot be read.
        """
        for name in JOURNALS:
            source = self._path(step, name)
            path = run_dir / name
            is_behind = not path.exists() or (name == STEPS_FILE and _last_step(path) < step)
            if is_behind and self._files.exists(source):
                note(f"brings {name}")
                write_text(path, self._files.cat_file(source).decode())

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

    def tell() -> None:
        note("waits for a copy of a checkpoint")

    with _alone(directory):
        newest = find_newest(directory)
        local_step = folder_step(newest)
        try:
            listed = wait_patiently(lambda _: remote.list_steps(), _PROBE_S, tell)
        except Exception as error:  # of any kind: each file system has its own
            _refuse_or_tell(url, directory, newest, f"cannot be listed ({shorten_error(error)})")
            return None
        for step in sorted(listed, reverse=True):
            if step <= local_step:
                break
            bring = partial(remote.download, step, directory, accept)
            try:
                path = wait_patiently(bring, PATIENCE_S, tell)
            # Before OSError, which it is: a silent server would be asked once for every older copy.
            except SilentServerError as error:
                _refuse_or_tell(url, directory, newest, f"cannot be read ({error})")
                return None
            except (OSError, BadInput) as error:
                if isinstance(error, BadInput) and not _is_damage(error):
                    raise
                _tell(f"the copy of step {step} in {url} is passed over: {shorten_error(error)}")
                continue
            _tell(f"{path} came from {url}")
            bring_journals = partial(remote.download_journals, step, directory.parent)
            try:
                wait_patiently(bring_journals, PATIENCE_S, tell)
            except Exception as error:  # of any kind: what is missing is said when the run goes on
                _tell(f"the records beside it did not come: {shorten_error(error)}")
            return path
    return None


def _refuse_or_tell(url: str, directory: Path, newest: Path | None, rule: str) -> None:
    """Refuse to begin where nobody knows where the run stands; else say that it goes on."""
    if newest is None:
        rule = f"{rule}, and {directory} has no checkpoint"
        raise BadInput(Reason(field=_FIELD, value=url, rule=rule))
    _tell(f"{url} {rule}: going on from {newest.name}")


def probe_copies(url: str, run_dir: Path) -> str:
    """Return why no copies of a run can be made at a URL; "" where they can.

    Raises:
        BadInput: what the URL needs is not installed, or it is in the folder of the run.
    """
    remote = RemoteFolder(url)
    if remote.is_within(run_dir):
        rule = "is in the folder of the run, and would be lost with it"
        raise BadInput(Reason(field=_FIELD, value=url, rule=rule, nearest="a folder elsewhere"))
    try:
        wait_patiently(remote.probe, _PROBE_S)
    except Exception as error:  # of any kind: each file system has its own
        return f"cannot be written ({shorten_error(error)})"
    return ""


def _last_step(path: Path) -> int:
    """Return the last step that has a record in steps.jsonl."""
    for line in reversed(read_complete_lines(path)):
        record = parse_json(line, where=str(path), floats=FloatPolicy.NON_FINITE)
        if isinstance(record, dict) and record.get("kind") == "step":
            return int(record["step"])
    return 0


def _is_damage(refusal: BadInput) -> bool:
    # A damaged file is named by its place in the folder of the fetch; `accept` names others.
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
        # That unlocks it. The file stays: another process may be waiting on it.
        os.close(handle)


def shorten_error(error: Exception) -> str:
    """Return an error of any file system as a few words."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _tell(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
