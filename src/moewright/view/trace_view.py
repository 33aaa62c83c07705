"""A traced step as pages show it: the parts of every rank, and the worst step over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.worst_step import WorstStep

_SMALLEST_SHARE = 1e-4  # of a step: smaller parts are not drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """Seconds a step of one part, by rank; all parts of a rank sum to its step."""

    part: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceView:
    """The parts of every rank's step, and the longest step as lanes over time."""

    ranks: tuple[int, ...]
    parts: tuple[RankPart, ...]
    worst: WorstStep | None


def build_trace_view(breakdowns: Sequence[Breakdown], worst: WorstStep | None) -> TraceView | None:
    """Build the record of a traced step; None where nothing was traced."""
    if not breakdowns:
        return None
    parts_of_rank = [_parts(breakdown) for breakdown in breakdowns]
    longest_s = max(breakdown.step_s for breakdown in breakdowns)
    names = dict.fromkeys(name for parts in parts_of_rank for name in parts)
    parts = (
        RankPart(part=name, seconds=tuple(parts.get(name, 0.0) for parts in parts_of_rank))
        for name in names
    )
    return TraceView(
        ranks=tuple(breakdown.rank for breakdown in breakdowns),
        parts=tuple(part for part in parts if max(part.seconds) > _SMALLEST_SHARE * longest_s),
        worst=worst,
    )


def _parts(breakdown: Breakdown) -> dict[str, float]:
    return {
        "compute": breakdown.compute_s,
        **{f"exposed {time.comm}": time.exposed_s for time in breakdown.comm_times},
        "copies not hidden": breakdown.copies_s,
        **{f"idle: {cause}": seconds for cause, seconds in breakdown.idle_times},
    }
