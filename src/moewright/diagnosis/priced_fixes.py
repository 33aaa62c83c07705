"""Fixes for a cause, each with what the planner expects of it here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moewright.codec import format_layout
from moewright.cost.estimate import estimate
from moewright.diagnosis.remedies import REMEDIES, Remedy, RemedyContext
from moewright.rules.legality import check_legality
from moewright.spec.errors import BadInput
from moewright.spec.finding import Cause, Finding, Fix, PredictedChange
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate
from moewright.spec.workload import Workload

NOTHING_TO_CHANGE = "nothing to change: the layout has it, or cannot have more of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedJob:
    """A job that the planner can price, and its estimate."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout: Layout
    estimate: Estimate


def find_fixes(cause: Cause, job: PricedJob | None = None) -> tuple[Fix, ...]:
    """In the order of trying; with prices where the job is known."""
    return tuple(_fix(remedy, job) for remedy in REMEDIES[cause])


def price_findings(findings: tuple[Finding, ...], job: PricedJob) -> tuple[Finding, ...]:
    """The findings with prices on their fixes."""
    return tuple(replace(finding, fixes=find_fixes(finding.cause, job)) for finding in findings)


def _fix(remedy: Remedy, known: PricedJob | None) -> Fix:
    plain = Fix(text=remedy.text, megatron=remedy.megatron, excludes=remedy.excludes)
    if known is None or remedy.change is None:
        return plain
    job = RemedyContext(model=known.model, hardware=known.hardware, layout=known.layout)
    changed = remedy.change(job)
    if changed == known.layout:
        return replace(plain, excluded=NOTHING_TO_CHANGE)
    if reasons := check_legality(known.model, known.workload, changed):
        return replace(plain, excluded=str(reasons[0]))
    try:
        found = estimate(known.model, known.workload, known.hardware, changed)
    except BadInput as error:
        return replace(plain, excluded=str(error))
    now = known.estimate
    price = PredictedChange(
        layout=format_layout(changed),
        step_s=found.step_s - now.step_s,
        step_share=found.step_s / now.step_s - 1,
        peak_bytes=found.peak_bytes - now.peak_bytes,
        verdict=found.verdict,
    )
    return replace(plain, price=price)
