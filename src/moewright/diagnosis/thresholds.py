"""Thresholds from which a share of a step is a wall, and the order of walls.

docs/formulas.md section 10 has the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import TimePart

COMMUNICATION_SHARE = 0.15  # docs/formulas.md, section 10, as the others
# What the throughput guide for Megatron-LM aims at: devices this busy, memory this full, and no
# more of a step than this for communication.
BUSY_SHARE = 0.90
MEMORY_GOAL = 0.80
COMMUNICATION_GOAL = 0.20
HOST_SHARE = 0.10
MEMORY_SHARE = 0.90
# Memory that the allocator holds beyond what it gave out, over what it holds, above which
# fragmentation and not capacity is the cause.
FRAGMENTED_SHARE = 0.10

# The cause of each part of a predicted step that is waiting.
CAUSE_OF_PART: Mapping[TimePart, Cause] = {
    TimePart.TP_COMM: Cause.TP,
    TimePart.CP_COMM: Cause.CP,
    TimePart.EP_COMM: Cause.EP,
    TimePart.PP_COMM: Cause.PP,
    TimePart.BUBBLE: Cause.PP,
    TimePart.DP_COMM: Cause.DP,
}
_LIMITS = {Wall.COMMUNICATION: COMMUNICATION_SHARE, Wall.HOST: HOST_SHARE}
_MEMORY_RANK = 0
_OVER_LIMIT_RANK = 1
_COMPUTE_RANK = 2
_UNDER_LIMIT_RANK = 3


def order_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by the wall to work on first.

    A full memory comes first, then communication and host where all their causes together pass
    the limit, the larger first; then compute, then what passes no limit. Inside a wall the larger
    share comes first, but in compute the low kernel rates come last: they are what the other
    findings leave unexplained.
    """
    findings = tuple(findings)
    share_of_wall = {
        wall: sum(finding.share for finding in findings if finding.wall is wall) for wall in Wall
    }

    def sort_key(finding: Finding) -> tuple[float, float, float]:
        wall = finding.wall
        if finding.cause is Cause.UNLISTED:  # it may be small, and is no wall by itself
            return (_UNDER_LIMIT_RANK, 0, -finding.share)
        if wall is Wall.MEMORY:
            return (_MEMORY_RANK, 0, -finding.share)
        if wall in _LIMITS:
            is_over = share_of_wall[wall] > _LIMITS[wall]
            rank = _OVER_LIMIT_RANK if is_over else _UNDER_LIMIT_RANK
            return (rank, -share_of_wall[wall], -finding.share)
        return (_COMPUTE_RANK, float(finding.cause is Cause.KERNEL_RATES), -finding.share)

    return tuple(sorted(findings, key=sort_key))
