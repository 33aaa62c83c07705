"""A process that is warm, and forks one for each question, which costs its own work alone.

Questions come over a socket, each as two more: one by which the question comes and its answers go,
and one by which its end is told. The server closes the latter when nobody waits for the answers any
more, and the process that works on them is killed. What it may use of time and memory, and of the
disk, is limited.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from moewright.spec.errors import Reason, lacks_memory
from moewright.spec.units import format_bytes
from moewright.studio.confinement import Confinement

_MOST_BYTES = 4 * 2**30  # of an answer: two at a time leave room on a laptop
_MOST_CPU_S = 300  # of an answer: a page is closed before
SOCKETS = 2  # that come with a question

Answer = Callable[[str, Mapping[str, Any], Confinement], Iterator[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForkedAnswer:
    """A process that works on a question."""

    pid: int
    life: int  # a file that is at its end once the process is
    end: socket.socket  # whose other side tells that nobody waits, or is told how it ended


def work(
    arguments: Sequence[str],
    answer_task: Answer,
    refuse: Callable[[Reason], bytes],
    warm_ups: Sequence[tuple[str, Mapping[str, Any]]],
) -> None:
    """Answer questions {"task": ..., "params": {...}} until their server is gone.

    `warm_ups` are tasks whose answers fill caches while nobody asks; `refuse` writes that there is
    no memory for an answer.
    """
    root, folder, hub_cache, *options = arguments
    confinement = Confinement(
        root=Path(root),
        folder=Path(folder),
        hub_cache=Path(hub_cache),
        is_read_only="--read-only" in options,
    )
    confinement.enter()
    _limit(resource.RLIMIT_AS, _MOST_BYTES)

    def answer_question() -> None:
        _limit(resource.RLIMIT_CPU, _MOST_CPU_S)
        line = sys.stdin.readline()
        if not line:
            return  # nobody asks any more
        question = json.loads(line)
        try:
            for answered in answer_task(question["task"], question["params"], confinement):
                write_line(answered)
        except Exception as error:
            if not lacks_memory(error):
                raise
            rule = f"needs more memory for an answer than {format_bytes(_MOST_BYTES)}"
            write_line(refuse(Reason(field="server", rule=rule)))

    # The first line of an answer has filled the caches: the rest would make no fork quicker.
    ahead = (next(answer_task(*warm_up, confinement), b"") for warm_up in warm_ups)
    _take_questions(socket.socket(fileno=os.dup(sys.stdin.fileno())), answer_question, ahead)


def write_line(data: bytes) -> None:
    """Send a line of the answer."""
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


def _take_questions(
    server: socket.socket, answer_question: Callable[[], None], ahead: Iterator[object]
) -> None:
    """Fork for each question; what can be done `ahead` is, a part at a time, between them."""
    forks: set[_ForkedAnswer] = set()
    has_rest = True
    with DefaultSelector() as selector:
        selector.register(server, EVENT_READ)
        while True:
            ready = selector.select(timeout=0 if has_rest else None)
            if not ready:
                has_rest = next(ahead, None) is not None
                gc.collect()
                gc.freeze()  # a fork that collects would copy the pages of all that is kept
            for fork in {key.data for key, _ in ready if key.data is not None}:
                selector.unregister(fork.life)
                selector.unregister(fork.end)
                forks.remove(fork)
                _end(fork)
            if any(key.fileobj is server for key, _ in ready):
                _, sockets, _, _ = socket.recv_fds(server, 1, SOCKETS)
                if not sockets:  # the server is gone
                    break
                fork = _fork(sockets, answer_question)
                forks.add(fork)
                selector.register(fork.life, EVENT_READ, fork)
                selector.register(fork.end, EVENT_READ, fork)
    for fork in forks:
        _end(fork)


def _fork(sockets: Sequence[int], answer_question: Callable[[], None]) -> _ForkedAnswer:
    """Start a process that answers the question of a socket."""
    talk, end = sockets
    life, living = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(talk, sys.stdin.fileno())
            os.dup2(talk, sys.stdout.fileno())
            with suppress(BrokenPipeError):  # nobody reads any more
                answer_question()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(living)
    os.close(talk)
    return _ForkedAnswer(pid=pid, life=life, end=socket.socket(fileno=end))


def _end(fork: _ForkedAnswer) -> None:
    """Kill a process that nobody waits for, and tell how one has ended."""
    os.kill(fork.pid, signal.SIGKILL)  # of one that has ended this changes nothing
    _, status = os.waitpid(fork.pid, 0)
    with suppress(OSError):
        fork.end.send(str(os.waitstatus_to_exitcode(status)).encode())
    fork.end.close()
    os.close(fork.life)


def _limit(kind: int, value: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    limits = [limit for limit in resource.getrlimit(kind) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(value, *limits, value), resource.getrlimit(kind)[1]))
