"""The lock that lets one job at a time into a run directory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moewright.spec.errors import BadInput, Reason

# Ranks outlive a killed launcher by a moment, and a supervisor restarts it at once.
_PATIENCE_S = 1.0


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir`/lock, making the directory if need be.

    The kernel drops the lock with the last process of the job, so a lock file left behind means
    nothing.

    Raises:
        BadInput: when another job holds it.
    """
    path = run_dir / "lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        rule = f"cannot be used as a run directory ({error.strerror})"
        raise BadInput(Reason(field=str(run_dir), rule=rule)) from error
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not _try_lock(handle):
            if time.monotonic() > deadline_s:
                holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                rule = f"is in use by another job (process {holder})"
                raise BadInput(
                    Reason(field=str(run_dir), rule=rule, nearest="another run directory")
                )
            time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
