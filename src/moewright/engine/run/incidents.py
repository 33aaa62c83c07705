"""The journal of incidents in the folder of a run: what ended its ranks, and how it went on.

The launcher notes an incident when all ranks have ended; rank 0 of the next start notes how the run
went on, after its first step. Both need only the folder, so that it does not matter who starts the
ranks again: the supervisor, torchrun, a cluster or a person.
"""

from __future__ import annotations

import datetime
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moewright.codec import (
    INCIDENTS_FILE,
    STEPS_FILE,
    FloatPolicy,
    format_layout,
    parse_json,
    read_complete_lines,
    read_incidents,
    write_incidents,
)
from moewright.engine.run.worker import RankFailure
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout
from moewright.spec.printable import Paragraph, escape_controls
from moewright.spec.run import Incident, IncidentKind


def note_failure(run_dir: Path, layout: Layout, failure: RankFailure) -> None:
    """Note that a rank has failed; a disk that takes no note must not hide the failure."""
    _append(
        run_dir,
        layout,
        kind=failure.cause,
        message=escape_controls(str(failure)),
        rank=failure.rank,
        step=failure.step,
    )


def note_return(run_dir: Path, layout: Layout) -> None:
    """Note that the ranks are stopped for those that were gone."""
    _append(run_dir, layout, kind=IncidentKind.RETURN, message="stops for the ranks that were gone")


def note_slow_rank(run_dir: Path, layout: Layout, *, rank: int, step: int, message: str) -> None:
    """Note that a rank is slow; the run goes on meanwhile."""
    _append(
        run_dir,
        layout,
        kind=IncidentKind.SLOW,
        message=message,
        rank=rank,
        step=step,
        resumed_step=step + 1,
    )


def note_copy_failure(run_dir: Path, layout: Layout, *, step: int, message: str) -> None:
    """Note that no copies can be made since a step; the run goes on meanwhile."""
    _append(
        run_dir,
        layout,
        kind=IncidentKind.COPY,
        message=escape_controls(message),
        step=step,
        resumed_step=step + 1,
    )


def note_restart(run_dir: Path, layout: Layout, starter: str) -> None:
    """Note that `starter` has started the ranks again, where nobody could note why."""
    if _find_open(_read(run_dir)) is None:
        message = f"{starter} has started the ranks again; who failed was not noted"
        _append(run_dir, layout, kind=IncidentKind.CRASH, message=message)


def note_end(run_dir: Path, reason: str) -> None:
    """Note why the ranks are not started again after the last incident."""
    incidents = _read(run_dir)
    number = _find_open(incidents)
    if number is not None:
        ended = replace(incidents[number], gave_up=Paragraph(escape_controls(reason)))
        _write(run_dir, (*incidents[:number], ended, *incidents[number + 1 :]))


def _append(run_dir: Path, layout: Layout, **values: Any) -> None:
    now = datetime.datetime.now(datetime.UTC)
    incident = Incident(
        time=now.isoformat(timespec="seconds"),
        unix_s=now.timestamp(),
        layout=format_layout(layout),
        world_size=layout.world_size,
        **values,
    )
    _write(run_dir, (*_read(run_dir), incident))


def _read(run_dir: Path) -> tuple[Incident, ...]:
    """Return the incidents so far; a damaged journal is put aside, for it must not end a run."""
    try:
        return read_incidents(run_dir)
    except BadInput:
        path = run_dir / INCIDENTS_FILE
        with suppress(OSError):
            path.replace(path.with_name(f".damaged-{path.name}"))
        return ()


def _write(run_dir: Path, incidents: tuple[Incident, ...]) -> None:
    try:
        write_incidents(run_dir, incidents)
    except BadInput:
        return  # the journal is no reason to end a run


def _find_open(incidents: tuple[Incident, ...]) -> int | None:
    """Return the number of the incident since which the run has not gone on, if there is one."""
    for number in reversed(range(len(incidents))):
        incident = incidents[number]
        if incident.kind.ends_ranks:
            return None if incident.resumed_step or incident.gave_up else number
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedSteps:
    """The steps that a start is about to do again, and the seconds that they had taken."""

    count: int
    seconds: float


def count_repeated_steps(run_dir: Path, first_step: int) -> RepeatedSteps:
    """Count the recorded steps from `first_step` on; before the recorder drops them."""
    path = run_dir / STEPS_FILE
    records = [
        parse_json(line, where=f"{path}:{number}", floats=FloatPolicy.NON_FINITE)
        for number, line in enumerate(read_complete_lines(path), 1)
    ]
    steps = {
        record["step"]: float(record.get("step_s", 0.0))
        for record in records
        if isinstance(record, dict)
        and record.get("kind") == "step"
        and record.get("step", 0) >= first_step
    }
    return RepeatedSteps(count=len(steps), seconds=sum(steps.values()))


def note_way_on(run_dir: Path, layout: Layout, first_step: int, repeated: RepeatedSteps) -> None:
    """Note that the run has done its first step since the last incident, if there was one."""
    incidents = _read(run_dir)
    number = _find_open(incidents)
    if number is None:
        return
    ended = replace(
        incidents[number],
        resumed_step=first_step,
        next_layout=format_layout(layout),
        next_world_size=layout.world_size,
        repeated_steps=repeated.count,
        repeated_s=repeated.seconds,
        down_s=max(0.0, time.time() - incidents[number].unix_s),
    )
    _write(run_dir, (*incidents[:number], ended, *incidents[number + 1 :]))
