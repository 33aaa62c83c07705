"""Trials of a tuning: their requests, their outcomes, and the checks of a winner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import median

from moewright.diagnosis.compare_ledgers import AgreementRule, Section, compare_ranks
from moewright.diagnosis.engine_run import (
    build_run_waterfall,
    diagnose_run,
    find_critical_rank,
)
from moewright.diagnosis.thresholds import order_findings
from moewright.diagnosis.traces.log_findings import predict_findings
from moewright.diagnosis.waterfall import describe_ideal_step, ideal_step_s, predict_drops
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.steady_steps import steady_steps
from moewright.spec.errors import NOTHING, Verbatim
from moewright.spec.finding import Cause, Finding, Wall, Waterfall
from moewright.spec.plan import Plan
from moewright.spec.run import RunRecord
from moewright.tuning.space import TuningPoint

SCREEN_STEPS = 8  # steady steps of a trial
VALIDATE_STEPS = 50
VALIDATION_WINDOW = 10  # the last of them, which make the figure of a validation
WARM_UP_STEPS = 3  # two to warm up, and the one on which every op is counted
_SHOWN_LINES = 3  # of a ledger that differ


class TrialLength(StrEnum):
    """How long a trial runs."""

    SCREEN = "screen"
    VALIDATE = "validate"

    @property
    def steps(self) -> int:
        return WARM_UP_STEPS + (SCREEN_STEPS if self is TrialLength.SCREEN else VALIDATE_STEPS)


class TrialFailure(StrEnum):
    """Why a trial has no figures."""

    NONE = "none"
    MEMORY = "memory"  # what needs more would fail too
    REFUSED = "refused"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationCheck:
    """A check that a winner has to pass."""

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
    """The outcome of a run; zeros where it failed.

    `step_s` is the median seconds of a steady step as they would be with a core for every rank;
    `wall_step_s` those of the last VALIDATION_WINDOW steps by the clock, other programs of the
    machine included.
    """

    step_s: float = 0.0
    wall_step_s: float = 0.0
    steps: int = 0
    loss: float = 0.0  # of the last step
    peak_bytes: int = 0  # held by the fullest rank, as counted
    load_factor: float = 0.0
    failure: TrialFailure = TrialFailure.NONE
    said: Verbatim = NOTHING  # of a failure
    spent_s: float = 0.0  # since the run before had ended, planning included
    findings: tuple[TrialFinding, ...] = ()
    waterfall: Waterfall | None = None
    checks: tuple[ValidationCheck, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest:
    """A run to make: the `repeat`-th of this point and length, from 1.

    A run whose steps take longer than `hopeless_s` need not be finished; 0: it must be.
    """

    point: TuningPoint
    length: TrialLength
    repeat: int
    plan: Plan
    hopeless_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A line of the journal: a run that was made."""

    point: TuningPoint
    length: TrialLength
    repeat: int
    predicted_s: float
    outcome: TrialOutcome


RunTrial = Callable[[TrialRequest], TrialOutcome]
Announce = Callable[[Sequence[TrialRequest]], None]


def announce_nothing(requests: Sequence[TrialRequest]) -> None:
    """Do nothing about runs that will be asked for: they start when they are."""


def build_outcome(record: RunRecord, length: TrialLength) -> TrialOutcome:
    """Return what a finished run showed, with the checks of a winner where it was a validation."""
    steps = steady_steps(record)
    critical = find_critical_rank(record)
    load_factors = [
        rank_load_factor(load.rank_counts or load.counts, record.plan.layout.ep)
        for step in steps
        for load in step.loads
    ]
    return TrialOutcome(
        step_s=critical.step_s,
        wall_step_s=median(step.step_s for step in steps[-VALIDATION_WINDOW:]),
        steps=len(steps),
        loss=record.steps[-1].loss,
        peak_bytes=fullest_rank_bytes(record),
        load_factor=median(load_factors or [0.0]),
        findings=without_fixes(diagnose_run(record)),
        waterfall=build_run_waterfall(record, critical, record.plan),
        checks=check_winner(record) if length is TrialLength.VALIDATE else (),
    )


def fullest_rank_bytes(record: RunRecord) -> int:
    """Return the bytes of the fullest rank, by the allocator's samples or the counted ledgers.

    The larger one counts; it is 0 where neither was recorded.
    """
    samples = [step.device.peak_allocated_bytes for step in record.steps if step.device]
    return max([*samples, *(ledger.device_bytes for ledger in record.ledgers)], default=0)


def check_winner(record: RunRecord) -> tuple[ValidationCheck, ...]:
    """Check that a run was long enough, healthy, inside its memory, and of the planned layout.

    It was of the planned layout if every rank's counted ledger agrees with its prediction.
    """
    count = len(steady_steps(record))
    skipped = [step.step for step in record.steps if step.skipped]
    return (
        ValidationCheck(
            name="length", passed=count >= VALIDATE_STEPS, said=f"{count} steady steps"
        ),
        _check_loss(record),
        ValidationCheck(name="skipped steps", passed=not skipped, said=str(len(skipped))),
        _check_memory(record),
        _check_ledgers(record),
    )


def _check_loss(record: RunRecord) -> ValidationCheck:
    broken = [step.step for step in record.steps if not isfinite(step.loss)]
    if broken:
        return ValidationCheck(name="loss", passed=False, said=f"no number at step {broken[0]}")
    first = record.steps[0].loss
    last = record.steps[-1].loss
    return ValidationCheck(name="loss", passed=True, said=f"{first:.4f} to {last:.4f}")


def _check_memory(record: RunRecord) -> ValidationCheck:
    peak_bytes = fullest_rank_bytes(record)
    capacity_bytes = record.plan.estimate.capacity_bytes
    return ValidationCheck(
        name="memory",
        passed=0 < peak_bytes <= capacity_bytes,
        said=f"{peak_bytes} of {capacity_bytes} bytes held by the fullest rank",
    )


def _check_ledgers(record: RunRecord) -> ValidationCheck:
    comparisons = compare_ranks(record)
    # All storages are left out: what lives beside the rows does not make a trial another job.
    lines = [
        line
        for comparison in comparisons
        for line in comparison.lines
        if line.section is not Section.STORAGES
    ]
    broken = [f"{line.section} {line.label}" for line in lines if not line.keeps_rule]
    promising = [line for line in lines if line.rule is not AgreementRule.LISTED]
    kept = sum(line.keeps_rule for line in promising)
    result = f"{kept} rows of {len(comparisons)} ranks as predicted"
    if broken:
        result = f"differ: {', '.join(broken[:_SHOWN_LINES])}"
    has_all_ranks = len(comparisons) == record.plan.layout.world_size
    passed = not broken and has_all_ranks and kept > 0
    return ValidationCheck(name="what ran", passed=passed, said=result)


def predict_outcome(request: TrialRequest) -> TrialOutcome:
    """Return the plan's estimate as if it were the outcome of a run, with the predicted walls."""
    plan = request.plan
    prediction = plan.estimate
    waterfall = Waterfall(
        ideal_s=ideal_step_s(plan),
        ideal_note=describe_ideal_step(plan.workload, prediction.model_flops_per_step),
        drops=tuple(predict_drops(plan)),
        measured_s=prediction.step_s,
    )
    return TrialOutcome(
        step_s=prediction.step_s,
        peak_bytes=prediction.peak_bytes,
        findings=without_fixes(order_findings(predict_findings(plan))),
        waterfall=waterfall,
    )


def without_fixes(findings: Iterable[Finding]) -> tuple[TrialFinding, ...]:
    """Return findings as a journal keeps them."""
    return tuple(
        TrialFinding(
            wall=finding.wall, cause=finding.cause, title=finding.title, share=finding.share
        )
        for finding in findings
    )
