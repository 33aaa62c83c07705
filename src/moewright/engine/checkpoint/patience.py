"""How long something elsewhere is waited for: a server that is silent must not stop a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.2


class SilentServerError(OSError):
    """A server that has shown no sign of life for as long as anybody waits."""


class _Call(Generic[T]):
    """An action in a thread of its own, which is left behind when it does not answer."""

    def __init__(self, action: Callable[[Callable[[str], None]], T]) -> None:
        self._action = action
        self._progress_s = time.monotonic()
        self._results: list[T] = []
        self._errors: list[Exception] = []
        self._is_left = Event()
        self._thread = Thread(target=self._run, name="elsewhere", daemon=True)

    def _run(self) -> None:
        try:
            self._results.append(self._action(self._see_progress))
        except Exception as error:  # of any kind: it is raised in the thread that waits
            self._errors.append(error)

    def _see_progress(self, piece: str) -> None:
        if self._is_left.is_set():
            raise SilentServerError("nobody waits for it any more")
        self._progress_s = time.monotonic()

    def wait(self, patience_s: float, tell: Callable[[], None]) -> T:
        self._thread.start()
        while self._thread.is_alive():
            tell()
            self._thread.join(_POLL_S)
            if time.monotonic() - self._progress_s > patience_s:
                self._is_left.set()
                raise SilentServerError(f"no sign of life for {patience_s:.0f} s")
        if self._errors:
            raise self._errors[0]
        return self._results[0]


def wait_patiently(
    action: Callable[[Callable[[str], None]], T],
    patience_s: float,
    tell: Callable[[], None] = lambda: None,
) -> T:
    """Return what an action returns, which is called with what to call at each sign of progress.

    `tell` is called again and again meanwhile.

    Raises:
        SilentServerError: there was none for `patience_s`.
        Exception: of any kind, by the action.
    """
    return _Call(action).wait(patience_s, tell)
