"""The sessions of a rank's process: when another rank is lost, it meets the others again.

A session begins when the ranks meet and ends when the worker does. Where another rank has died, the
launcher puts a new process into its place and calls all ranks together; the processes of the others
stay, with what they hold outside of the session.
"""

from __future__ import annotations

import gc
import traceback
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from moewright.engine.comm import collectives
from moewright.engine.run.worker import (
    RankContext,
    RankInfo,
    RankOutcome,
    Worker,
    has_lost_peer,
)

# How long a rank that has lost another one waits to be called; then it ends, and so do all.
_CALL_S = 5.0


def run_in_sessions(worker: Worker, context: RankContext) -> RankOutcome:
    """Run `worker`, and again each time that it has lost another rank and the ranks are called.

    What the worker has registered with `close_on_loss` is closed in between, and the process groups
    are left.

    Raises:
        Exception: what the worker raised, where that was its own fault, or nobody calls.
    """
    while True:
        with ExitStack() as on_loss:
            try:
                outcome = worker(replace(context, on_loss=on_loss))
            except Exception as error:
                if context.calls is None or not has_lost_peer(error):
                    on_loss.pop_all()
                    raise
                loss = error
            else:
                on_loss.pop_all()
                return outcome
        context.note("has lost another rank", is_waiting=True)
        _release(loss)
        collectives.leave_world()
        gc.collect()  # models refer to themselves, and the engine turns the collector off
        info = _wait_for_call(context.calls)
        if info is None:
            raise loss
        context = replace(context, info=info)
        context.beat(0)


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of an exception hold, and those of the ones that it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _wait_for_call(calls: Connection) -> RankInfo | None:
    """Return the newest call; None where none comes in time."""
    info: RankInfo | None = None
    with suppress(EOFError, OSError):  # the launcher is gone
        if calls.poll(_CALL_S):
            info = calls.recv()
            while calls.poll(0):
                info = calls.recv()
    return info
