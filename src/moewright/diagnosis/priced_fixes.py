"""Fixes for a cause, each with what the planner expects of it here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moewright.codec import layout_text
from moewright.cost.estimate import estimate
from moewright.diagnosis.remedies import REMEDIES, Job, Remedy
from moewright.rules.legality import illegal
from moewright.spec.errors import BadInput
from moewright.spec.finding import Cause, Finding, Fix, Price
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate
from moewright.spec.workload import Workload

OURS = "nothing to change: the layout has it, or cannot have more of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A job that the planner can price, and its estimate."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout: Layout
    estimate: Estimate


def fixes_for(cause: Cause, known: Known | None = None) -> tuple[Fix, ...]:
    """In the order of trying; with prices where the job is known."""
    return tuple(_fix(remedy, known) for remedy in REMEDIES[cause])


def priced(findings: tuple[Finding, ...], known: Known) -> tuple[Finding, ...]:
    """The findings with prices on their fixes."""
    return tuple(replace(finding, fixes=fixes_for(finding.cause, known)) for finding in findings)


def _fix(remedy: Remedy, known: Known | None) -> Fix:
    plain = Fix(text=remedy.text, megatron=remedy.megatron, excludes=remedy.excludes)
    if known is None or remedy.change is None:
        return plain
    job = Job(model=known.model, hardware=known.hardware, layout=known.layout)
    changed = remedy.change(job)
    if changed == known.layout:
        return replace(plain, excluded=OURS)
    if reasons := illegal(known.model, known.workload, changed):
        return replace(plain, excluded=str(reasons[0]))
    try:
        found = estimate(known.model, known.workload, known.hardware, changed)
    except BadInput as error:
        return replace(plain, excluded=str(error))
    now = known.estimate
    price = Price(
        layout=layout_text(changed),
        step_s=found.step_s - now.step_s,
        step_share=found.step_s / now.step_s - 1,
        peak_bytes=found.peak_bytes - now.peak_bytes,
        verdict=found.verdict,
    )
    return replace(plain, price=price)
