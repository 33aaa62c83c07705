"""How many processes this machine takes.

It needs no torch: what asks for more processes is refused before torch is imported.
"""

from __future__ import annotations

import os

from moewright.spec.errors import BadInput, Reason

_RANKS_PER_CORE = 8


def count_cores() -> int:
    """Count the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def refuse_too_many_processes(nproc: int, *, field: str = "nproc") -> None:
    """Raise BadInput for more processes than a machine survives.

    Each process holds a torch of its own and takes a share of a core.
    """
    cores = count_cores()
    limit = _RANKS_PER_CORE * cores
    if not 1 <= nproc <= limit:
        rule = f"must be in 1..{limit} on a machine of {cores} cores"
        nearest = str(min(max(nproc, 1), limit))
        raise BadInput(Reason(field=field, value=str(nproc), rule=rule, nearest=nearest))
