"""Fixes for a cause, each with what the planner expects of it for the job."""

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
    """A job that the planner can price, with its estimate."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout: Layout
    estimate: Estimate


def find_fixes(cause: Cause, job: PricedJob | None = None) -> tuple[Fix, ...]:
    """Return the fixes of a cause in the order of trying, with prices where the job is known."""
    return tuple(_build_fix(remedy, job) for remedy in REMEDIES[cause])


def price_findings(findings: tuple[Finding, ...], job: PricedJob) -> tuple[Finding, ...]:
    """Return the findings with prices on their fixes."""
    return tuple(replace(finding, fixes=find_fixes(finding.cause, job)) for finding in findings)


def _build_fix(remedy: Remedy, job: PricedJob | None) -> Fix:
    fix = Fix(text=remedy.text, megatron=remedy.megatron, excludes=remedy.excludes)
    if job is None or remedy.change is None:
        return fix
    context = RemedyContext(model=job.model, hardware=job.hardware, layout=job.layout)
    layout = remedy.change(context)
    if layout == job.layout:
        return replace(fix, excluded=NOTHING_TO_CHANGE)
    if reasons := check_legality(job.model, job.workload, layout):
        return replace(fix, excluded=str(reasons[0]))
    try:
        changed = estimate(job.model, job.workload, job.hardware, layout)
    except BadInput as error:
        return replace(fix, excluded=str(error))
    now = job.estimate
    price = PredictedChange(
        layout=format_layout(layout),
        step_s=changed.step_s - now.step_s,
        step_share=changed.step_s / now.step_s - 1,
        peak_bytes=changed.peak_bytes - now.peak_bytes,
        verdict=changed.verdict,
    )
    return replace(fix, price=price)
