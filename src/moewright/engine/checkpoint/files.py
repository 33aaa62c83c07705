"""Files of a checkpoint: written as a stream and flushed to disk, verified by checksum, read by
slices."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moewright.engine.checkpoint.index import FileEntry, StoredShard, TensorEntry, box_key
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES, LocalShard
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_bytes

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """A tensor in the header of a safetensors file; `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype].itemsize * prod(self.shape)


def write_payload(path: Path, pieces: Sequence[LocalShard]) -> FileEntry:
    """Write `pieces` as one safetensors file, one tensor on the host at a time, and flush it to
    disk."""
    ordered = sorted(
        pieces, key=lambda piece: (-piece.tensor.element_size(), piece.name, piece.offsets)
    )  # aligned
    rows = [
        TensorHeader(
            name=box_key(piece.name, piece.offsets),
            dtype=piece.dtype,
            shape=tuple(piece.tensor.shape),
        )
        for piece in ordered
    ]
    return write_tensors(path, rows, (piece.tensor for piece in ordered))


def write_tensors(
    path: Path,
    headers: Sequence[TensorHeader],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write `tensors`, which are those of `rows`, as one safetensors file, each when it comes, and
    flush it to disk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for row in headers:
        begin, end = end, end + row.nbytes
        header[row.name] = {
            "dtype": row.dtype,
            "shape": list(row.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            file.write(block)
        for row, tensor in zip(headers, tensors, strict=True):
            host = tensor.detach().to("cpu").contiguous()
            data = host.reshape(-1).view(torch.uint8).numpy().data
            if data.nbytes != row.nbytes:
                raise ValueError(f"{row.name}: {data.nbytes} bytes came for {row.nbytes}")
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, nbytes=8 + len(text) + end, sha256=digest.hexdigest())


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


def verify_file(directory: Path, entry: FileEntry) -> None:
    """Raise BadInput, naming the file, unless it has the size and the checksum of its entry."""
    path = directory / entry.name
    try:
        status = path.lstat()
        if not S_ISREG(status.st_mode):
            raise _damaged(path, "is not a regular file")
        if status.st_size != entry.nbytes:
            raise _damaged(
                path, f"is damaged: {status.st_size} bytes, its index says {entry.nbytes}"
            )
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_CHUNK_BYTES):
                digest.update(block)
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    if digest.hexdigest() != entry.sha256:
        raise _damaged(path, "is damaged: its checksum does not hold")


def _damaged(path: Path, rule: str) -> BadInput:
    return BadInput(Reason(field=str(path), rule=rule, nearest="an older checkpoint"))


class PayloadReader:
    """Reads regions of shards from the payload files of one checkpoint, each mapped once, until
    closed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def read_region(
        self, tensor: TensorEntry, shard: StoredShard, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """The box of `sizes` at `offsets` of a shard, on the host. Raises BadInput when the file
        disagrees."""
        path = self._directory / shard.file
        key = box_key(tensor.name, shard.box[0])
        try:
            if shard.file not in self._open:
                self._open[shard.file] = self._stack.enter_context(
                    safe_open(path, framework="pt", device="cpu")
                )
            file = self._open[shard.file]
            stored = file.get_slice(key)
            found = (stored.get_dtype(), tuple(stored.get_shape()))
            if found == (tensor.dtype, shard.box[1]):
                if not sizes:
                    scalar: torch.Tensor = file.get_tensor(key)
                    return scalar
                part: torch.Tensor = stored[
                    tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
                ]
                return part
        except (SafetensorError, OSError) as error:
            raise _damaged(path, f"cannot be read ({error})") from error
        raise _damaged(
            path,
            f"{key} is {found[0]} {list(found[1])}, its index says {tensor.dtype} {shard.box[1]}",
        )


def require_space(directory: Path, required_bytes: int) -> None:
    """Raise BadInput when the file system of `directory`, which may yet be made, has less than
    `need_bytes` free."""
    there = next(
        (path for path in (directory, *directory.absolute().parents) if path.is_dir()), Path("/")
    )
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < required_bytes:
        raise _full(directory, required_bytes, free_bytes)


def write_error(directory: Path, error: OSError, required_bytes: int) -> BadInput:
    """The one line for an operating system error while writing below `directory`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _full(directory, required_bytes, shutil.disk_usage(directory).free)
    what = f"cannot be written ({error.strerror})"
    return BadInput(
        Reason(field=str(directory), rule=what, nearest="a directory that you may write to")
    )


def _full(directory: Path, need_bytes: int, free_bytes: int) -> BadInput:
    sizes = f"a checkpoint needs {format_bytes(need_bytes)} ({need_bytes} bytes), {free_bytes} bytes are free"
    return BadInput(
        Reason(field=str(directory), rule=f"no room: {sizes}", nearest="free some, or lower keep")
    )
