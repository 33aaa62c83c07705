"""Worker processes: one is kept ready, so that an answer does not wait for its imports."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

_LONGEST_LINE = 64 * 2**20


class Workers:
    """Starts a worker for each task, and ends it when its answers are no longer read."""

    def __init__(self) -> None:
        self._ready: Process | None = None

    async def prepare(self) -> None:
        """Start the process that takes the next task."""
        if self._ready is None:
            self._ready = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "moewright.studio.worker",
                stdin=PIPE,
                stdout=PIPE,
                limit=_LONGEST_LINE,
            )

    async def run(self, task: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the lines that a worker answers; closing the iterator kills it."""
        await self.prepare()
        process = self._ready
        self._ready = None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            question = json.dumps({"task": task, "params": dict(params)}) + "\n"
            process.stdin.write(question.encode())
            await process.stdin.drain()
            while line := await process.stdout.readline():
                yield line
        finally:
            _kill(process)
            await asyncio.shield(process.wait())
            await self.prepare()

    async def close(self) -> None:
        """End the process that waits."""
        if self._ready is not None:
            _kill(self._ready)
            await self._ready.wait()
            self._ready = None


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
