"""A file that is written past the page cache, where its file system can, and hashed on its way.

A write through the page cache copies every byte, takes a page for it, and gives it back when the
file is purged: a third of a save's CPU time. So DeepSpeed's FastPersist writes checkpoints too
(arXiv:2406.13768).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from types import TracebackType

import torch

# A multiple of what any device asks of addresses, offsets and lengths.
_ALIGNMENT = 4096
_BUFFER_BYTES = 1 << 21
_SMALL_BUFFER_BYTES = 1 << 16
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A new file that is written from its start to its end, and hashed with SHA-256."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: when it exists or cannot be created.
        """
        self._digest = hashlib.sha256()
        self._buffer_u8 = _allocate_buffer()
        self._view = self._buffer_u8.numpy().data
        self._filled = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = _open_direct(path, flags)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._handle)

    def write(self, data_u8: torch.Tensor) -> None:
        """Append the bytes of a 1-D tensor on the host.

        Raises:
            OSError: as the file system does.
        """
        start = 0
        while start < len(data_u8):
            # Copies, hashes and writes of torch, hashlib and os leave Python to other threads.
            end = min(len(data_u8), start + len(self._buffer_u8) - self._filled)
            filled = self._filled + end - start
            self._buffer_u8[self._filled : filled].copy_(data_u8[start:end])
            start = end
            self._filled = filled
            if filled == len(self._buffer_u8):
                self._flush()

    def finish(self) -> str:
        """Write what is left, flush the file to disk, and return its SHA-256.

        Raises:
            OSError: as the file system does.
        """
        self._flush()
        os.fsync(self._handle)
        return self._digest.hexdigest()

    def _flush(self) -> None:
        self._digest.update(self._view[: self._filled])
        aligned = self._filled - self._filled % _ALIGNMENT
        self._write_out(0, aligned)
        if aligned < self._filled:  # the end of the file
            self._leave_direct()
            self._write_out(aligned, self._filled)
        self._filled = 0

    def _write_out(self, start: int, end: int) -> None:
        while start < end:
            try:
                start += os.write(self._handle, self._view[start:end])
            except OSError as error:
                # After a short write, or where a file system takes the flag and not the write.
                if error.errno != errno.EINVAL or not self._leave_direct():
                    raise

    def _leave_direct(self) -> bool:
        """Write through the page cache from here on; return whether that is something new."""
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~_O_DIRECT)
        return bool(flags & _O_DIRECT)


def _allocate_buffer() -> torch.Tensor:
    """Return an aligned buffer, a small one where there is no memory for more: saves need little.

    Raises:
        RuntimeError: by torch, where there is none for that either.
    """
    try:
        return _allocate_aligned(_BUFFER_BYTES)
    except RuntimeError:
        return _allocate_aligned(_SMALL_BUFFER_BYTES)


def _allocate_aligned(nbytes: int) -> torch.Tensor:
    memory_u8 = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
    start = -memory_u8.data_ptr() % _ALIGNMENT
    return memory_u8[start : start + nbytes]


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some systems create it before they refuse the flag
    return os.open(path, flags, 0o666)
