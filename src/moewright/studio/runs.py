"""Runs in the studio: folders on this machine, runs that go on, dropped traces and logs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from moewright.api.diagnosing import diagnose, is_engine_run, view_diagnosis
from moewright.api.reporting import build_report, find_run_folder, view_run
from moewright.codec import PLAN_FILE
from moewright.codec.run_files import STEPS_FILE
from moewright.spec.errors import BadInput
from moewright.spec.record import Record
from moewright.studio.folder import StudioFolder
from moewright.studio.wire import encode_record
from moewright.view.diagnosis_view import DiagnosisView
from moewright.view.plan_view import build_refusal
from moewright.view.run_view import RunsView

_MOST_LISTED = 50
_SUFFIXES = (".json", ".json.gz", ".gz", ".log", ".txt", ".sqlite")  # of traces and logs
_LIVE_S = 120.0  # since the last step was written


def list_run_folders(root: Path) -> list[str]:
    """List the folders with steps below a folder, the newest first."""
    files = sorted(root.glob(f"**/{STEPS_FILE}"), key=lambda path: -path.stat().st_mtime)
    return [str(path.parent) for path in files[:_MOST_LISTED] if (path.parent / PLAN_FILE).exists()]


def follow_runs(folders: Sequence[Path], stamp: str) -> bytes:
    """Return the records of runs as JSON, none where nothing was written since `stamp`."""
    files = [find_run_folder(folder) / STEPS_FILE for folder in folders]
    times = [path.stat().st_mtime_ns if path.exists() else 0 for path in files]
    now = "-".join(map(str, times))
    records: list[Record] = []
    if now != stamp:
        try:
            records = _read_records(folders)
        except BadInput as error:
            records = [build_refusal(error.reasons)]
    data = b",".join(map(encode_record, records))
    is_live = any(time.time() - written / 1e9 < _LIVE_S for written in times)
    return b'{"stamp":%s,"live":%s,"records":[%s]}' % (
        json.dumps(now).encode(),
        json.dumps(is_live).encode(),
        data,
    )


def _read_records(folders: Sequence[Path]) -> list[Record]:
    if len(folders) == 1 and not is_engine_run(folders[0]):
        return [view_diagnosis(diagnose(folders[0]))]
    views = [view_run(build_report(folder)) for folder in folders]
    return list(views) if len(views) == 1 else [RunsView(runs=tuple(views))]


def diagnose_dropped(folder: StudioFolder, content: bytes, name: str) -> DiagnosisView:
    """Keep a dropped trace or log, and diagnose it.

    Raises:
        BadInput: it is neither.
    """
    suffix = "".join(Path(name).suffixes[-2:])
    return view_diagnosis(
        diagnose(folder.keep_bytes(content, suffix if suffix in _SUFFIXES else ".log"))
    )
