"""Worker processes: one is kept ready, so that an answer does not wait for its imports."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from moewright.spec.errors import Reason
from moewright.studio.confinement import Confinement
from moewright.studio.wire import encode_refusal

_LONGEST_LINE = 64 * 2**20  # a record of the largest page, as JSON
_MOST_AT_WORK = 2  # a search keeps a core busy for seconds
_MOST_WAITING = 8  # whoever comes later is told to come again


def _ignore() -> None:
    """Do nothing."""


class Workers:
    """Starts a worker for each task, and ends it when its answers are no longer read.

    Few work at a time, the others wait for their turn. A worker runs the program `module`; `refuse`
    writes why a task has no answer, as its worker would.
    """

    def __init__(
        self,
        confinement: Confinement,
        *,
        module: str = "moewright.studio.worker",
        refuse: Callable[[Reason], bytes] = encode_refusal,
    ) -> None:
        self._confinement = confinement
        self._module = module
        self._encode_refusal = refuse
        self._ready: Process | None = None
        self._turns = asyncio.Semaphore(_MOST_AT_WORK)
        self._starting = asyncio.Lock()
        self._replacing: set[asyncio.Task[None]] = set()
        self._waiting = 0

    async def prepare(self) -> None:
        """Start the process that takes the next task."""
        async with self._starting:
            if self._ready is None:
                self._ready = await self._start()

    async def _start(self) -> Process:
        walls = self._confinement
        # -P: modules are never taken from the folder that the program stands in.
        command = [sys.executable, "-P", "-m", self._module]
        command += [str(walls.root), str(walls.folder), str(walls.hub_cache)]
        command += ["--read-only"] * walls.is_read_only
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=_LONGEST_LINE
        )

    async def ask(
        self, task: str, params: Mapping[str, Any], *, on_turn: Callable[[], None] = _ignore
    ) -> bytes:
        """Return the last line that a worker answers; `on_turn` is called when one begins to."""
        answer = b""
        async with aclosing(self.run(task, params, on_turn=on_turn)) as lines:
            async for line in lines:
                answer = line
        return answer

    async def run(
        self, task: str, params: Mapping[str, Any], *, on_turn: Callable[[], None] = _ignore
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines that a worker answers; closing the iterator kills it."""
        if self._waiting >= _MOST_WAITING:
            yield self._refuse("has more questions than it can answer: ask again later")
            return
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            on_turn()
            async with aclosing(self._answer(task, params)) as lines:
                async for line in lines:
                    yield line
        finally:
            self._turns.release()

    async def _answer(self, task: str, params: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        process = self._ready or await self._start()
        self._ready = None
        assert process.stdin is not None
        assert process.stdout is not None
        has_answered = False
        try:
            question = json.dumps({"task": task, "params": dict(params)}) + "\n"
            with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: said below
                process.stdin.write(question.encode())
                await process.stdin.drain()
            while line := await process.stdout.readline():
                has_answered = True
                yield line
            code = await process.wait()
            if code or not has_answered:
                yield self._refuse(_explain_end(code))
        finally:
            _kill(process)
            # A task of its own: this one may be cancelled, and could wait for nothing any more.
            replacing = asyncio.create_task(self._replace(process))
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replacing.discard)

    def _refuse(self, rule: str) -> bytes:
        return self._encode_refusal(Reason(field="server", rule=rule)) + b"\n"

    async def _replace(self, process: Process) -> None:
        await process.wait()
        await self.prepare()

    async def close(self) -> None:
        """End the process that waits."""
        await asyncio.gather(*self._replacing)
        if self._ready is not None:
            _kill(self._ready)
            await self._ready.wait()
            self._ready = None


def _explain_end(code: int) -> str:
    """Return why a worker has ended without an answer."""
    if code == -signal.SIGXCPU:
        return "needs more time for an answer than it may take"
    if code < 0:
        return f"had no answer: its worker was killed by {signal.Signals(-code).name}"
    return "had no answer: its worker failed"


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
