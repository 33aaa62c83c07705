"""The steady steps of a run, over which its times may be averaged, and their medians."""

from __future__ import annotations

from statistics import median

from moewright.spec.ledger import StepPhase
from moewright.spec.run import SESSION_WARMUP_STEPS, RunRecord, StepRecord


def steady_steps(record: RunRecord) -> tuple[StepRecord, ...]:
    """Return the steps that were neither skipped nor disturbed.

    The first two steps of a session and the step on which every op was counted are disturbed. Steps
    under another layout than the plan's are left out: neither their times nor the loads of their
    ranks compare. A run too short to have any steady step gives all those of the plan's layout.
    """
    ledger_step = record.plan.workload.ledger_step
    disturbed = {
        session.first_step + offset
        for session in record.sessions
        for offset in (*range(SESSION_WARMUP_STEPS), ledger_step)
    }
    planned = record.planned_steps
    steady = tuple(step for step in planned if not step.skipped and step.step not in disturbed)
    return steady or planned


def median_step_s(record: RunRecord) -> float:
    """Return the median seconds of a steady step; 0 for a run without steps."""
    return median([step.step_s for step in steady_steps(record)] or [0.0])


def median_phase_seconds(record: RunRecord) -> tuple[tuple[StepPhase, float], ...]:
    """Return the median seconds of each phase over the steady steps, in the order of StepPhase.

    Phases that no step has are left out.
    """
    steps = steady_steps(record)
    medians = []
    for phase in StepPhase:
        seconds = [row.seconds for step in steps for row in step.phases if row.phase is phase]
        if seconds:
            medians.append((phase, median(seconds)))
    return tuple(medians)
