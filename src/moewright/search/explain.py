"""Why a layout comes first, and what speaks against another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moewright.codec import format_layout, parse_layout
from moewright.cost.estimate import estimate
from moewright.rules.legality import check_legality
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan, Verdict, WhatIf
from moewright.spec.units import format_bytes, format_seconds
from moewright.spec.workload import Workload

_PARTS_SHOWN = 3
_WORTH_SAYING = 0.005  # of the step


class HasPlans(Protocol):
    """What a search returned, as far as an explanation needs it."""

    @property
    def plans(self) -> tuple[Plan, ...]: ...


def explain_first(plans: Sequence[Plan]) -> tuple[str, ...]:
    """What the first plan spends its step on, and what sets it apart from the second."""
    if not plans:
        return ()
    first = plans[0].estimate
    parts = sorted(first.shares, key=lambda share: -share.seconds)[:_PARTS_SHOWN]
    spent = ", ".join(
        f"{share.part.replace('_', ' ')} {share.seconds / first.step_s:.0%}" for share in parts
    )
    lines = [
        f"{format_layout(plans[0].layout)}: {format_seconds(first.step_s)} a step, mostly {spent}."
    ]
    if len(plans) > 1:
        lines.append(
            f"Second, {format_layout(plans[1].layout)}: {_slower(plans[1].estimate, first)}."
        )
    return tuple(lines)


def explain_departure(
    plan: Plan, guideline: str, usual: Layout | None, *, more_than_s: float = 0.0
) -> str:
    """Why the plan does not do what is usually `said` to be done: what the fastest layout that does
    takes instead, or `more_than_s` where none was worth pricing.
    """
    if usual is None:
        more = more_than_s / plan.estimate.step_s - 1
        return f"Departs from the usual ({guideline}): every layout that keeps to it is more than {more:.1%} slower."
    found = estimate(plan.model, plan.workload, plan.hardware, usual)
    return f"Departs from the usual ({guideline}): {format_layout(usual)} takes {_slower(found, plan.estimate)}."


def explain_bound(plan: Plan) -> tuple[str, ...]:
    """What holds the plan back: memory where more of it would help, else what its step is mostly
    spent on; how sure the numbers are; and what would change it.
    """
    estimate = plan.estimate
    largest = max(estimate.shares, key=lambda share: share.seconds)
    spent = f"{largest.part.replace('_', ' ')}, {largest.seconds / estimate.step_s:.0%} of the step"
    faster = [
        gain for gain in plan.gains if "memory" in gain.change and gain.step_s < estimate.step_s
    ]
    bound = (
        f"memory: {estimate.largest} is its largest part"
        if faster
        else f"{spent}; more memory would change nothing"
    )
    sure = f"Times are good to {estimate.step_sd:.0%}, the peak to {format_bytes(estimate.peak_sd_bytes)} (one deviation)."
    return (f"Bound by {bound}.", *(_changed(gain, plan) for gain in plan.gains), sure)


def _changed(gain: WhatIf, plan: Plan) -> str:
    change = gain.step_s / plan.estimate.step_s - 1
    by = f"{format_seconds(gain.step_s)} a step, {abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    same = "the same layout" if gain.layout == plan.layout else format_layout(gain.layout)
    return f"With {gain.change}: {by}, {same}."


def explain_objections(
    model: ModelSpec, workload: Workload, hardware: Hardware, ranked: HasPlans, text: str
) -> tuple[str, ...]:
    """What speaks against the layout `text`: broken rules; else how much memory it lacks, and what
    it loses time on against the best plan. Raises BadInput when the text is no layout.
    """
    layout = parse_layout(text, world_size=hardware.count)
    name = format_layout(layout)
    reasons = check_legality(model, workload, layout)
    if reasons:
        return tuple(f"{name} is not legal: {reason}" for reason in reasons)
    found = estimate(model, workload, hardware, layout)
    lines = []
    if found.verdict is not Verdict.FITS:
        short = (
            f"is {format_bytes(-found.margin_bytes)} over"
            if found.margin_bytes < 0
            else "is within the spread of"
        )
        held = f"{format_bytes(found.peak_bytes)} of {format_bytes(found.capacity_bytes)} on pipeline rank {found.peak_rank}"
        lines.append(f"{name} {short} the memory: {held}, most of it {found.largest}")
    if ranked.plans:
        best = ranked.plans[0]
        if best.layout == layout:
            lines.append(f"{name} is the best plan")
        else:
            lines.append(
                f"{name} against {format_layout(best.layout)}: {_slower(found, best.estimate)}"
            )
    return tuple(lines) or (f"nothing: {name} fits and no plan was found that beats it",)


def _slower(found: Estimate, best: Estimate) -> str:
    """By how much, and the parts that make most of the difference."""
    change = found.step_s / best.step_s - 1
    before = {share.part: share.seconds for share in best.shares}
    after = {share.part: share.seconds for share in found.shares}
    gains = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in (before | after)}
    worst = sorted(gains.items(), key=lambda item: -abs(item[1]))[:_PARTS_SHOWN]
    named = [
        f"{part.replace('_', ' ')} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for part, seconds in worst
        if abs(seconds) > _WORTH_SAYING * best.step_s
    ]
    relation = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    return f"{format_seconds(found.step_s)} a step, {relation}" + (
        f" ({', '.join(named)})" if named else ""
    )
