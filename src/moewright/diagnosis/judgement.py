"""A judged layout: whether it fits, how far it is from the best that fits, and from measured runs.

Every face shows the same record: `plan`, `estimate`, pages, scripts, logs and notebooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from moewright.codec import format_layout, format_layout_changes
from moewright.diagnosis.published import Nearness, PublishedRun, find_nearest_runs
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.search.explain import describe_relation
from moewright.search.search import build_plan, find_best_plan
from moewright.search.space import Objections, no_objections
from moewright.spec.errors import BadInput
from moewright.spec.layout import LAYOUT_FIELDS, Layout, Recompute
from moewright.spec.plan import DEFAULT_RULE, Plan, Verdict
from moewright.spec.record import Record, Row
from moewright.spec.units import format_bytes, format_seconds, mention

# A part of the space that holds good layouts and is searched in a fraction of a second.
QUICK_PART = "mbs1,cp1,etp1,vpp1"
_AS_FAST = 1.02  # times the best step: within what a prediction tells apart
_SLOW = 1.15  # times the best step: from there on a layout is called slow
_WORTH_CHANGING = 0.05  # of the step: what one change has to save
_RECOMPUTE_STEPS = ((Recompute.LAYERNORM, Recompute.MOE_ACT), (Recompute.FULL,))
_DECIDED_TOGETHER = (("tp", "sp"), ("pp", "vpp", "vpp_group", "schedule", "stages"))


class Quality(StrEnum):
    """What the judgement comes to; pages colour by it."""

    GOOD = "good"  # fits, and no layout is known that is much faster
    SLOW = "slow"  # fits, and another is much faster
    UNCERTAIN = "uncertain"  # may not fit
    OOM = "oom"  # does not fit
    UNJUDGED = "unjudged"  # fits; nothing was compared with it


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Judgement(Record):
    """Whether a layout fits, how far it is from the best that fits, and from what others measured.

    `headline` is the verdict in a few words; `fit`, `speed` and `measured` are a sentence each.
    `times_best` is its step over that of `best`, 0 where no other layout fits or was sought.
    `change` is the one change of the layout that saves most, and `change_layout` the layout with
    it; "" where none saves much.
    """

    quality: Quality
    headline: str
    fit: str
    speed: str
    measured: str
    times_best: float = 0.0
    best: str = ""
    best_step_s: float = 0.0
    change: str = ""
    change_layout: str = ""
    change_step_s: float = 0.0
    nearest_run: PublishedRun | None = None

    def title(self) -> str:
        """Return the headline."""
        return self.headline

    def lines(self) -> tuple[str, ...]:
        """Return the sentences that have something to say."""
        return tuple(text for text in (self.fit, self.speed, self.measured) if text)

    def to_rows(self) -> list[Row]:
        """Return a row for each part."""
        names = ("fit", "speed", "measured")
        return [{"part": name, "verdict": getattr(self, name)} for name in names]


def add_judgement(title: str, judgement: Judgement | None) -> str:
    """Return the title of a judged answer with the parts of the judgement, a line each."""
    return "\n".join((title, *(judgement.lines() if judgement else ())))


def judge_plan(
    plan: Plan,
    best: Plan | None = None,
    *,
    is_searched: bool = True,
    names_change: bool = True,
    scored: int = 0,
) -> Judgement:
    """Judge a plan beside the best one that is known, and beside published runs.

    `is_searched` is false where `best` is that of a part of the space alone, and `names_change`
    where a list of changes stands beside the judgement. `scored` counts the layouts that were
    compared.
    """
    fit = describe_fit(plan)
    runs = find_nearest_runs(plan, 1)
    judged = Judgement(
        quality=_QUALITY[plan.estimate.verdict],
        headline=fit,
        fit=fit,
        speed="",
        measured="".join(map(describe_nearest_run, runs[:1])),
        nearest_run=next(iter(runs), None),
    )
    if best is None or plan.estimate.untimed:
        return judged
    times = plan.estimate.step_s / best.estimate.step_s
    quality, headline = rate_plan(plan, best, "the best")
    change = find_change(plan, best) if names_change and times > _AS_FAST else None
    return replace(
        judged,
        quality=quality,
        headline=headline,
        speed=_describe_speed(plan, best, change, is_searched=is_searched, scored=scored),
        times_best=times,
        best=format_layout(best.layout),
        best_step_s=best.estimate.step_s,
        change=format_layout_changes(change.layout, plan.layout) if change else "",
        change_layout=format_layout(change.layout) if change else "",
        change_step_s=change.estimate.step_s if change else 0.0,
    )


def rate_plan(plan: Plan, best: Plan, name: str) -> tuple[Quality, str]:
    """Return what a plan's fit and its speed beside another's come to, and that as a headline."""
    quality = _QUALITY[plan.estimate.verdict]
    times = plan.estimate.step_s / best.estimate.step_s
    if quality is Quality.UNJUDGED:
        quality = Quality.SLOW if times >= _SLOW else Quality.GOOD
    if quality is Quality.SLOW:
        return quality, f"Fits, but is {describe_relation(times)} than {name}"
    return quality, describe_fit(plan)


_QUALITY = {
    Verdict.FITS: Quality.UNJUDGED,
    Verdict.UNCERTAIN: Quality.UNCERTAIN,
    Verdict.OOM: Quality.OOM,
}


def judge_quickly(plan: Plan, allowed: Objections = no_objections) -> Judgement:
    """Judge a plan beside the best of a small part of the space, which takes a moment."""
    best = find_quick_best(plan, allowed)
    return judge_plan(plan, best, is_searched=False)


def find_quick_best(plan: Plan, allowed: Objections = no_objections) -> Plan | None:
    """Return the best plan of a job in a small part of the space; None where none fits surely."""
    nouns = (plan.model, plan.workload, plan.hardware)
    try:
        return find_best_plan(*nouns, fixed=QUICK_PART, allowed=allowed)
    except BadInput:  # the part has no layout of the job at all
        return None


def describe_fit(plan: Plan) -> str:
    """Say in a few words whether a plan fits."""
    estimate = plan.estimate
    if estimate.host_shortage:
        fits = "May not fit" if estimate.host_verdict is Verdict.UNCERTAIN else "Does not fit"
        return f"{fits}: {estimate.host_shortage}"
    match estimate.verdict:
        case Verdict.FITS:
            return f"Fits, {format_bytes(estimate.margin_bytes)} to spare"
        case Verdict.UNCERTAIN:
            return f"May not fit: {estimate.fit_probability:.0%} likely to"
        case Verdict.OOM:
            return f"Does not fit: {format_bytes(-estimate.margin_bytes)} too much"


def describe_nearest_run(run: PublishedRun) -> str:
    """Say which published run is nearest, how far its prediction was off, and what MFU it had."""
    name = f"{run.model.rpartition('/')[2]} on {run.devices:,} x {run.device}"
    if run.nearness is Nearness.FAR:
        return f"No published run is near: the nearest is {name}."
    differs = mention("but {}", run.differs) or "the same job"
    text = f"Nearest published run: {name}, {differs}: prediction {run.error:+.1%} off"
    if run.mfu:
        text += f", MFU {run.mfu:.1%}"
    return f"{text}."


def _describe_speed(
    plan: Plan, best: Plan, change: Plan | None, *, is_searched: bool, scored: int
) -> str:
    """Say how far a plan is from the best that fits, and which one change comes nearest to it."""
    estimate = plan.estimate
    times = estimate.step_s / best.estimate.step_s
    step = format_seconds(estimate.step_s)
    rival = "the best that fits" if is_searched else "a layout that fits"
    if (plan.workload, plan.layout) == (best.workload, best.layout):
        of = mention(" of {:,} layouts", scored)
        return f"{step} a step: the best{of} that fits."
    best_step = format_seconds(best.estimate.step_s)
    if times <= 1 and not is_searched:
        return f"{step} a step: a quick search finds none that fits and is faster."
    if times <= 1:
        return f"{step} a step, {describe_relation(times)} than {rival} ({best_step})."
    text = f"{step} a step, {describe_relation(times)} than {rival} ({best_step})"
    if change is not None:
        changes = format_layout_changes(change.layout, plan.layout)
        text += f"; one change, {changes}: {format_seconds(change.estimate.step_s)}"
    return f"{text}."


def find_change(plan: Plan, best: Plan) -> Plan | None:
    """Return the plan with the one choice of a better plan that saves most of the step.

    A choice that alone would not fit stands beside the least recompute with which it does. None
    where no choice saves much.
    """
    least = min(plan.estimate.fit_probability, DEFAULT_RULE.fit_probability)
    changed = [_make_fit(other, least) for other in _change_each(plan, best)]
    quickest = min(
        (other for other in changed if other is not None and not other.estimate.untimed),
        key=lambda other: other.estimate.step_s,
        default=None,
    )
    if quickest is None:
        return None
    saved = 1 - quickest.estimate.step_s / plan.estimate.step_s
    return quickest if saved >= _WORTH_CHANGING else None


def _make_fit(plan: Plan, least: float) -> Plan | None:
    """Return a plan that fits with a probability of `least`, by recompute if need be; else None."""
    if plan.estimate.fit_probability >= least:
        return plan
    for recompute in _RECOMPUTE_STEPS:
        layout = replace(plan.layout, recompute=recompute)
        if set(recompute) <= set(plan.layout.recompute) or _is_illegal(plan, layout):
            continue
        heavier = build_plan(plan.model, plan.workload, plan.hardware, layout)
        if heavier.estimate.fit_probability >= least:
            return heavier
    return None


def _is_illegal(plan: Plan, layout: Layout) -> bool:
    return bool(check_legality(replace(plan_job(plan), layout=layout)))


def _change_each(plan: Plan, best: Plan) -> Iterator[Plan]:
    """Yield the plan with each choice in which a better one differs, where that is legal."""
    for names in _list_choices():
        values: dict[str, Any] = {name: getattr(best.layout, name) for name in names}
        layout: Layout = replace(plan.layout, **values)
        if layout == plan.layout or _is_illegal(plan, layout):
            continue
        yield build_plan(plan.model, plan.workload, plan.hardware, layout)


def _list_choices() -> Iterator[tuple[str, ...]]:
    """Yield the names of the fields of a layout that are decided together."""
    yield from _DECIDED_TOGETHER
    joined = {name for names in _DECIDED_TOGETHER for name in names}
    yield from ((field.name,) for field in LAYOUT_FIELDS if field.name not in joined)
