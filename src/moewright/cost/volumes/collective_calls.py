"""What the predictions of collectives have in common: sums of calls, and repeated forwards."""

from __future__ import annotations

from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout, Recompute

# Operation, group, payload bytes of all calls, number of calls.
CallSum = tuple[Collective, str, int, int]


def repeats_forward(layout: Layout, *choices: Recompute) -> bool:
    """Return whether backward runs a forward again: under full recompute or one of `choices`."""
    return any(choice in layout.recompute for choice in (Recompute.FULL, *choices))
