"""The section of the report about incidents: what ended the ranks of a run, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from moewright.spec.run import Incident
from moewright.spec.units import format_seconds, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentRow:
    """One incident as text."""

    time: str
    kind: str
    message: str
    way_on: str
    repeated: str
    lost: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentSection:
    """The incidents of a run, and a sentence on what they cost together."""

    summary: str
    rows: tuple[IncidentRow, ...]


def build_incident_section(incidents: Sequence[Incident]) -> IncidentSection | None:
    """Return the section, or None for a run without incidents."""
    if not incidents:
        return None
    ended = [incident for incident in incidents if _has_gone_on(incident)]
    noun = "incident" if len(incidents) == 1 else "incidents"
    summary = f"{len(incidents)} {noun}"
    if ended:
        lost = format_seconds(sum(incident.lost_s for incident in ended))
        mean = format_seconds(fmean(incident.down_s for incident in ended))
        steps = sum(incident.repeated_steps for incident in ended)
        summary += f"; {lost} lost, {plural(steps, 'step')} repeated"
        summary += f", {mean} to go on in the mean (MTTR)"
    return IncidentSection(summary=f"{summary}.", rows=tuple(map(_build_row, incidents)))


def _build_row(incident: Incident) -> IncidentRow:
    return IncidentRow(
        time=incident.time,
        kind=incident.kind.value,
        message=incident.message,
        way_on=_describe_way_on(incident),
        repeated=str(incident.repeated_steps) if _has_gone_on(incident) else "",
        lost=format_seconds(incident.lost_s) if _has_gone_on(incident) else "",
    )


def _has_gone_on(incident: Incident) -> bool:
    """Tell whether the ranks were ended, and the run has gone on since."""
    return bool(incident.resumed_step) and incident.kind.ends_ranks


def _describe_way_on(incident: Incident) -> str:
    if not incident.kind.ends_ranks:
        return "has gone on meanwhile"
    if not incident.resumed_step:
        return incident.gave_up or "has not gone on"
    way_on = f"from step {incident.resumed_step} in {format_seconds(incident.down_s)}"
    if incident.next_layout == incident.layout:
        return way_on
    return f"{way_on}, {incident.layout} became {incident.next_layout}"
