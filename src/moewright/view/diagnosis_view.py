"""A diagnosis as pages show it: walls with priced fixes, the waterfall, and the traced step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.worst_step import WorstStep
from moewright.report.document import DocumentSection, join_runs
from moewright.report.finding_sections import list_finding_sections
from moewright.spec.finding import Finding, Waterfall
from moewright.spec.record import Record, Row

_UNEXPLAINED = "unexplained"
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DiagnosisView(Record):
    """The walls of a run, the one to work on first in front, and where its step goes.

    `waterfall` is None where the job is not known. `notes` say what was read otherwise than written
    and what would give a fuller answer. `trace` is where the step of each traced rank goes.
    """

    walls: tuple[DocumentSection, ...]
    waterfall: Waterfall | None
    notes: tuple[str, ...] = ()
    trace: TraceView | None = None

    def title(self) -> str:
        """Return the first finding."""
        if not self.walls:
            return "no wall was found"
        return join_runs(self.walls[0].title)

    def to_rows(self) -> list[Row]:
        """Return a row for each finding."""
        return [{"wall": join_runs(wall.title)} for wall in self.walls]


def build_diagnosis_view(
    findings: Sequence[Finding],
    waterfall: Waterfall | None,
    notes: Sequence[str] = (),
    trace: TraceView | None = None,
    *,
    has_headline: bool = False,
) -> DiagnosisView:
    """Build the record of a diagnosis; empty notes are left out.

    Where a headline among them says that the findings do not explain the step, none is the wall.
    """
    return DiagnosisView(
        walls=tuple(list_finding_sections(findings, has_headline=has_headline)),
        waterfall=waterfall,
        notes=tuple(note for note in notes if note),
        trace=trace,
    )


def close_at(waterfall: Waterfall, measured_s: float) -> Waterfall:
    """Return a waterfall that ends at another measured step; the rest is not explained."""
    change_s = measured_s - waterfall.measured_s
    drops = tuple(
        replace(drop, seconds=drop.seconds + change_s) if drop.name == _UNEXPLAINED else drop
        for drop in waterfall.drops
    )
    return replace(waterfall, drops=drops, measured_s=measured_s)


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
