"""The lock that lets one program at a time write into a folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moewright.spec.errors import BadInput, Reason

# A job that is about to end may hold its lock a moment longer.
_PATIENCE_S = 1.0
# Ranks outlive a killed launcher until they have written what they were writing and their memory is
# given back, and a supervisor restarts it at once.
_PATIENCE_WITH_RANKS_S = 30.0


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder`/lock, making the folder if need be.

    The kernel drops the lock with the last process of the job, so a lock file left behind means
    nothing.

    Raises:
        BadInput: another job holds it, or the folder or its lock cannot be used.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        rule = f"cannot be used as a folder to write in ({error.strerror})"
        raise BadInput(Reason(field=str(folder), rule=rule)) from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BadInput(Reason(field=str(path), rule="is not a regular file; delete it"))
        start_s = time.monotonic()
        while not _try_lock(handle):
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            patience_s = _PATIENCE_WITH_RANKS_S if _has_ended(holder) else _PATIENCE_S
            if time.monotonic() - start_s > patience_s:
                rule = f"is in use by another job (process {holder})"
                raise BadInput(Reason(field=str(folder), rule=rule, nearest="another folder"))
            time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextmanager
def discard_new_folder(folder: Path) -> Iterator[None]:
    """Remove, when the block refuses its input, what it has made of a folder and its parents."""
    parents = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BadInput:
        if parents:
            shutil.rmtree(parents[-1], ignore_errors=True)
        raise


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_ended(holder: str) -> bool:
    """Return whether the process of this number, which took the lock, is no more."""
    if not holder.isdecimal():
        return False
    try:
        os.kill(int(holder), 0)
    except PermissionError:
        return False
    except (ProcessLookupError, OverflowError):
        return True
    return False
