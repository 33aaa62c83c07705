"""SIGTERM to a job's program: it decides the exit code, whenever it comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from moewright.cli.exit_codes import STOPPED


def answer_stops(run: Callable[[], int]) -> int:
    """Return the exit code of a job, which SIGTERM makes STOPPED also where no rank runs.

    While ranks run, the launcher takes the signal; between two starts of them, and when they have
    saved, it ends this program. Once a job was stopped so, more signals change nothing any more.
    Other verbs keep the signal's own action, which ends them in a long call of a library too.
    """
    before = signal.signal(signal.SIGTERM, _stop)
    code = 0
    try:
        code = run()
    finally:
        if code != STOPPED:
            signal.signal(signal.SIGTERM, before)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    os._exit(STOPPED)
