"""Means over the ranks of a trace: exposed communication of a class, idle time of a cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.comm_classes import CommClass
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.diagnosis.traces.rank_skew import RankSkew


@dataclass(frozen=True, kw_only=True, slots=True)
class ExposedComm:
    """Seconds a step of one class of communication, means over the ranks.

    `waiting_s` is the part of `exposed_s` that is waiting for the last rank.
    """

    busy_s: float
    exposed_s: float
    waiting_s: float
    calls: float
    evidence: tuple[str, ...]

    @property
    def own_s(self) -> float:
        """Return the exposed seconds with all ranks present."""
        return self.exposed_s - self.waiting_s


def measure_comm(
    breakdowns: Sequence[Breakdown], skew: RankSkew | None, comm: CommClass
) -> ExposedComm:
    """Return the exposed seconds of one class of communication, and how much of them is waiting."""
    times = [time for breakdown in breakdowns for time in breakdown.comm_times if time.comm is comm]
    ranks = len(breakdowns)
    exposed_s = sum(time.exposed_s for time in times) / ranks
    waiting_s = 0.0
    for waiting in skew.waiting if skew else ():
        if waiting.comm is comm:
            waiting_s = min(exposed_s, waiting.seconds)
    return ExposedComm(
        busy_s=sum(time.busy_s for time in times) / ranks,
        exposed_s=exposed_s,
        waiting_s=waiting_s,
        calls=sum(time.calls for time in times) / ranks,
        evidence=tuple(dict.fromkeys(text for time in times for text in time.evidence)),
    )


def mean_idle_s(breakdowns: Sequence[Breakdown], cause: IdleCause) -> float:
    """Return the idle seconds a step of one cause, mean over the ranks."""
    total_s = sum(
        seconds
        for breakdown in breakdowns
        for idle_cause, seconds in breakdown.idle_times
        if idle_cause is cause
    )
    return total_s / len(breakdowns)
