"""The turns of a forward and a backward that run beside each other on a rank.

Each runs on a thread of its own, one at a time, and hands over when the exchange that ends its
segment has started (rules.timetable.paired_passes). A backward goes through the graph in one call,
which cannot stop in the middle, so it needs a stack of its own. What a pass has built is the same
as where it runs alone: the order of its operations does not change, and so no bit of a result does.

Of its own accord autograd runs what is on a GPU on one thread for all that goes backward there. A
backward that waits for its turn on it would keep every other from going on, such as one that the
forward asks for. So each runs on the thread that calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Protocol

import torch

from moewright.engine.torch_private import dispatch_modes, function_modes
from moewright.rules.timetable.timetable_row import RowKind


class PassState(Protocol):
    """State that follows what runs, of which each pass has its own."""

    def exchange_state(self, state: object | None) -> object:
        """Put the state of a pass in place (None: a fresh one) and return the other's."""
        ...


class AbandonedPass(Exception):
    """The end of a pass whose partner failed."""


class PassTurns:
    """The turns of the two passes of a pair; between pairs every pass has all turns.

    `states` are exchanged whenever the other pass goes on.
    """

    def __init__(self, device: torch.device, states: Sequence[PassState]) -> None:
        self._device = device
        self._states = tuple(states)
        self._changed = threading.Condition()
        self._order: Sequence[RowKind] = ()
        self._place = 0
        self._error: BaseException | None = None
        self._left: list[object | None] = []  # what the pass that waits has left
        self._note_turn: Callable[[RowKind | None], None] = _ignore_turn

    @property
    def is_pair(self) -> bool:
        """Whether two passes run beside each other now."""
        return bool(self._order)

    def pass_turn(self) -> None:
        """Let the other pass run until it is this one's turn again; called by what runs now.

        Raises:
            RuntimeError: The pass has more segments than it was said to have.
        """
        if not self._order:
            return
        own = self._order[self._place]
        with self._changed:
            self._go_on(own)
            self._wait_for(own)

    def run_pair(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        order: Sequence[RowKind],
        note_turn: Callable[[RowKind | None], None] | None = None,
    ) -> None:
        """Run both passes, the segments of which come in this order.

        `note_turn` is called with the pass that goes on, None at the end.

        Raises:
            RuntimeError: A pass has other segments than `order` says.
        """
        self._order = tuple(order)
        self._place = 0
        self._error = None
        self._left = [None] * len(self._states)
        self._note_turn = note_turn or _ignore_turn
        # A thread has modes of its own: the worker enters those of this thread.
        modes = [*dispatch_modes(), *function_modes()]
        # A daemon: where this thread is interrupted, the process does not wait for it.
        worker = threading.Thread(
            target=self._run_backward, args=(backward, modes), name="backward", daemon=True
        )
        # What is in place is the caller's state, and the forward goes on with that.
        if self._order[0] is RowKind.B:
            self._exchange_states()
        self._note_turn(self._order[0])
        worker.start()
        try:
            with suppress(AbandonedPass), self._turns_of(RowKind.F):
                forward()
        finally:
            worker.join()
            # The caller gets its own state back, whichever pass ended last.
            if self._order[-1] is RowKind.B:
                self._exchange_states()
            self._order = ()
            self._note_turn(None)
        if self._error is not None:
            raise self._error

    def _run_backward(self, backward: Callable[[], None], modes: Sequence[object]) -> None:
        # A new thread begins on device 0.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            with run_backward_here(), self._turns_of(RowKind.B), ExitStack() as stack:
                for mode in modes:  # those that count, or that stand for data
                    stack.enter_context(mode)  # type: ignore[arg-type]
                backward()
        except AbandonedPass:
            pass
        except BaseException as error:  # raised again by the thread of the forward
            self._error = error

    @contextmanager
    def _turns_of(self, own: RowKind) -> Iterator[None]:
        """Run a pass inside, from its first turn to its last."""
        try:
            with self._changed:
                self._wait_for(own)
            yield
            with self._changed:
                self._go_on(own)
                if own in self._order[self._place :]:
                    raise RuntimeError(f"pass {own} of a pair ended before its last segment")
        except BaseException as error:
            with self._changed:
                if self._error is None and not isinstance(error, AbandonedPass):
                    self._error = error
                self._changed.notify_all()
            raise

    def _wait_for(self, own: RowKind) -> None:
        if self._error is None and own not in self._order[self._place :]:
            raise RuntimeError(f"pass {own} of a pair goes on after its last segment")
        # A slice, because there is no segment after the last.
        self._changed.wait_for(
            lambda: self._error is not None or self._order[self._place : self._place + 1] == (own,)
        )
        if self._error is not None:
            raise AbandonedPass from self._error

    def _go_on(self, own: RowKind) -> None:
        """Begin the segment after this one."""
        self._place += 1
        if self._place == len(self._order):
            return
        if self._order[self._place] is not own:
            self._exchange_states()
            self._note_turn(self._order[self._place])
            self._changed.notify_all()

    def _exchange_states(self) -> None:
        self._left = [
            holder.exchange_state(state)
            for holder, state in zip(self._states, self._left, strict=True)
        ]


def run_backward_here() -> AbstractContextManager[object]:
    """Let what goes backward inside run on the thread that calls it, whatever its device."""
    return torch.autograd.set_multithreading_enabled(False)


def _ignore_turn(kind: RowKind | None) -> None:
    pass
