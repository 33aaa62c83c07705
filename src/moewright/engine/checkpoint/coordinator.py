"""How the ranks of a job agree on each phase of a save or load; the collective itself is passed
in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from moewright.spec.errors import BadInput, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinator:
    """`gather(value)` returns on EVERY rank the JSON-able values of all ranks, in rank order."""

    rank: int
    world_size: int
    gather: Callable[[Any], list[Any]]


def single_process() -> Coordinator:
    """The coordinator of a single process; needs no process group."""
    return Coordinator(rank=0, world_size=1, gather=lambda value: [value])


def run_on_all_ranks(comm: Coordinator, action: Callable[[], Any]) -> list[Any]:
    """Run `phase` on every rank; every rank gets all results, or every rank raises the same first
    BadInput.

    A rank that fails for another reason raises at once: the launcher ends the job.
    """
    reply: dict[str, Any] = {"value": None, "reason": None}
    try:
        reply["value"] = action()
    except BadInput as bad:
        reply["reason"] = asdict(bad.reasons[0])
    replies = comm.gather(reply)
    reasons = [Reason(**each["reason"]) for each in replies if each["reason"] is not None]
    if reasons:
        raise BadInput(*dict.fromkeys(reasons))
    return [each["value"] for each in replies]
