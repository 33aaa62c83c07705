"""Files past the page cache: the bytes and the checksum, whatever the file system takes."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moewright.engine.checkpoint import files
from moewright.engine.checkpoint.files import DirectFile

BUFFER = 1 << 14


@pytest.fixture(autouse=True)
def use_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITE_BUFFER_BYTES", BUFFER)


def write_pieces(path: Path, sizes: tuple[int, ...]) -> bytes:
    """Write random pieces of these sizes as one file, hold its checksum, return the bytes."""
    generator = torch.Generator().manual_seed(sum(sizes))
    pieces = [
        torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes
    ]
    with DirectFile(path) as file:
        for piece in pieces:
            file.write(piece)
        sha256 = file.finish()
    content = b"".join(bytes(piece.tolist()) for piece in pieces)
    assert sha256 == hashlib.sha256(content).hexdigest()
    return content


SIZES = [
    (),
    (1,),
    (4095,),
    (4096,),
    (BUFFER - 1, 1),
    (BUFFER,),
    (BUFFER + 1,),
    (5, 0, 3 * BUFFER, 4097),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_file_of_any_size_has_the_bytes_that_came(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    assert write_pieces(tmp_path / "file", sizes) == (tmp_path / "file").read_bytes()


def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & files._O_DIRECT:
            os.close(open_file(path, flags & ~files._O_DIRECT, mode))
            raise OSError(errno.EINVAL, "no direct writes")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def refuse_at_write(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def refuse(handle: int, data: memoryview) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & files._O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return write(handle, data)

    monkeypatch.setattr(os, "write", refuse)


def write_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:1000]))


def refuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = files._allocate_aligned
    monkeypatch.setattr(files, "_SMALL_BUFFER_BYTES", BUFFER // 4)

    def refuse(nbytes: int) -> torch.Tensor:
        if nbytes == BUFFER:
            raise RuntimeError("no memory")
        return allocate(nbytes)

    monkeypatch.setattr(files, "_allocate_aligned", refuse)


@pytest.mark.parametrize("hinder", [refuse_at_open, refuse_at_write, write_a_part, refuse_memory])
def test_without_direct_writes_or_memory_the_bytes_are_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hinder: Callable[[pytest.MonkeyPatch], None],
) -> None:
    hinder(monkeypatch)
    assert write_pieces(tmp_path / "file", SIZES[-1]) == (tmp_path / "file").read_bytes()


def test_what_is_there_is_not_overwritten_and_what_fails_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pieces(tmp_path / "file", (4096,))
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")

    def fail(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="no room"):
        write_pieces(tmp_path / "full", (4096,))
