"""The studio's own folder: dropped files by their content, so that an address finds them again."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from starlette.concurrency import run_in_threadpool

from moewright.codec import write_text
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_bytes

LARGEST_TEXT_BYTES = 16 * 2**20
LARGEST_TRACE_BYTES = 256 * 2**20
_MOST_KEPT = 100
_MOST_KEPT_BYTES = 2 * 2**30
_UPLOADING = ".uploading-"
_DIGEST_LETTERS = 12
_BLOCK_BYTES = 1 << 20


class StudioFolder:
    """The only folder that the studio writes to: the newest dropped files, within a budget."""

    def __init__(self, root: Path) -> None:
        self._dropped = root.resolve() / "dropped"

    async def receive(
        self, parts: AsyncIterator[bytes], suffix: str, *, limit_bytes: int = LARGEST_TEXT_BYTES
    ) -> Path:
        """Write a dropped file under a name by its content as it comes, and return its path.

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
            path = self._dropped / f"{digest.hexdigest()[:_DIGEST_LETTERS]}{suffix}"
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
