"""Files of a checkpoint: written as a stream and flushed to disk, verified, read by slices.

A file that is written past the page cache, where its file system can, and hashed on its way. A
write through the page cache copies every byte, takes a page for it, and gives it back when the file
is purged: a third of a save's CPU time. So DeepSpeed's FastPersist writes checkpoints too
(arXiv:2406.13768).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moewright.engine.checkpoint.index import (
    OLDER_CHECKPOINT,
    FileEntry,
    StoredShard,
    TensorEntry,
    box_key,
)
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES, LocalShard
from moewright.rules.checkpoint_shares import WRITE_ALIGNMENT, WRITE_BUFFER_BYTES
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_bytes

_SMALL_BUFFER_BYTES = 1 << 16  # a page of pages: little tensors need no more
# 0 where the system has no such flag: writes go through the page cache there.
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
        # Direct writes take multiples of the alignment; only the end of a file has less.
        aligned = self._filled - self._filled % WRITE_ALIGNMENT
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
        return _allocate_aligned(WRITE_BUFFER_BYTES)
    except RuntimeError:
        return _allocate_aligned(_SMALL_BUFFER_BYTES)


def _allocate_aligned(nbytes: int) -> torch.Tensor:
    # O_DIRECT needs an address of this alignment, and torch's allocator promises less.
    memory_u8 = torch.empty(nbytes + WRITE_ALIGNMENT, dtype=torch.uint8)
    start = -memory_u8.data_ptr() % WRITE_ALIGNMENT
    return memory_u8[start : start + nbytes]


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _O_DIRECT, 0o666)
    except OSError as error:
        # EINVAL is how a file system refuses the flag.
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some systems create it before they refuse the flag
    return os.open(path, flags, 0o666)


_CHUNK_BYTES = 1 << 22  # progress is told after each, so that a slow disk is no hang


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """A tensor in the header of a safetensors file; `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype].itemsize * prod(self.shape)


def write_payload(
    path: Path, shards: Sequence[LocalShard], note: Callable[[str], None] = lambda piece: None
) -> FileEntry:
    """Write `shards` as one safetensors file and flush it to disk.

    One tensor at a time is on the host. Wide dtypes come first, so that all are aligned. `note` is
    called with each piece before it is written.
    """
    ordered = sorted(
        shards, key=lambda shard: (-shard.tensor.element_size(), shard.name, shard.offsets)
    )
    headers = [
        TensorHeader(
            name=box_key(shard.name, shard.offsets),
            dtype=shard.dtype,
            shape=tuple(shard.tensor.shape),
        )
        for shard in ordered
    ]

    def take_tensors() -> Iterator[torch.Tensor]:
        for shard in ordered:
            note(f"saves {shard.name}")
            yield shard.tensor

    return write_tensors(path, headers, take_tensors())


def write_tensors(
    path: Path,
    headers: Sequence[TensorHeader],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write `tensors`, each when it comes, as one safetensors file, and flush it to disk.

    Raises:
        ValueError: when a tensor has not the bytes of its header, or there are not as many tensors
            as headers.
        OSError: when the file exists or cannot be written.
    """
    preamble, data_bytes = _build_preamble(headers, metadata)
    with DirectFile(path) as file:
        file.write(torch.frombuffer(preamble, dtype=torch.uint8))
        for header, tensor in zip(headers, tensors, strict=True):
            # Flat first: torch refuses to view a tensor without dims as a narrower dtype.
            data_u8 = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            if data_u8.numel() != header.nbytes:
                raise ValueError(f"{header.name}: {data_u8.numel()} bytes for {header.nbytes}")
            file.write(data_u8)
        sha256 = file.finish()
    return FileEntry(name=path.name, nbytes=len(preamble) + data_bytes, sha256=sha256)


def _build_preamble(
    headers: Sequence[TensorHeader], metadata: Mapping[str, str] | None
) -> tuple[bytearray, int]:
    """Return what comes before the data of a safetensors file, and the bytes of the data."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for header in headers:
        begin = end
        end += header.nbytes
        entries[header.name] = {
            "dtype": header.dtype,
            "shape": list(header.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8, as safetensors writes them, so that the data are aligned.
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text), end


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it to disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify_file(
    directory: Path, entry: FileEntry, note: Callable[[str], None] = lambda piece: None
) -> None:
    """Raise BadInput, naming the file, unless it has the size and the checksum of its entry.

    `note` is called with each piece before it is read.
    """
    path = directory / entry.name
    try:
        status = path.lstat()
        # By lstat: a link is refused too, for what it leads to lies outside of the checkpoint.
        if not S_ISREG(status.st_mode):
            raise damage_error(path, "is not a regular file")
        if status.st_size != entry.nbytes:
            rule = f"is damaged: {status.st_size} bytes, its index says {entry.nbytes}"
            raise damage_error(path, rule)
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_CHUNK_BYTES):
                note(f"verifies {entry.name}")
                digest.update(block)
    except FileNotFoundError as error:
        raise damage_error(path, "is missing") from error
    except OSError as error:
        raise damage_error(path, f"cannot be read ({error.strerror})") from error
    if digest.hexdigest() != entry.sha256:
        raise damage_error(path, "is damaged: its checksum does not hold")


def damage_error(path: Path, rule: str) -> BadInput:
    """Return the refusal of a damaged file of a checkpoint."""
    return BadInput(Reason(field=str(path), rule=rule, nearest=OLDER_CHECKPOINT))


class PayloadReader:
    """A reader of regions of the shards that one checkpoint stores; it maps each file once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open_files: dict[str, Any] = {}

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.clear()
        self._stack.close()

    def read_region(
        self, tensor: TensorEntry, shard: StoredShard, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Read the box of `sizes` at `offsets` of a shard, on the host.

        Raises:
            BadInput: when the file does not hold what the index says.
        """
        path = self._directory / shard.file
        key = box_key(tensor.name, shard.box[0])
        try:
            file = self._open(shard.file)
            stored = file.get_slice(key)
            dtype = stored.get_dtype()
            shape = tuple(stored.get_shape())
            if (dtype, shape) == (tensor.dtype, shard.box[1]):
                # A tensor without dims has nothing to slice.
                if not sizes:
                    scalar: torch.Tensor = file.get_tensor(key)
                    return scalar
                box = tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(offsets, sizes, strict=True)
                )
                region: torch.Tensor = stored[box]
                return region
        except (SafetensorError, OSError) as error:
            raise damage_error(path, f"cannot be read ({error})") from error
        rule = f"{key} is {dtype} {list(shape)}, its index says {tensor.dtype} {shard.box[1]}"
        raise damage_error(path, rule)

    def _open(self, name: str) -> Any:
        if name not in self._open_files:
            file = safe_open(self._directory / name, framework="pt", device="cpu")
            self._open_files[name] = self._stack.enter_context(file)
        return self._open_files[name]


def require_space(directory: Path, required_bytes: int) -> None:
    """Raise BadInput when the file system of `directory` has less than `required_bytes` free.

    The directory itself may yet have to be made.
    """
    candidates = (directory, *directory.absolute().parents)
    existing = next((path for path in candidates if path.is_dir()), Path("/"))
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < required_bytes:
        raise _space_error(directory, required_bytes, free_bytes)


def write_error(directory: Path, error: OSError, required_bytes: int) -> BadInput:
    """Return the refusal for an operating system error while writing below `directory`."""
    if error.errno == errno.EFBIG:
        rule = "a file of a checkpoint may not grow so large: there is a limit on the size of files"
        return BadInput(Reason(field=str(directory), rule=rule, nearest="ulimit -f unlimited"))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _space_error(directory, required_bytes, shutil.disk_usage(directory).free)
    rule = f"cannot be written ({error.strerror})"
    nearest = "a directory that you may write to"
    return BadInput(Reason(field=str(directory), rule=rule, nearest=nearest))


def _space_error(directory: Path, required_bytes: int, free_bytes: int) -> BadInput:
    rule = (
        f"no room: a checkpoint needs {format_bytes(required_bytes)} ({required_bytes} bytes), "
        f"{free_bytes} bytes are free"
    )
    return BadInput(Reason(field=str(directory), rule=rule, nearest="free some, or lower keep"))
