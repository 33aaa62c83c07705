"""When a share of a step is a wall, and which wall comes first. Thresholds of docs/formulas.md
10."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import TimePart

COMMUNICATION_SHARE = 0.15
HOST_SHARE = 0.10
MEMORY_SHARE = 0.90
FRAGMENTED_SHARE = (
    0.10  # held by the allocator beyond what it gave out: fragmentation, not capacity
)

# What a predicted part of a step waits for.
CAUSE_OF_PART: Mapping[TimePart, Cause] = {
    TimePart.TP_COMM: Cause.TP,
    TimePart.CP_COMM: Cause.CP,
    TimePart.EP_COMM: Cause.EP,
    TimePart.PP_COMM: Cause.PP,
    TimePart.BUBBLE: Cause.PP,
    TimePart.DP_COMM: Cause.DP,
}
_LIMITS = {Wall.COMMUNICATION: COMMUNICATION_SHARE, Wall.HOST: HOST_SHARE}


def order_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """A full memory first, then communication and host where all their causes together pass the
    limit, the larger first; then compute, then what passes no limit. Inside a wall by share, but
    what explains before what is left.
    """
    found = tuple(findings)
    sums = {wall: sum(each.share for each in found if each.wall is wall) for wall in Wall}

    def place(finding: Finding) -> tuple[float, float, float]:
        wall = finding.wall
        if wall is Wall.MEMORY:
            return (0, 0, -finding.share)
        if wall in _LIMITS:
            return (1 if sums[wall] > _LIMITS[wall] else 3, -sums[wall], -finding.share)
        return (2, float(finding.cause is Cause.KERNEL_RATES), -finding.share)

    return tuple(sorted(found, key=place))
