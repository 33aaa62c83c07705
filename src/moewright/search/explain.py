"""Explanations of a search: why a layout comes first, and what speaks against another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from moewright.codec import format_layout, format_layout_changes, parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.evidence import count_runs_in
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality, check_precision
from moewright.rules.timetable.stages import spread_stages
from moewright.search.ranking import bound_s
from moewright.search.space import build_search_space
from moewright.search.unsearched import SearchedChoices
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout, plain_schedule
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan, RankingRule, TimeShare, Verdict, WhatIf
from moewright.spec.stage_string import StageString
from moewright.spec.units import (
    format_bytes,
    format_change,
    format_figures,
    format_seconds,
    mention,
)
from moewright.spec.workload import NARROW_FORMATS, Dtype, TrainerSpec, Workload

DEPARTURE = "Departs from the usual"  # what sentences on guidelines begin with
SECOND = "The second takes"
EXPECTED_ERROR = "Expected error"
UNUSED = "One step further"  # what sentences on choices begin with that are not made
_MISFITS = MappingProxyType({Verdict.UNCERTAIN: "may not fit", Verdict.OOM: "does not fit"})
_PARTS_SHOWN = 3
_MOST_STEPS = 8  # times a degree: no legal one is looked for beyond
_WORTH_SAYING = 0.005  # of the step
# Of the layers, which stay in 16 bits: 10 of 62 blocks, the first two and the last eight
# (Pretraining LLMs with NVFP4, arXiv 2509.25149: "about 16 %"); the last 15 % in Nemotron 3 Super
# (arXiv 2604.12374), which leaves attention's projections in 16 bits besides.
_WIDE_SHARE = 0.16
_TIMES_FROM = 2.0  # times as long: from there on a factor is read more easily than a percentage
_LEADER = "the first"  # the plan that others stand beside


class HasPlans(Protocol):
    """The result of a search, as far as an explanation needs it."""

    @property
    def plans(self) -> tuple[Plan, ...]: ...


def explain_first(plans: Sequence[Plan], rule: RankingRule) -> tuple[str, ...]:
    """Say what the first plan spends its step on, and what sets it apart from the second."""
    if not plans:
        return ()
    first = plans[0].estimate
    shares = sorted(first.shares, key=lambda share: -share.seconds)[:_PARTS_SHOWN]
    spent = ", ".join(f"{_part(share)} {share.seconds / first.step_s:.0%}" for share in shares)
    lines = [f"The first takes {format_seconds(first.step_s)} a step, mostly {spent}."]
    if len(plans) > 1:
        lines.append(f"{SECOND} {_compare(plans[1].estimate, first, rule)}.")
    return tuple(lines)


def _part(share: TimeShare) -> str:
    return share.part.replace("_", " ")


def explain_departure(
    plan: Plan, guideline: str, usual: Layout | None, *, more_than: float = 1.0
) -> str:
    """Say why the plan does not follow a guideline: what the fastest layout that does takes.

    Where none is known, every such layout is ranked more than `more_than` times as long.
    """
    departure = f"{DEPARTURE} ({guideline})"
    if usual is None:
        more = more_than - 1
        return f"{departure}: every layout that keeps to it is more than {more:.0%} slower."
    usual_estimate = estimate(plan.model, plan.workload, plan.hardware, usual)
    comparison = _compare(usual_estimate, plan.estimate, plan.rule)
    return f"{departure}: {format_layout(usual)} takes {comparison}."


def explain_bound(plan: Plan) -> tuple[str, ...]:
    """Say what holds the plan back, what would change it, and how sure the numbers are.

    Memory holds it back where more memory would make it faster, else the largest part of its step.
    A faster layout that fits less probably says that memory has a part in it.
    """
    estimate = plan.estimate
    largest = max(estimate.shares, key=lambda share: share.seconds)
    bound = f"{_part(largest)}, {largest.seconds / estimate.step_s:.0%} of the step"
    if any("memory" in gain.change and gain.step_s < estimate.step_s for gain in plan.gains):
        bound = f"memory; its largest part is {estimate.largest}"
    elif not any(gamble.step_s < estimate.step_s for gamble in plan.gambles):
        bound += "; more memory would change nothing"
    sd = format_bytes(estimate.peak_sd_bytes)
    sure = (
        f"{EXPECTED_ERROR} (one standard deviation): "
        f"{estimate.step_sd:.0%} of the step time, {sd} of the peak memory."
    )
    return (f"Limited by {bound}.", *(_explain_gain(gain, plan) for gain in plan.gains), sure)


def explain_precision(plan: Plan) -> tuple[str, ...]:
    """Say what a format of fewer bits makes of the step in the same layout.

    A plan in one stands beside bf16; any other beside the fastest of those that somebody ran on the
    part, else of those that it has.
    """
    precision = plan.workload.precision
    if plan.estimate.untimed:
        return ()
    if precision.is_narrow:
        other = _estimate_in(plan, Dtype.BF16)
        if other is None:  # the layout exists in fewer bits alone
            return ()
        comparison = _compare(plan.estimate, other, plan.rule, "in bf16")
        line = f"In {precision} the layout takes {comparison}."
        return (line, *_explain_wide_layers(plan, plan.estimate, precision))
    if not plan.hardware.device.kind.is_accelerator:
        return ()
    others = {dtype: _estimate_in(plan, dtype) for dtype in NARROW_FORMATS}
    timed = {dtype: other for dtype, other in others.items() if other and not other.untimed}
    if not timed:
        return ()
    runs = {dtype: count_runs_in(dtype, plan.hardware) for dtype in timed}
    fastest = min(timed, key=lambda dtype: (not runs[dtype], timed[dtype].step_s))
    comparison = _compare(timed[fastest], plan.estimate, plan.rule)
    evidence = "" if runs[fastest] else " (nobody published a run of it on this part)"
    subject = f"In {fastest}{evidence} the layout takes"
    line = f"{subject} {comparison}; --precision any compares formats."
    return (line, *_explain_wide_layers(plan, timed[fastest], fastest))


def _explain_wide_layers(plan: Plan, narrow: Estimate, precision: Dtype) -> tuple[str, ...]:
    """Say what a step in 4 bits takes with the layers that recipes leave in 16.

    `narrow` is the estimate with every layer in `precision`; a job that leaves layers in 16 bits
    itself needs no word.
    """
    trainer = plan.workload.trainer
    if precision is not Dtype.NVFP4 or trainer.bf16_first_layers or trainer.bf16_last_layers:
        return ()
    layers = plan.model.layers
    wide = round(_WIDE_SHARE * layers)
    other = _estimate_in(plan, precision, replace(trainer, bf16_last_layers=wide))
    if not wide or other is None:
        return ()
    relation = describe_relation(other.step_s / narrow.step_s)
    share = f"about {_WIDE_SHARE:.0%} of the layers"
    step = f"{format_seconds(other.step_s)} a step, {relation}"
    return (
        f"For the loss's sake recipes of {precision} leave {share} in bf16: with"
        f" train.bf16_last_layers = {wide} it takes {step}.",
    )


def _estimate_in(
    plan: Plan, precision: Dtype, trainer: TrainerSpec | None = None
) -> Estimate | None:
    """Return the estimate of a plan's layout in another format; None where it is not legal."""
    workload = replace(plan.workload, precision=precision, trainer=trainer or plan.workload.trainer)
    if check_precision(workload, plan.hardware):
        return None
    try:
        return estimate(plan.model, workload, plan.hardware, plan.layout)
    except BadInput:
        return None


def explain_unused(plan: Plan) -> tuple[str, ...]:
    """Say what the next step of interleaving and of context parallelism would make of a plan.

    Each is the least legal one above the plan's own, in the same layout otherwise, but that layers
    are spread anew over chunks. Where none is legal, the rule says why.
    """
    if plan.estimate.untimed:
        return ()
    lines: list[str] = []
    for key in ("vpp", "cp") if plan.layout.pp > 1 else ("cp",):
        other = _next_step(plan, key)
        if other is None:
            lines += _explain_illegal_step(plan, key)
            continue
        value = getattr(other, key)
        other_estimate = estimate(plan.model, plan.workload, plan.hardware, other)
        relation = f"takes {_compare(other_estimate, plan.estimate, plan.rule)}"
        text = " and ".join((relation, *_explain_doubtful_memory(other_estimate)))
        lines.append(f"{UNUSED}, {key}{value}: it {text}.")
    return tuple(lines)


def _next_step(plan: Plan, key: str) -> Layout | None:
    """Return a plan's layout with the least legal value of a degree above its own."""
    own = getattr(plan.layout, key)
    for value in range(own + 1, _MOST_STEPS * own + 1):
        for layout in _list_steps(plan, key, value):
            job = Job(model=plan.model, workload=plan.workload, layout=layout)
            if not check_legality(job):
                return layout
    return None


def _list_steps(plan: Plan, key: str, value: int) -> Iterator[Layout]:
    """Yield a plan's layout with another degree; chunks come with their schedule and stages too."""
    with suppress(BadInput):
        changes: dict[str, Any] = {key: value}
        layout = replace(plan.layout, **changes)
        yield layout
        if key == "vpp":
            even = replace(layout, schedule=plain_schedule(value), stages=StageString(""))
            yield even
            yield replace(even, stages=StageString(spread_stages(plan.model, even)))


def _explain_illegal_step(plan: Plan, key: str) -> Iterator[str]:
    """Say which rule forbids twice a degree."""
    value = 2 * getattr(plan.layout, key)
    for layout in (*_list_steps(plan, key, value),)[-1:]:
        job = Job(model=plan.model, workload=plan.workload, layout=layout)
        for reason in check_legality(job)[:1]:
            yield f"{UNUSED}, {key}{value}: {reason.rule}."


def _explain_gain(gain: WhatIf, plan: Plan) -> str:
    change = describe_relation(gain.step_s / plan.estimate.step_s)
    line = f"With {gain.change}: {format_seconds(gain.step_s)} a step, {change}"
    if gain.step_s > plan.estimate.step_s:
        return f"{line}."
    if gain.layout == plan.layout:
        return f"{line}, the same layout."
    return f"{line}, {format_layout_changes(gain.layout, plan.layout)}."


def describe_relation(ratio: float) -> str:
    """Say how a step that is `ratio` times as long as another compares: "7.6 x slower"."""
    if ratio >= _TIMES_FROM:
        return f"{format_figures(ratio)} x slower"
    return f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def explain_objections(
    model: ModelSpec, workload: Workload, hardware: Hardware, ranked: HasPlans, text: str
) -> tuple[str, ...]:
    """Say what speaks against the layout `text` beside the best: broken rules, memory, or time.

    Where no search would have tried the layout, that is said too.

    Raises:
        BadInput: The text is no layout.
    """
    layout = parse_layout(text, world_size=hardware.count)
    name = format_layout(layout)
    reasons = check_legality(Job(model=model, workload=workload, layout=layout))
    if reasons:
        return tuple(f"{name} is not legal: {reason}" for reason in reasons)
    layout_estimate = estimate(model, workload, hardware, layout)
    lines = [f"{name} {line}" for line in _explain_doubtful_memory(layout_estimate)]
    if ranked.plans:
        best = ranked.plans[0]
        if best.layout == layout:
            lines.append(f"{name} is the best plan")
        else:
            lines.append(f"{name} takes {_compare(layout_estimate, best.estimate, best.rule)}")
    choices = SearchedChoices(space=build_search_space(model, workload, hardware, ""))
    lines += [f"no search tries {name}: {reason}" for reason in choices.find_unsearched(layout)]
    return tuple(lines) or (f"nothing: {name} fits and no plan was found that beats it",)


def explain_beside(plan: Plan, first: Plan, name: str) -> tuple[str, ...]:
    """Say how a plan compares with another one, called `name`, which need not be the best."""
    lines = [*_explain_doubtful_memory(plan.estimate)]
    if plan.layout == first.layout:
        lines.append(f"is the same layout as {name}")
    else:
        lines.append(f"takes {_compare(plan.estimate, first.estimate, first.rule, name)}")
    text = format_layout(plan.layout)
    return tuple(f"{text} {line}" for line in lines)


def _explain_doubtful_memory(estimate: Estimate) -> Sequence[str]:
    return () if estimate.verdict is Verdict.FITS else (_explain_memory(estimate),)


def _explain_memory(estimate: Estimate) -> str:
    excess = "is within the spread of"
    if estimate.margin_bytes < 0:
        excess = f"is {format_bytes(-estimate.margin_bytes)} over"
    peak, capacity = format_bytes(estimate.peak_bytes), format_bytes(estimate.capacity_bytes)
    use = f"{peak} of {capacity} on pipeline rank {estimate.peak_rank}"
    return f"{excess} the memory: {use}, most of it {estimate.largest}"


def _explain_doubt(other: Estimate, best: Estimate, rule: RankingRule) -> str:
    """Say why a shorter step may be no better: it is less certain, or may not fit; "" without.

    The verdict on memory by itself is said elsewhere.
    """
    if other.step_s >= best.step_s:
        return ""
    longest_s, best_longest_s = bound_s(other, rule), bound_s(best, rule)
    if longest_s >= best_longest_s:
        longest, best_longest = format_seconds(longest_s), format_seconds(best_longest_s)
        return f" but less certain: {rule.risk:.0%} odds of over {longest} beside {best_longest}"
    wanted = min(rule.fit_probability, best.fit_probability)
    if other.verdict is Verdict.OOM and best.verdict is not Verdict.OOM:
        return " but does not fit"
    if other.fit_probability < wanted:
        return f" but fits with a probability of {other.fit_probability:.0%}"
    return ""


def _compare(other: Estimate, best: Estimate, rule: RankingRule, name: str = _LEADER) -> str:
    """Say by how much a step is slower than the best, and which parts make most of the change."""
    before = {share.part: share.seconds for share in best.shares}
    after = {share.part: share.seconds for share in other.shares}
    changes = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in (before | after)}
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:_PARTS_SHOWN]
    parts = [
        f"{part.replace('_', ' ')} {format_change(seconds, format_seconds)}"
        for part, seconds in largest
        if abs(seconds) > _WORTH_SAYING * best.step_s
    ]
    relation = f"{describe_relation(other.step_s / best.step_s)} than {name}"
    relation += mention(", which {}", _MISFITS.get(best.verdict, ""))
    doubt = _explain_doubt(other, best, rule)
    named = mention(" ({})", ", ".join(parts))
    return f"{format_seconds(other.step_s)} a step, {relation}{doubt}{named}"
