"""The border for foreign input: what strangers wrote is read by a process that can be ended.

Templates are programs, archives and columns are larger unpacked than packed, patterns backtrack:
no reader of such files says beforehand what it will take of time and memory. So a function that
reads them is marked `read_apart`: it runs in a fork of the caller, which has no network, and its
result comes back. Inside, each piece of foreign work is done under a `budget` of processor time and
memory, which grows with the bytes of the input; outside of a fork there is none, so that no reader
can be called past the border. A piece that goes beyond its budget ends the fork, by the kernel, and
the caller refuses the input that the piece was about.
"""

from __future__ import annotations

import functools
import gc
import mmap
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from moewright.codec.processes import die_with_parent, forbid_network
from moewright.spec.errors import BadInput, Reason, lacks_memory
from moewright.spec.units import GIB, format_bytes

P = ParamSpec("P")
R = TypeVar("R")

# What a piece of foreign work may take, whatever its size; and for each byte of its input, of
# memory for each byte of its file.
CPU_S = 5.0
CPU_S_PER_BYTE = 2e-6
CPU_S_PER_FILE_BYTE = 4e-6  # which may be packed
MEMORY_BYTES = GIB
MEMORY_PER_BYTE = 24
# What a fork sends.
_PROGRESS, _DONE, _FAILED = "progress", "done", "failed"
# What the parent waits for a piece that neither ends nor uses the processor.
_WALL_FACTOR = 12.0
_LEAST_S = 1e-3  # of a timer that goes on: 0 would stop it
_PROGRESS_S = 0.1
_POLL_S = 0.5
_MEMORY_FILE = "/proc/self/statm"
# Files of the kernel that the border itself opens.
BORDER_FILES = frozenset({_MEMORY_FILE, os.devnull})
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The shared page: when the piece must have ended (monotonic), 0 for no piece; the seconds of the
# processor that were granted; and what it is about.
_HEAD = struct.Struct("=dd")
_WHERE_BYTES = 2000
_SHOWN_CHARS = 160  # of what a library says


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    """What a fork shares with its parent."""

    page: mmap.mmap

    def begin(self, where: str, seconds: float, granted_s: float) -> None:
        text = where.encode("utf-8", "replace")[: _WHERE_BYTES - 1] + b"\0"
        self.page[_HEAD.size : _HEAD.size + len(text)] = text
        self.page[: _HEAD.size] = _HEAD.pack(time.monotonic() + _WALL_FACTOR * seconds, granted_s)

    @property
    def is_busy(self) -> bool:
        """Whether a piece of foreign work is being done."""
        return bool(_HEAD.unpack(self.page[: _HEAD.size])[0])


class BeyondBudget(BadInput):
    """The exception for input that a reader gave up on, or was ended by: nobody reads it twice."""

    def __reduce__(self) -> tuple[type[BadInput], tuple[Reason, ...]]:
        """Return how it is copied: as itself, where others come back as a BadInput."""
        return BeyondBudget, self.reasons


class Account:
    """The time of the processor that all pieces of one file take together.

    Each piece of a file may be within its own budget, and their number without an end.
    """

    def __init__(self, file_bytes: int) -> None:
        self.granted_s = CPU_S + CPU_S_PER_FILE_BYTE * file_bytes
        self._left_s = self.granted_s

    def grant(self, seconds: float, where: str) -> float:
        """Return what a piece that may take `seconds` has.

        Raises:
            BadInput: nothing is left, after pieces that were each too short for a timer.
        """
        if self._left_s <= 0:
            raise BeyondBudget(Reason(field=where, rule=_too_slow(self.granted_s)))
        return min(seconds, self._left_s)

    def charge(self, seconds: float) -> None:
        """Take what a piece has used."""
        self._left_s -= seconds


@dataclass(slots=True)
class _Fork:
    """What this process is: a fork that reads foreign input has a worker, in all its threads.

    Tokenizers read the text that they learn from in a thread of theirs. `fault` is the last error
    that a piece of foreign work raised, and `where` is the input of the last piece.
    """

    worker: _Worker | None = None
    fault: Exception | None = None
    where: str = ""


_FORK = _Fork()


def read_apart(function: Callable[P, R]) -> Callable[P, R]:
    """Let calls of a function run in a fork; those from inside one are ordinary calls.

    What it returns is copied. A keyword `report_progress` is called in the caller's process, ten
    times a second at most.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _FORK.worker is not None:
            return function(*args, **kwargs)
        return cast(R, _run_fork(function, args, kwargs))

    return call


@contextmanager
def budget(
    where: str, nbytes: int = 0, *, file_bytes: int = 0, account: Account | None = None
) -> Iterator[None]:
    """Do a piece of foreign work, of `nbytes` of input, within what it may take.

    `where` names the input for the user. Time grows with `nbytes`, which may have been unpacked,
    and with `file_bytes`, those of a whole file on the disk; memory with the latter alone. A piece
    has no more time than is left of the `account` of its file. A piece within a piece has what is
    left of the outer one's time at most.

    Raises:
        BadInput: the piece needs more memory.
        RuntimeError: outside of `read_apart`.
    """
    worker = _FORK.worker
    if worker is None:
        raise RuntimeError(f"{where} would be read without the border of codec.foreign")
    seconds = CPU_S + CPU_S_PER_BYTE * nbytes + CPU_S_PER_FILE_BYTE * file_bytes
    granted_s = seconds
    if account is not None:
        seconds = account.grant(seconds, where)
        granted_s = min(granted_s, account.granted_s)
    outer_page, outer_where = bytes(worker.page), _FORK.where
    outer_s, _ = signal.getitimer(signal.ITIMER_PROF)
    if 0 < outer_s < seconds:
        seconds, (_, granted_s) = outer_s, _HEAD.unpack(outer_page[: _HEAD.size])
    worker.begin(where, seconds, granted_s)
    _FORK.where = where
    started_s = time.process_time()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    room = _used_data_bytes() + MEMORY_BYTES + MEMORY_PER_BYTE * file_bytes
    limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(room, *limits, room), before[1]))
    # It ends the process where it is, also within a library's loop.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with _silence():
            yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if lacks_memory(error) or "alloc" in str(error):
            rule = f"needs more than {format_bytes(MEMORY_BYTES)} of memory to be read"
        elif isinstance(error, RecursionError):
            rule = "is nested too deep to be read"
        elif isinstance(error, Exception):
            _FORK.fault = error
            raise
        else:  # a panic of a library in Rust
            rule = f"cannot be read: {error}"
        raise BeyondBudget(Reason(field=where, rule=rule)) from None
    finally:
        left_s, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, outer_s and max(outer_s - seconds + left_s, _LEAST_S))
        resource.setrlimit(resource.RLIMIT_DATA, before)
        if account is not None:
            account.charge(time.process_time() - started_s)
        worker.page[:] = outer_page
        if outer_s:  # what fails after the last piece is about that piece
            _FORK.where = outer_where


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what libraries write to standard error by themselves, as they fail."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def require_budget(where: str) -> None:
    """Refuse to read outside of a budget, for a reader whose caller has it.

    Raises:
        RuntimeError: there is none.
    """
    worker = _FORK.worker
    if worker is None or not worker.is_busy:
        raise RuntimeError(f"{where} would be read without the border of codec.foreign")


def _run_fork(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in a fork of this process, and return what it returns."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    page = mmap.mmap(-1, _HEAD.size + _WHERE_BYTES)
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reader)
        _work(function, args, kwargs, _Worker(page=page), parent, writer)
    os.close(writer)
    try:
        with open(reader, "rb", buffering=0) as pipe:
            message = _receive(pipe.fileno(), page, child, kwargs.get("report_progress"))
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if message is None:
        raise _refuse_death(page, status)
    kind, value = message
    if kind == _DONE:
        return value
    raise value


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    worker: _Worker,
    parent: int,
    writer: int,
) -> NoReturn:
    """Call the function in the fork, and send what comes of it; this never returns."""
    code = 1
    try:
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        gc.freeze()
        forbid_network()
        _FORK.worker = worker
        if kwargs.get("report_progress") is not None:
            kwargs = {**kwargs, "report_progress": _build_progress(writer)}
        try:
            message = (_DONE, function(*args, **kwargs))
        except BaseException as error:  # an interrupt too ends the caller, not the fork alone
            message = (_FAILED, _make_portable(_refuse_fault(error)))
        _send_last(writer, message)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _build_progress(writer: int) -> Callable[..., None]:
    last_s = [0.0]

    def report(*values: Any) -> None:
        now = time.monotonic()
        if now - last_s[0] >= _PROGRESS_S:
            last_s[0] = now
            _send(writer, pickle.dumps((_PROGRESS, values), protocol=5))

    return report


def _refuse_fault(error: BaseException) -> BaseException:
    """Return the refusal of an input whose reader failed on it, or the error of anything else.

    Readers name what they know to be wrong with an input. What is left is what strange bytes make
    of a library, in exceptions that nobody can list.
    """
    if error is not _FORK.fault or isinstance(error, BadInput):
        return error
    text = " ".join(str(error).split())[:_SHOWN_CHARS]
    rule = f"cannot be read ({type(error).__name__}: {text})"
    return BadInput(Reason(field=_FORK.where, rule=rule))


def _send_last(writer: int, message: tuple[str, Any]) -> None:
    """Send how the function ended; what was read and cannot be sent is refused."""
    try:
        data = pickle.dumps(message, protocol=5)
    except (RecursionError, MemoryError):
        if not _FORK.where:
            raise
        reason = Reason(field=_FORK.where, rule="is nested too deep, or holds too much, to be read")
        data = pickle.dumps((_FAILED, BeyondBudget(reason)))
    _send(writer, data)


def _make_portable(error: BaseException) -> BaseException:
    """Return an exception as it can be sent: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _send(writer: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(writer, view) :]


def _receive(
    reader: int, page: mmap.mmap, child: int, report: Callable[..., None] | None
) -> tuple[str, Any] | None:
    """Return what the fork sends last, or None where it died before."""
    pending = bytearray()
    while True:
        ready, _, _ = select.select([reader], [], [], _POLL_S)
        deadline_s, _ = _HEAD.unpack(page[: _HEAD.size])
        if not ready:
            if deadline_s and time.monotonic() > deadline_s:
                os.kill(child, signal.SIGKILL)
            continue
        block = os.read(reader, 1 << 20)
        if not block:
            return None
        pending += block
        while len(pending) >= 8:
            length = int.from_bytes(pending[:8], "little")
            if len(pending) < 8 + length:
                break
            kind, value = pickle.loads(memoryview(pending)[8 : 8 + length].tobytes())
            if kind != _PROGRESS:
                return kind, value
            del pending[: 8 + length]
            if report is not None:
                report(*value)


def _refuse_death(page: mmap.mmap, status: int) -> Exception:
    """Return what a fork died of that was ended: the input, where it was reading one."""
    deadline_s, seconds = _HEAD.unpack(page[: _HEAD.size])
    where = page[_HEAD.size :].split(b"\0", 1)[0].decode("utf-8", "replace")
    number = 0
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
    if not number or not deadline_s:
        return RuntimeError(f"the process that reads foreign input has ended ({status})")
    rule = f"ends the process that reads it ({signal.Signals(number).name})"
    if number == signal.SIGPROF:
        rule = _too_slow(seconds)
    elif number == signal.SIGKILL:
        rule = "is not read in a reasonable time"
    elif number == signal.SIGABRT:  # of libraries that get no memory
        rule = f"needs more than {format_bytes(MEMORY_BYTES)} of memory to be read"
    return BeyondBudget(Reason(field=where, rule=rule))


def _too_slow(seconds: float) -> str:
    return f"takes more than {seconds:.0f} s of processor time to be read"


def _used_data_bytes() -> int:
    with open(_MEMORY_FILE, "rb", buffering=0) as file:
        return int(file.read().split()[5]) * _PAGE_BYTES
