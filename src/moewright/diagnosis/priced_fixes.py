"""Fixes for a cause, each with what the planner expects of it for the job.

A fix that is predicted to hurt or to change nothing is left out; one that the run has already says
so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from moewright.codec import format_layout
from moewright.diagnosis.remedies import REMEDIES
from moewright.diagnosis.remedy import Remedy, RemedyContext
from moewright.diagnosis.traces.capture import TrainerMark
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.rules.low_precision import find_narrow_form, megatron_recipe
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput
from moewright.spec.finding import Finding, Fix, PredictedChange, Wall
from moewright.spec.plan import Plan, Verdict
from moewright.spec.workload import Dtype

ALREADY_ON = "already on"
_LEAST_GAIN = 0.005  # of the step: less is nothing
_SWITCH = re.compile(r"(?:--[a-z]|[A-Z][A-Z_]+=)")  # where a flag or a variable begins


class Trainer(StrEnum):
    """Whose settings a fix is written in."""

    OURS = "ours"
    MEGATRON = "Megatron"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class FixContext:
    """What is known of the run that is to be changed.

    `options` are the names of Megatron-LM's options, and of variables, that are switched on;
    `marks` are what a trace shows. `has_moe` is None where nothing tells it.
    """

    job: Plan | None = None
    trainer: Trainer = Trainer.UNKNOWN
    options: frozenset[str] = frozenset()
    marks: tuple[TrainerMark, ...] = ()
    has_moe: bool | None = None

    @property
    def may_have_experts(self) -> bool:
        """Return False where the job has none, or the run shows none."""
        if self.job is not None:
            return self.job.model.moe is not None
        return self.has_moe is not False


def find_fixes(finding: Finding, context: FixContext) -> tuple[Fix, ...]:
    """Return the fixes of a finding, those that are predicted to gain most in front.

    A full memory keeps the order of trying, which is cheap before expensive. What changes training
    comes after all else, and what is on already, or cannot be, comes last.
    """
    is_memory = finding.wall is Wall.MEMORY
    fixes = [
        (remedy.changes_training, fix)
        for remedy in REMEDIES[finding.cause]
        if (fix := _build_fix(remedy, context, is_memory=is_memory)) is not None
    ]

    def sort_key(item: tuple[bool, Fix]) -> tuple[bool, bool, bool, float]:
        changes_training, fix = item
        gain = fix.price.step_share if fix.price is not None and not is_memory else 0.0
        is_unpriced = fix.price is None and not is_memory
        return (bool(fix.excluded), changes_training, is_unpriced, gain)

    return tuple(fix for _, fix in sorted(fixes, key=sort_key))


def price_findings(findings: tuple[Finding, ...], context: FixContext) -> tuple[Finding, ...]:
    """Return the findings with their fixes, priced where the job is known; no fix stands twice."""
    listed: set[str] = set()
    priced = []
    for finding in findings:
        fixes = tuple(fix for fix in find_fixes(finding, context) if fix.text not in listed)
        listed.update(fix.text for fix in fixes)
        priced.append(replace(finding, fixes=fixes))
    return tuple(priced)


def _build_fix(remedy: Remedy, context: FixContext, *, is_memory: bool) -> Fix | None:
    """Return the fix of a remedy; None where it does not apply, hurts or changes nothing."""
    if remedy.for_experts and not context.may_have_experts:
        return None
    if remedy.only_megatron and context.trainer is not Trainer.MEGATRON:
        return None
    if remedy.for_parallel and context.job is None and context.trainer is Trainer.UNKNOWN:
        return None
    if remedy.is_narrow:
        return _name_narrow_format(remedy, context)
    fix = _name_settings(remedy, context)
    if _is_on(remedy, context):
        return replace(fix, excluded=ALREADY_ON)
    job = context.job
    if job is None or remedy.change is None:
        return fix
    layout = remedy.change(RemedyContext(model=job.model, hardware=job.hardware, layout=job.layout))
    if layout == job.layout:
        return None
    if reasons := check_legality(replace(plan_job(job), layout=layout)):
        return replace(fix, excluded=str(reasons[0]))
    try:
        changed = build_plan(job.model, job.workload, job.hardware, layout).estimate
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
    helps = price.peak_bytes < 0 if is_memory else price.step_share <= -_LEAST_GAIN
    if not helps:
        return None
    if changed.verdict is Verdict.OOM and not is_memory and now.verdict is not Verdict.OOM:
        return replace(fix, excluded="predicted not to fit", price=price)
    if context.trainer is Trainer.OURS:
        fix = replace(fix, setting=f'layout = "{price.layout}"')
    return replace(fix, price=price)


def _name_narrow_format(remedy: Remedy, context: FixContext) -> Fix | None:
    """Return the fix of 8-bit products in the device's own format; None where it has none."""
    job = context.job
    if job is None:
        return Fix(text=remedy.text)
    narrow = find_narrow_form(job.workload, job.hardware)
    if narrow is None:
        return None
    form, recipe = megatron_recipe(narrow)
    if context.trainer is Trainer.OURS:
        setting = f'train.precision = "{narrow.precision}"'
        if narrow.precision is Dtype.FP8:
            setting += f', train.tensor_scaling = "{narrow.tensor_scaling}"'
        return Fix(text=remedy.text, setting=setting)
    return Fix(text=remedy.text, megatron=f"--fp8-format {form} --fp8-recipe {recipe}")


def _name_settings(remedy: Remedy, context: FixContext) -> Fix:
    """Return the fix in the settings of the run's trainer, without those that are on."""
    megatron = ""
    setting = remedy.setting if context.trainer is Trainer.OURS else ""
    if context.trainer is Trainer.MEGATRON:
        switches = list(_split_switches(remedy.megatron))
        missing = [switch for switch in switches if _switch_name(switch) not in context.options]
        megatron = " ".join(missing or switches)
    elif remedy.is_environment:
        setting = remedy.megatron
    excludes = remedy.excludes if remedy.megatron == megatron or not remedy.only_megatron else ""
    return Fix(text=remedy.text, megatron=megatron, setting=setting, excludes=excludes)


def _is_on(remedy: Remedy, context: FixContext) -> bool:
    if remedy.mark is not None and remedy.mark in context.marks:
        return True
    job = context.job
    if job is not None and remedy.change is not None and remedy.is_switch:
        changed = remedy.change(
            RemedyContext(model=job.model, hardware=job.hardware, layout=job.layout)
        )
        is_exchange_of_one = remedy.mark is TrainerMark.DEEPEP and job.layout.ep == 1
        return changed == job.layout and not is_exchange_of_one
    names = {_switch_name(switch) for switch in _split_switches(remedy.megatron)}
    is_named = remedy.is_switch and bool(names)
    return is_named and names <= context.options


def _split_switches(flags: str) -> Iterator[str]:
    """Yield each flag or variable with its values."""
    words = flags.split()
    current: list[str] = []
    for word in words:
        if _SWITCH.match(word) and current:
            yield " ".join(current)
            current = []
        current.append(word)
    if current:
        yield " ".join(current)


def _switch_name(switch: str) -> str:
    return switch.split()[0].partition("=")[0]
