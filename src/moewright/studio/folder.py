"""Folders of the studio: its own, of dropped files by content and name, and those of runs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from starlette.concurrency import run_in_threadpool

from moewright.api.diagnosing import is_engine_run
from moewright.api.reporting import build_report, view_run
from moewright.api.watching import find_log
from moewright.codec import PLAN_FILE, find_run_folder, write_text
from moewright.codec.run_files import STEPS_FILE
from moewright.diagnosis.traces.event_files import EVENT_FILES
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_bytes
from moewright.studio.wire import build_or_refuse, encode_record
from moewright.view.run_view import RunsView

LARGEST_TEXT_BYTES = 16 * 2**20  # a script or configuration is kilobytes, a log some megabytes
LARGEST_TRACE_BYTES = 256 * 2**20  # of Kineto, packed: some steps of a large model
_MOST_KEPT = 100  # dropped files, the newest
_MOST_KEPT_BYTES = 2 * 2**30  # of dropped files together
_UPLOADING = ".uploading-"
_DIGEST_LETTERS = 12  # 48 bits tell a hundred files apart
_BLOCK_BYTES = 1 << 20  # so much is written at once, off the event loop


class StudioFolder:
    """The only folder that the studio writes to: the newest dropped files, within a budget."""

    def __init__(self, root: Path) -> None:
        self._dropped = root.resolve() / "dropped"

    async def receive(
        self, parts: AsyncIterator[bytes], name: str, *, limit_bytes: int = LARGEST_TEXT_BYTES
    ) -> Path:
        """Write a dropped file as it comes into a folder by its content, and return its path.

        It keeps its name, which is what answers call it by.

        Raises:
            BadInput: it is too large, or cannot be written; what had come of it is removed.
        """
        digest = sha256()
        nbytes = 0
        with self._open_upload() as file:
            async for block in _join_parts(parts):
                nbytes += len(block)
                if nbytes > limit_bytes:
                    rule = f"must have at most {format_bytes(limit_bytes)}"
                    raise BadInput(Reason(field="file", rule=rule))
                digest.update(block)
                await run_in_threadpool(file.write, block)
            file.flush()
            path = self._dropped / digest.hexdigest()[:_DIGEST_LETTERS] / name
            path.parent.mkdir(exist_ok=True)
            os.replace(file.name, path)
        await run_in_threadpool(self.prune)
        return path

    def keep_model(self, config: str, name: str) -> Path:
        """Write a model's config.json into a folder by name and content, and return the folder."""
        digest = sha256(config.encode()).hexdigest()[:_DIGEST_LETTERS]
        folder = self._dropped / f"{name}-{digest}"
        write_text(folder / "config.json", config)
        return folder

    def prune(self) -> None:
        """Remove the files that were dropped first, where there are too many or too large ones."""
        kept_bytes = 0
        for number, path in enumerate(sorted(self._dropped.glob("*"), key=_age)):
            kept_bytes += _count_bytes(path)
            if number < _MOST_KEPT and kept_bytes <= _MOST_KEPT_BYTES:
                continue
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove_uploads(self) -> None:
        """Remove the halves of files that a server which was killed had received."""
        for path in self._dropped.glob(f"{_UPLOADING}*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def _open_upload(self) -> Iterator[IO[bytes]]:
        """Open a hidden file, which is removed unless it was renamed meanwhile."""
        try:
            self._dropped.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self._dropped, prefix=_UPLOADING, delete=False) as file:
                try:
                    yield file
                finally:
                    Path(file.name).unlink(missing_ok=True)
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            raise BadInput(Reason(field=str(self._dropped), rule=rule)) from error


async def _join_parts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield blocks that are worth a turn of a thread, of the parts that a connection brings."""
    block = bytearray()
    async for part in parts:
        block += part
        if len(block) >= _BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _age(path: Path) -> float:
    with suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


def _count_bytes(path: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in (path, *path.glob("*")))
    return 0


_MOST_LISTED = 50  # in a menu; the newest are there
# A walk ends here, wherever it is: a root may be somebody's home.
_MOST_FOLDERS = 20_000
_MOST_WALK_S = 3.0
_LIVE_S = 120.0  # since the last step was written


def list_run_folders(root: Path, is_gone: Callable[[], bool] = lambda: False) -> list[str]:
    """List the folders with steps below a folder, the newest first, relative to it.

    The nearest folders come first; links and hidden folders are passed over. The walk ends as soon
    as whoever asked is gone.
    """
    times_s = {}
    for folder in _walk(root, is_gone):
        with suppress(OSError):
            if (folder / PLAN_FILE).exists():
                times_s[folder] = (folder / STEPS_FILE).stat().st_mtime
    newest = sorted(times_s, key=lambda folder: -times_s[folder])
    return [str(folder.relative_to(root)) for folder in newest[:_MOST_LISTED]]


def _walk(root: Path, is_gone: Callable[[], bool]) -> Iterator[Path]:
    """Yield folders below a folder, breadth first; those of runs are not gone into."""
    deadline_s = time.monotonic() + _MOST_WALK_S
    waiting = deque([root])
    for _ in range(_MOST_FOLDERS):
        if not waiting or is_gone() or time.monotonic() > deadline_s:
            return
        folder = waiting.popleft()
        if folder != root:
            yield folder
        if (folder / STEPS_FILE).exists():
            continue
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStamp:
    """When the steps of runs were last written: whether that is news, and whether they go on."""

    text: str
    is_live: bool


def stamp_runs(folders: Sequence[Path], root: Path) -> RunStamp:
    """Look when the steps of runs were last written; 0 for what is not below the root."""
    times = [_find_time_ns(folder, root) for folder in folders]
    is_live = any(time.time() - written / 1e9 < _LIVE_S for written in times)
    return RunStamp(text="-".join(map(str, times)), is_live=is_live)


def _find_time_ns(folder: Path, root: Path) -> int:
    with suppress(OSError, ValueError):
        path = find_run_folder(folder) / STEPS_FILE
        if path.resolve().is_relative_to(root.resolve()):
            return path.stat().st_mtime_ns
    return 0


def stamp_log(path: Path, root: Path) -> RunStamp:
    """Look how long a log below the root is, and when it was last written.

    Raises:
        BadInput: there is none, or it lies outside.
    """
    log = find_log(_require_inside(path, root))
    files = sorted(log.glob(EVENT_FILES)) if log.is_dir() else [log]
    states = [_require_inside(file, root).stat() for file in files]
    size = sum(state.st_size for state in states)
    written_ns = max(state.st_mtime_ns for state in states)
    is_live = time.time() - written_ns / 1e9 < _LIVE_S
    return RunStamp(text=f"{size}-{written_ns}", is_live=is_live)


def _require_inside(path: Path, root: Path) -> Path:
    with suppress(OSError, ValueError):  # of a name that no file can have
        if path.resolve().is_relative_to(root.resolve()):
            return path
    raise BadInput(Reason(field="path", rule="lies outside of the studio's folder, or is no path"))


def is_other_file(folders: Sequence[Path]) -> bool:
    """Return whether what is asked for is no run of ours, but a trace, a log or a script."""
    with suppress(OSError):  # of a name that no file can have
        return len(folders) == 1 and not is_engine_run(folders[0])
    return True


def read_runs(folders: Sequence[Path]) -> bytes:
    """Return the record of a run, or of several over each other, or why there is none, as JSON."""

    def build() -> bytes:
        views = [view_run(build_report(folder)) for folder in folders]
        return encode_record(views[0] if len(views) == 1 else RunsView(runs=tuple(views)))

    return build_or_refuse(build)


def encode_runs(stamp: RunStamp, record: bytes, *, is_file: bool = False) -> bytes:
    """Return what a page that follows runs gets; no record where there is no news.

    `is_file` tells it that a trace or a log was named, whose diagnosis is a task.
    """
    return b'{"stamp":%s,"live":%s,"is_file":%s,"records":[%s]}' % (
        json.dumps(stamp.text).encode(),
        json.dumps(stamp.is_live).encode(),
        json.dumps(is_file).encode(),
        record.strip(),
    )
