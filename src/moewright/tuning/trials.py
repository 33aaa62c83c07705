"""Runs of one tuning: what is asked for, and what each showed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import median

from moewright.diagnosis.compare_ledgers import compare_ranks
from moewright.diagnosis.engine_run import build_run_waterfall, diagnose_run, find_critical_rank
from moewright.diagnosis.priced_fixes import PricedJob
from moewright.diagnosis.thresholds import order_findings
from moewright.diagnosis.traces.log_findings import predict_findings
from moewright.diagnosis.waterfall import describe_ideal_step, ideal_step_s, predict_drops
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.steady_steps import steady_steps
from moewright.spec.finding import Cause, Wall, Waterfall
from moewright.spec.plan import Plan
from moewright.spec.run import RunRecord
from moewright.tuning.space import TuningPoint

SCREEN_STEPS = 8  # settled steps of a trial
VALIDATE_STEPS = 50
VALIDATION_WINDOW = 10  # the last so many of them make the figure of a validation
WARM_UP_STEPS = 3  # two to warm up, and the one on which every op is counted


class TrialLength(StrEnum):
    SCREEN = "screen"
    VALIDATE = "validate"

    @property
    def steps(self) -> int:
        return WARM_UP_STEPS + (SCREEN_STEPS if self is TrialLength.SCREEN else VALIDATE_STEPS)


class TrialFailure(StrEnum):
    NONE = "none"
    MEMORY = "memory"  # what needs more would fail too
    REFUSED = "refused"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationCheck:
    """One thing that a winner has to show."""

    name: str
    passed: bool
    said: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFinding:
    """A finding without its fixes, which follow from its cause."""

    wall: Wall
    cause: Cause
    title: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """What a run showed. `step_s` is the median seconds of a settled step as they would be with a
    core for every rank; `wall_step_s` those of the last WINDOW steps by the clock, other programs
    of the machine included. Zeros where the run failed.
    """

    step_s: float = 0.0
    wall_step_s: float = 0.0
    steps: int = 0
    loss: float = 0.0  # of the last step
    peak_bytes: int = 0  # held by the fullest rank, as counted
    load_factor: float = 0.0
    failure: TrialFailure = TrialFailure.NONE
    said: str = ""  # of a failure
    spent_s: float = 0.0  # since the run before had ended, planning included
    findings: tuple[TrialFinding, ...] = ()
    waterfall: Waterfall | None = None
    checks: tuple[ValidationCheck, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest:
    """A run to make: the `repeat`-th of this point and length, from 1."""

    point: TuningPoint
    length: TrialLength
    repeat: int
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A line of the journal."""

    point: TuningPoint
    length: TrialLength
    repeat: int
    predicted_s: float
    outcome: TrialOutcome


RunTrial = Callable[[TrialRequest], TrialOutcome]


def build_outcome(record: RunRecord, length: TrialLength) -> TrialOutcome:
    """What a finished run showed; with the checks of a winner where it was long enough for them."""
    steps, pace = steady_steps(record), find_critical_rank(record)
    plan = record.plan
    known = PricedJob(
        model=plan.model,
        workload=plan.workload,
        hardware=plan.hardware,
        layout=plan.layout,
        estimate=plan.estimate,
    )
    factors = [
        rank_load_factor(load.rank_counts or load.counts, plan.layout.ep)
        for step in steps
        for load in step.loads
    ]
    found = tuple(
        TrialFinding(wall=one.wall, cause=one.cause, title=one.title, share=one.share)
        for one in diagnose_run(record)
    )
    return TrialOutcome(
        step_s=pace.step_s,
        wall_step_s=median(step.step_s for step in steps[-VALIDATION_WINDOW:]),
        steps=len(steps),
        loss=record.steps[-1].loss,
        peak_bytes=fullest_rank_bytes(record),
        load_factor=median(factors) if factors else 0.0,
        findings=found,
        waterfall=build_run_waterfall(record, pace, known),
        checks=check_winner(record) if length is TrialLength.VALIDATE else (),
    )


def fullest_rank_bytes(record: RunRecord) -> int:
    """Bytes of the fullest rank: the driver's word where there is a device, else what was
    counted."""
    samples = [step.device.peak_allocated_bytes for step in record.steps if step.device]
    return max([*samples, *(ledger.device_bytes for ledger in record.ledgers)], default=0)


def check_winner(record: RunRecord) -> tuple[ValidationCheck, ...]:
    """Long enough, healthy, inside its memory, and the layout that was asked for: what each rank
    counted is what is predicted of that layout."""
    plan, steps = record.plan, steady_steps(record)
    broken = [step.step for step in record.steps if not isfinite(step.loss)]
    skipped = [step.step for step in record.steps if step.skipped]
    peak, capacity = fullest_rank_bytes(record), plan.estimate.capacity_bytes
    pairs = compare_ranks(record)
    lines = [line for pair in pairs for line in pair.lines]
    bad = [f"{line.section} {line.label}" for line in lines if not line.keeps_rule]
    kept = sum(line.keeps_rule and line.rule != "listed" for line in lines)
    books = (
        f"{kept} rows of {len(pairs)} ranks as predicted"
        if not bad
        else f"differ: {', '.join(bad[:3])}"
    )
    world = plan.layout.world_size
    return (
        ValidationCheck(
            name="length", passed=len(steps) >= VALIDATE_STEPS, said=f"{len(steps)} settled steps"
        ),
        ValidationCheck(
            name="loss",
            passed=not broken,
            said=f"{record.steps[0].loss:.4f} to {record.steps[-1].loss:.4f}"
            if not broken
            else f"no number at step {broken[0]}",
        ),
        ValidationCheck(name="skipped steps", passed=not skipped, said=str(len(skipped))),
        ValidationCheck(
            name="memory",
            passed=0 < peak <= capacity,
            said=f"{peak} of {capacity} bytes held by the fullest rank",
        ),
        ValidationCheck(
            name="what ran", passed=not bad and len(pairs) == world and kept > 0, said=books
        ),
    )


def predict_outcome(ask: TrialRequest) -> TrialOutcome:
    """The plan's estimate in the place of a run, with the walls that it expects."""
    plan, found = ask.plan, ask.plan.estimate
    known = PricedJob(
        model=plan.model,
        workload=plan.workload,
        hardware=plan.hardware,
        layout=plan.layout,
        estimate=found,
    )
    walls = order_findings(predict_findings(known))
    fall = Waterfall(
        ideal_s=ideal_step_s(known),
        ideal_note=describe_ideal_step(plan.workload, found.model_flops_per_step),
        drops=tuple(predict_drops(known)),
        measured_s=found.step_s,
    )
    return TrialOutcome(
        step_s=found.step_s,
        peak_bytes=found.peak_bytes,
        findings=tuple(
            TrialFinding(wall=one.wall, cause=one.cause, title=one.title, share=one.share)
            for one in walls
        ),
        waterfall=fall,
    )
