"""How many processes this machine takes. No torch: what asks for more is refused before that is
imported."""

from __future__ import annotations

import os

from moewright.spec.errors import BadInput, Reason

_RANKS_PER_CORE = 8


def count_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_too_many_processes(nproc: int, *, field: str = "nproc") -> None:
    """Raise BadInput for more processes than a machine survives: each holds a torch and takes a
    share of a core."""
    most = _RANKS_PER_CORE * count_cores()
    if not 1 <= nproc <= most:
        rule = f"must be in 1..{most} on a machine of {count_cores()} cores"
        raise BadInput(
            Reason(field=field, value=str(nproc), rule=rule, nearest=str(min(max(nproc, 1), most)))
        )
