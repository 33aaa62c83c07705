"""Processes for tasks: forks of one that is kept warm, so that an answer waits for no imports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from moewright.spec.errors import Reason
from moewright.studio.confinement import Confinement
from moewright.studio.forking import SOCKETS
from moewright.studio.wire import encode_refusal

_LONGEST_LINE = 64 * 2**20  # a record of the largest page, as JSON
_MOST_AT_WORK = 2  # a search keeps a core busy for seconds
_MOST_WAITING = 8  # whoever comes later is told to come again
_MOST_DIGITS = 8  # of an exit code
_TRIES = 2  # of a question whose process was killed with the one that had forked it


@dataclass(frozen=True, kw_only=True, slots=True)
class _WarmProcess:
    """A process that forks for each question that comes over its socket."""

    process: Process
    questions: socket.socket


def _ignore() -> None:
    """Do nothing."""


class Workers:
    """Has each task answered by a process of its own, ended when its answers are not read.

    Few work at a time, the others wait for their turn. They are forks of a process that is warm and
    runs the program `module`; `refuse` writes why a task has no answer, as it would.
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
        self._warm: _WarmProcess | None = None
        self._turns = asyncio.Semaphore(_MOST_AT_WORK)
        self._starting = asyncio.Lock()
        self._waiting = 0

    async def prepare(self) -> None:
        """Start the process that forks for each task, if none runs."""
        async with self._starting:
            if self._warm is None or self._warm.process.returncode is not None:
                self._warm = await self._start()

    async def _start(self) -> _WarmProcess:
        walls = self._confinement
        # -P: modules are never taken from the folder that the program stands in.
        command = [sys.executable, "-P", "-m", self._module]
        command += [str(walls.root), str(walls.folder), str(walls.hub_cache)]
        command += ["--read-only"] * walls.is_read_only
        server_side, fork_side = socket.socketpair()
        with fork_side:
            # A session of its own: its group is what it has forked, and Ctrl-C does not reach it.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=fork_side.fileno(), stdout=DEVNULL, start_new_session=True
            )
        return _WarmProcess(process=process, questions=server_side)

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
        question = json.dumps({"task": task, "params": dict(params)}) + "\n"
        has_answered = False
        code = b""
        # Where the process that is warm was killed, nobody tells how a fork has ended.
        for _ in range(_TRIES):
            talk, end = await self._open_fork()
            try:
                reader, writer = await asyncio.open_connection(sock=talk, limit=_LONGEST_LINE)
                try:
                    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                        writer.write(question.encode())
                        await writer.drain()
                        while line := await reader.readline():
                            has_answered = True
                            yield line
                finally:
                    writer.close()
                code = await asyncio.get_running_loop().sock_recv(end, _MOST_DIGITS)
            finally:
                end.close()  # which ends a process that still works
            if code or has_answered:
                break
        if code != b"0" or not has_answered:
            yield self._refuse(_explain_end(int(code or 1)))

    async def _open_fork(self) -> tuple[socket.socket, socket.socket]:
        """Return the sockets of a new fork: for question and answers, and for its end."""
        await self.prepare()
        assert self._warm is not None
        server_side, fork_side = zip(*(socket.socketpair() for _ in range(SOCKETS)), strict=True)
        try:
            socket.send_fds(self._warm.questions, [b"?"], [side.fileno() for side in fork_side])
        except OSError:  # it was killed, which has not been noticed yet
            await self._end_warm()
            return await self._open_fork()
        finally:
            for side in fork_side:
                side.close()
        for side in server_side:
            side.setblocking(False)
        talk, end = server_side
        return talk, end

    def _refuse(self, rule: str) -> bytes:
        return self._encode_refusal(Reason(field="server", rule=rule)) + b"\n"

    async def close(self) -> None:
        """End the process that is warm, and all that it has forked."""
        if self._warm is not None:
            await self._end_warm()

    async def _end_warm(self) -> None:
        assert self._warm is not None
        warm = self._warm
        self._warm = None
        warm.questions.close()
        with suppress(ProcessLookupError):
            os.killpg(warm.process.pid, signal.SIGKILL)
        await warm.process.wait()


def _explain_end(code: int) -> str:
    """Return why a worker has ended without an answer."""
    if code == -signal.SIGXCPU:
        return "needs more time for an answer than it may take"
    if code < 0:
        return f"had no answer: its worker was killed by {signal.Signals(-code).name}"
    return "had no answer: its worker failed"
