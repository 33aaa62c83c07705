"""The steps of a run that may be averaged, and their medians."""

from __future__ import annotations

from statistics import median

from moewright.spec.ledger import StepPhase
from moewright.spec.run import SESSION_WARMUP_STEPS, RunRecord, StepRecord


def steady_steps(record: RunRecord) -> tuple[StepRecord, ...]:
    """Steps that were neither skipped, nor the first two of a session, nor the one on which every
    op was counted.

    A run too short to have any gives all its steps back.
    """
    firsts = tuple(session.first_step for session in record.sessions)
    counted = record.plan.workload.ledger_step
    unsettled = {
        first + offset for first in firsts for offset in (*range(SESSION_WARMUP_STEPS), counted)
    }
    return (
        tuple(step for step in record.steps if not step.skipped and step.step not in unsettled)
        or record.steps
    )


def median_step_s(record: RunRecord) -> float:
    """Median seconds of a settled step; 0 for a run without steps."""
    return median([step.step_s for step in steady_steps(record)] or [0.0])


def median_phase_seconds(record: RunRecord) -> tuple[tuple[StepPhase, float], ...]:
    """Median seconds of each phase over the settled steps, in the order of Phase; phases never seen
    are left out."""
    steps = steady_steps(record)
    seconds = {
        phase: [row.seconds for step in steps for row in step.phases if row.phase is phase]
        for phase in StepPhase
    }
    return tuple((phase, median(values)) for phase, values in seconds.items() if values)
