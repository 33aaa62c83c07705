"""How the ranks of a job agree on each phase of a save or load.

The collective itself is passed in.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import get_native_id
from typing import Any

from moewright.spec.errors import BadInput, Reason

_LAST_PRIORITY = 19  # the kernel's: training goes before the save


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinator:
    """A rank among the others; `gather` returns to EVERY rank the values of all, in rank order.

    The values survive JSON. `note` is called with each piece of a save or load, before it.
    """

    rank: int
    world_size: int
    gather: Callable[[Any], list[Any]]
    note: Callable[[str], None] = lambda activity: None


def yield_to_training() -> None:
    """Let this thread run where nothing else wants the core (Linux): training goes first."""
    with suppress(OSError, AttributeError):
        # Linux keeps a priority for each thread, so this lowers the calling one alone.
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _LAST_PRIORITY)


def single_process() -> Coordinator:
    """Return the coordinator of a single process, which needs no process group."""
    return Coordinator(rank=0, world_size=1, gather=lambda value: [value])


def run_on_all_ranks(comm: Coordinator, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank, and return all results to every rank.

    A rank that fails for another reason than BadInput raises at once: the launcher ends the job.

    Raises:
        BadInput: the same on every rank, where it was raised on any.
    """
    reply: dict[str, Any] = {"value": None, "reason": None}
    try:
        reply["value"] = action()
    except BadInput as refusal:
        reply["reason"] = asdict(refusal.reasons[0])
    replies = comm.gather(reply)
    reasons = [Reason(**reply["reason"]) for reply in replies if reply["reason"] is not None]
    if reasons:
        # A reason that several ranks have is told once, in the order of the ranks.
        raise BadInput(*dict.fromkeys(reasons))
    return [reply["value"] for reply in replies]
