"""Runs in the studio: folders on this machine, and runs that go on."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moewright.api.diagnosing import is_engine_run
from moewright.api.reporting import build_report, find_run_folder, view_run
from moewright.codec import PLAN_FILE
from moewright.codec.run_files import STEPS_FILE
from moewright.studio.wire import build_or_refuse, encode_record
from moewright.view.run_view import RunsView

_MOST_LISTED = 50
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


def stamp_runs(folders: Sequence[Path]) -> RunStamp:
    """Look when the steps of runs were last written."""
    files = [find_run_folder(folder) / STEPS_FILE for folder in folders]
    times = [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
    is_live = any(time.time() - written / 1e9 < _LIVE_S for written in times)
    return RunStamp(text="-".join(map(str, times)), is_live=is_live)


def is_other_file(folders: Sequence[Path]) -> bool:
    """Return whether what is asked for is no run of ours, but a trace, a log or a script."""
    return len(folders) == 1 and not is_engine_run(folders[0])


def read_runs(folders: Sequence[Path]) -> bytes:
    """Return the record of a run, or of several over each other, or why there is none, as JSON."""

    def build() -> bytes:
        views = [view_run(build_report(folder)) for folder in folders]
        return encode_record(views[0] if len(views) == 1 else RunsView(runs=tuple(views)))

    return build_or_refuse(build)


def encode_runs(stamp: RunStamp, record: bytes) -> bytes:
    """Return what a page that follows runs gets; no record where there is no news."""
    return b'{"stamp":%s,"live":%s,"records":[%s]}' % (
        json.dumps(stamp.text).encode(),
        json.dumps(stamp.is_live).encode(),
        record.strip(),
    )
