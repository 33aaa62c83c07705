"""How many processes this machine takes. No torch: what asks for more is refused before that is
imported."""

from __future__ import annotations

import os

from moewright.spec.errors import BadInput, Reason

_RANKS_A_CORE = 8


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_crowd(nproc: int, *, field: str = "nproc") -> None:
    """Raise BadInput for more processes than a machine survives: each holds a torch and takes a
    share of a core."""
    most = _RANKS_A_CORE * cores()
    if not 1 <= nproc <= most:
        rule = f"must be in 1..{most} on a machine of {cores()} cores"
        raise BadInput(
            Reason(field=field, value=str(nproc), rule=rule, nearest=str(min(max(nproc, 1), most)))
        )
