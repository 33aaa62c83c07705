"""A tape of the collectives of a stretch of work: recorded on one rank, played to another alone.

A rank that repeats another's work has none of its peers: what they sent is played to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

NoteSent = Callable[[str, torch.Tensor], None]


class DivergedError(RuntimeError):
    """Work that is repeated asks for other collectives than those on the tape."""


def _note_nothing(name: str, tensor: torch.Tensor) -> None:
    """Note nothing: no tape is running."""


@dataclass(kw_only=True, slots=True, eq=False)
class Tape:
    """What collectives gave this rank, in the order in which it started them.

    `note_sent` is called with each collective and what this rank hands in, while the tape runs.
    """

    received: list[torch.Tensor] = field(default_factory=list)
    note_sent: NoteSent = _note_nothing
    is_playing: bool = False
    _is_running: bool = False
    _played: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the work that the tape is about is under way."""
        return self._is_running

    @property
    def is_recording(self) -> bool:
        """Whether what a collective gives is put on the tape."""
        return self._is_running and not self.is_playing

    @contextmanager
    def run(self) -> Iterator[None]:
        """Record the collectives that are started inside; of a tape that plays, note them."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what is started inside, which is no part of the work."""
        before = self._is_running
        self._is_running = False
        try:
            yield
        finally:
            self._is_running = before

    def erase(self) -> None:
        """Forget what is on the tape."""
        self.received = []
        self.note_sent = _note_nothing

    def note_start(self, name: str, tensor: torch.Tensor) -> None:
        """Note what a collective takes."""
        if self._is_running:
            self.note_sent(name, tensor)

    def reserve(self) -> int:
        """Return the place of what a collective will give."""
        # In the order of starts: collectives may be waited for in another one.
        self.received.append(torch.empty(0))
        return len(self.received) - 1

    def put(self, place: int, out: torch.Tensor) -> None:
        """Put a copy of what a collective has given in its place."""
        # A copy, because the buffer is the caller's, who may write it again.
        self.received[place] = out.detach().clone()

    def play(self, out: torch.Tensor) -> None:
        """Fill `out` with what the next collective gave.

        Raises:
            DivergedError: it gave a tensor of another shape, or nothing.
        """
        if self._played == len(self.received):
            raise DivergedError("a collective that the other rank had not")
        value = self.received[self._played]
        self._played += 1
        if value.shape != out.shape or value.dtype != out.dtype:
            raise DivergedError(f"{tuple(out.shape)} where the other rank got {tuple(value.shape)}")
        out.copy_(value)
