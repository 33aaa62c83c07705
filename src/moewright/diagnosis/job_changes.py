"""Every change of a job's layout and kernels that a user could write, each with its price.

A change is a switch that is off, or a near layout: one choice that is another, or the best degrees
beside all other choices. What a change saves is the predicted step before it less that after it;
where a part of the step was measured, the part's saving is scaled to its measured seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import log
from types import MappingProxyType
from typing import Any

from moewright.codec.layout_text import format_fields, split_layout
from moewright.diagnosis.remedy import RemedyContext, add_graphs
from moewright.rules.job import plan_job
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.rules.timetable.stages import vpp_choices
from moewright.search.ranking import is_safe
from moewright.search.search import build_plan, find_best_plan
from moewright.search.space import MAX_VPP, build_search_space, dispatcher_choices
from moewright.spec.choices import FieldGroup
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    LAYOUT_FIELDS,
    CpComm,
    Layout,
    Offload,
    Overlap,
    Recompute,
    plain_schedule,
)
from moewright.spec.plan import DEFAULT_RULE, Plan, TimePart
from moewright.spec.stage_string import EVEN_SPLIT
from moewright.spec.workload import CrossEntropyKernel, ExpertKernels, TrainerSpec, Workload

JobObjections = Callable[[Plan], tuple[Reason, ...]]

LEAST_GAIN = 0.005  # of the step: less is nothing
_REST_GAIN = 0.01  # of the step, for which the search's whole layout is taken
_EQUAL = 0.02  # of the step: steps within it are alike, and the smaller change is told
_SAME_KERNEL = 1e-4  # of the step: kernels within it compute as fast, and differ by what they keep
_SHRUNK = 0.95  # of the peak of a job that did not fit
_MAX_APPLIED = 12
_TRAINER = "trainer."
# What a job trains, or which machine it has: no change here touches it.
_KEPT = ("capacity", "capacity_fill", "rank_capacity", "expert_placement", "spare", "order")
_DEGREES = (FieldGroup.DEGREES, FieldGroup.PIPELINE)
_IMPLIED = {"sp": "tp", "schedule": "vpp", "recompute_block": "recompute", "vpp_group": "vpp"}
_VALUE_WORDS = {("stages", ""): "even", ("sp", "True"): "on", ("sp", "False"): "off"}
_KERNELS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "expert_kernels": (ExpertKernels.GROUPED,),
        "attention_backend": (TrainerSpec().attention_backend,),
        "unfused": ((),),
        "cross_entropy": (CrossEntropyKernel.IN_PLACE, CrossEntropyKernel.COMPILED),
    }
)
_KERNEL_WORDS = {
    "expert_kernels": "one grouped product for all experts of a rank",
    "attention_backend": "attention in tiles, without whole matrices of scores",
    "unfused": "fused activations, weight gradients, biases of experts and moves of rows",
    "cross_entropy": "a fused loss",
}
_RECOMPUTES = (
    (),
    (Recompute.LAYERNORM, Recompute.MOE_ACT),
    (Recompute.MOE_ACT,),
    (Recompute.MOE,),
    (Recompute.FULL,),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedChange:
    """A change of a job, applied to it alone.

    `fields` names what differs, "trainer." before choices of kernels; `saved_s` are seconds of the
    step, scaled to what was measured.
    """

    fields: frozenset[str]
    after: Plan
    saved_s: float

    def apply(self, plan: Plan) -> tuple[Workload, Layout]:
        """Return the workload and the layout of another plan of the job with this change."""
        names = {name for name in self.fields if not name.startswith(_TRAINER)}
        layout = replace(
            plan.layout, **{name: getattr(self.after.layout, name) for name in sorted(names)}
        )
        kernels = {name.removeprefix(_TRAINER) for name in self.fields - names}
        trainer = replace(
            plan.workload.trainer,
            **{name: getattr(self.after.workload.trainer, name) for name in sorted(kernels)},
        )
        return replace(plan.workload, trainer=trainer), layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeSearch:
    """The changes of a job, the most gainful first, and the job with all that help together.

    `rest` is what the planner's best layout changes beyond `changes`, where it is faster than they
    are together; it is then part of `together`.
    """

    before: Plan
    changes: tuple[PricedChange, ...]
    applied: tuple[PricedChange, ...]
    together: Plan
    rest: PricedChange | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewObjections:
    """The reasons of a trainer against a layout of a job, without those that the job itself has.

    Equal ones compare equal, unlike functions, so that a search with them is done once.
    """

    object_to: JobObjections
    job: Plan
    accepted: frozenset[Reason]

    def __call__(self, layout: Layout) -> tuple[Reason, ...]:
        reasons = self.object_to(replace(self.job, layout=layout))
        return tuple(
            reason
            for reason in reasons
            if reason.field.startswith("layout.") and reason not in self.accepted
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePricer:
    """Prices changes of one job.

    `object_to` returns what its trainer has against a job. `measured_s` are the measured seconds of
    parts of the step. With `must_shrink` a change counts that lowers the peak, as the job does not
    fit; else the peak must fit as probably as the job's own, or as a plan's.
    """

    before: Plan
    object_to: JobObjections
    measured_s: Mapping[TimePart, float] = field(default_factory=dict)
    must_shrink: bool = False

    def price(self, workload: Workload, layout: Layout) -> PricedChange | None:
        """Return the change to a workload and a layout; None where it is none, or cannot be."""
        plan = self.build(workload, layout)
        if plan is None or not self.fits(plan):
            return None
        names = changed_fields(self.before, plan)
        if not names:
            return None
        return PricedChange(fields=names, after=plan, saved_s=self.saved_s(self.before, plan))

    def build(self, workload: Workload, layout: Layout) -> Plan | None:
        """Return the plan of a changed job; None where it is illegal or its trainer objects."""
        before = self.before
        job = replace(plan_job(before), workload=workload, layout=layout)
        if check_legality(job):
            return None
        try:
            plan = build_plan(before.model, workload, before.hardware, layout)
        except BadInput:
            return None
        objections = self.object_to(before)
        return None if set(self.object_to(plan)) - set(objections) else plan

    def fits(self, plan: Plan) -> bool:
        """Whether a changed job has the memory that it needs."""
        rule = DEFAULT_RULE
        if self.must_shrink:
            limit_bytes = _SHRUNK * self.before.estimate.peak_bytes
            return is_safe(plan.estimate, rule) and plan.estimate.peak_bytes <= limit_bytes
        least = min(rule.fit_probability, self.before.estimate.fit_probability)
        return plan.estimate.fit_probability >= least

    def saved_s(self, before: Plan, after: Plan) -> float:
        """Return the seconds that a change saves, scaled where a part was measured."""
        return sum(part_savings(before, after, self.measured_s).values())


def part_savings(
    before: Plan, after: Plan, measured_s: Mapping[TimePart, float]
) -> dict[TimePart, float]:
    """Return the seconds that each part of a step loses by a change, less than 0 where it gains."""
    was = {share.part: share.seconds for share in before.estimate.shares}
    now = {share.part: share.seconds for share in after.estimate.shares}
    savings = {}
    for part in TimePart:
        factor = 1.0
        if part in measured_s and was.get(part, 0.0) > 0:
            factor = measured_s[part] / was[part]
        savings[part] = factor * (was.get(part, 0.0) - now.get(part, 0.0))
    return savings


def scaled_step_s(plan: Plan, measured_s: Mapping[TimePart, float]) -> float:
    """Return the predicted step with the measured seconds of its parts in place of predicted."""
    return sum(measured_s.get(share.part, share.seconds) for share in plan.estimate.shares)


def changed_fields(before: Plan, after: Plan) -> frozenset[str]:
    """Return the names of what differs between two plans of a job."""
    names = {
        choice.name
        for choice in LAYOUT_FIELDS
        if getattr(before.layout, choice.name) != getattr(after.layout, choice.name)
    }
    was, now = before.workload.trainer, after.workload.trainer
    names |= {
        f"{_TRAINER}{choice.name}"
        for choice in fields(TrainerSpec)
        if getattr(was, choice.name) != getattr(now, choice.name)
    }
    return frozenset(names)


def describe_change(before: Plan, after: Plan) -> str:
    """Say what differs between two plans of a job: choices of kernels, then of the layout."""
    names = changed_fields(before, after)
    words = [words for name, words in _KERNEL_WORDS.items() if f"{_TRAINER}{name}" in names]
    keys = split_layout(before.layout).keys() | split_layout(after.layout).keys()
    for choice in LAYOUT_FIELDS:
        key = choice.key or choice.name
        if choice.name not in names or (key not in keys and _IMPLIED.get(choice.name) in names):
            continue
        was = choice.format(getattr(before.layout, choice.name))
        now = choice.format(getattr(after.layout, choice.name))
        was, now = (_VALUE_WORDS.get((choice.name, value), value) for value in (was, now))
        words.append(f"{key} {was} -> {now}")
    return ", ".join(words)


def find_changes(pricer: ChangePricer) -> ChangeSearch:
    """Price every absent switch and near layout of a job, and apply greedily what helps."""
    best = _search(pricer, _with_best_kernels(pricer))
    priced = _list_best(pricer, best)
    together = pricer.before
    applied: list[PricedChange] = []
    for change in priced[:_MAX_APPLIED]:
        plan = pricer.build(*change.apply(together))
        if plan is None or not pricer.fits(plan):
            continue
        if _is_gain(pricer, together, plan) or (pricer.must_shrink and not applied):
            together = plan
            applied.append(change)
    rest = None
    least_s = (1 - _REST_GAIN) * together.estimate.step_s
    is_first = pricer.must_shrink and not applied
    if best is not None and (best.estimate.step_s < least_s or is_first):
        best = _shrink(pricer, best, together)
        rest = PricedChange(
            fields=changed_fields(together, best),
            after=best,
            saved_s=pricer.saved_s(together, best),
        )
        together = best
    return ChangeSearch(
        before=pricer.before,
        changes=priced,
        applied=tuple(applied),
        together=together,
        rest=rest,
    )


def _with_best_kernels(pricer: ChangePricer) -> Workload:
    """Return the workload with every choice of kernels at its best, as far as it may be."""
    best = pricer.before
    for name, values in _KERNELS.items():
        for value in values:
            trainer = replace(best.workload.trainer, **{name: value})
            changed = replace(best.workload, trainer=trainer)
            plan = pricer.build(changed, best.layout)
            if plan is not None and _rank_kernels(plan) < _rank_kernels(best):
                best = plan
    return best.workload


def _rank_kernels(plan: Plan) -> tuple[float, int]:
    """Return what orders kernels: time in ten-thousandths, and memory where time is the same."""
    return round(log(plan.estimate.step_s) / _SAME_KERNEL), plan.estimate.peak_bytes


def _is_gain(pricer: ChangePricer, before: Plan, after: Plan) -> bool:
    step_s = scaled_step_s(before, pricer.measured_s)
    return pricer.saved_s(before, after) >= LEAST_GAIN * step_s


def _list_best(pricer: ChangePricer, best: Plan | None) -> tuple[PricedChange, ...]:
    """Return the changes that help, the most gainful first; no two change the same field."""
    step_s = scaled_step_s(pricer.before, pricer.measured_s)
    helpful = [
        change
        for change in _list_changes(pricer, best)
        if pricer.must_shrink or change.saved_s >= LEAST_GAIN * step_s
    ]
    # Of changes that save alike the one of fewer fields comes first.
    helpful.sort(
        key=lambda change: (-round(change.saved_s / (_EQUAL * step_s)), len(change.fields))
    )
    kept: list[PricedChange] = []
    for change in helpful:
        if not any(change.fields & other.fields for other in kept):
            kept.append(change)
    return tuple(sorted(kept, key=lambda change: -change.saved_s))


def _list_changes(pricer: ChangePricer, best: Plan | None) -> Iterator[PricedChange]:
    before = pricer.before
    seen = {before.layout}
    for name, values in _KERNELS.items():
        for value in values:
            trainer = replace(before.workload.trainer, **{name: value})
            workload = replace(before.workload, trainer=trainer)
            if change := pricer.price(workload, before.layout):
                yield change
    near = [*_near_layouts(before), *_take_choices(before, best)]
    for layout in near:
        if layout not in seen:
            seen.add(layout)
            if change := pricer.price(before.workload, layout):
                yield change
    if best is not None:
        degrees = _take_degrees(pricer, best)
        if degrees is not None and degrees.fields:
            yield degrees


def _take_choices(plan: Plan, best: Plan | None) -> Iterator[Layout]:
    """Yield layouts with one choice of the best plan each, its degrees and pipeline left out."""
    if best is None:
        return
    for choice in LAYOUT_FIELDS:
        if choice.facts.group not in _DEGREES and choice.name not in _KEPT:
            yield replace(plan.layout, **{choice.name: getattr(best.layout, choice.name)})


def _near_layouts(plan: Plan) -> Iterator[Layout]:
    """Yield layouts that differ in one choice, with what it implies; some are illegal."""
    layout = plan.layout
    world = layout.world_size
    domain = plan.hardware.fabric.domain_size
    for tp in divisors(world):
        if tp <= domain:
            yield replace(layout, tp=tp, sp=tp > 1)
    for cp in divisors(world):
        yield replace(layout, cp=cp)
    yield from _near_pipelines(plan)
    for choice in LAYOUT_FIELDS:
        if choice.name in ("mbs", "zero", "cp_comm"):
            for value in choice.facts.tried:
                yield replace(layout, **{choice.name: value})
    if layout.tp > 1:
        yield replace(layout, sp=not layout.sp)
    if plan.model.moe is not None:
        yield from _near_expert_layouts(plan)
    yield from _near_policies(plan)


def _near_pipelines(plan: Plan) -> Iterator[Layout]:
    """Yield other numbers of stages, and of virtual stages on as many ranks as now."""
    layout = plan.layout
    for pp in divisors(layout.world_size):
        if pp > plan.model.layers:
            break
        even = {vpp for vpp in vpp_choices(plan.model.layers, pp) if vpp <= MAX_VPP}
        tried = {1, *even} if pp == layout.pp else {1, layout.vpp, max(even, default=1)}
        for vpp in sorted(tried):
            schedule = plain_schedule(vpp)
            yield replace(layout, pp=pp, vpp=vpp, schedule=schedule, stages=EVEN_SPLIT, vpp_group=0)


def _near_expert_layouts(plan: Plan) -> Iterator[Layout]:
    layout = plan.layout
    assert plan.model.moe is not None
    for etp in divisors(layout.world_size):
        if etp <= plan.hardware.fabric.domain_size:
            yield replace(layout, etp=etp)
    for ep in divisors(plan.model.moe.experts):
        yield replace(layout, ep=ep)
        yield replace(layout, ep=ep, etp=1)
    space = build_search_space(plan.model, plan.workload, plan.hardware, "")
    for dispatcher in dispatcher_choices(space, layout):
        yield replace(layout, dispatcher=dispatcher)


def _near_policies(plan: Plan) -> Iterator[Layout]:
    """Yield layouts with other choices of recompute, offload, overlap and graphs."""
    layout = plan.layout
    loss = {Recompute.LOSS}.intersection(layout.recompute)
    for recompute in _RECOMPUTES:
        plain = replace(layout, recompute_block=0, recompute_span=1)
        yield replace(plain, recompute=tuple(sorted({*recompute, *loss})))
    for module in layout.recompute:
        yield replace(layout, recompute=tuple(kept for kept in layout.recompute if kept != module))
    on_host = tuple(module for module in layout.offload if module is Offload.OPTIMIZER)
    activations = tuple(module for module in layout.offload if module is not Offload.OPTIMIZER)
    whole = {
        "offload_layers": DEFAULT_LAYOUT.offload_layers,
        "offload_chunks": DEFAULT_LAYOUT.offload_chunks,
    }
    yield replace(layout, offload=on_host, **whole)  # type: ignore[arg-type]
    if activations:
        for recompute in _RECOMPUTES:
            kept = replace(layout, offload=on_host, **whole)  # type: ignore[arg-type]
            yield replace(kept, recompute=tuple(sorted({*recompute, *loss})))
    fraction = DEFAULT_LAYOUT.offload_fraction
    yield replace(layout, offload=activations, offload_fraction=fraction)
    yield replace(layout, offload=tuple(sorted((*activations, Offload.OPTIMIZER))))
    overlaps = [{overlap} for overlap in Overlap]
    for added in (*overlaps, {Overlap.GRAD, Overlap.PARAM}):
        yield replace(layout, overlap=tuple(sorted({*layout.overlap, *added})))
    for overlap in layout.overlap:
        yield replace(layout, overlap=tuple(kept for kept in layout.overlap if kept != overlap))
    if plan.hardware.device.kind.runs_cuda:
        context = RemedyContext(model=plan.model, hardware=plan.hardware, layout=layout)
        yield add_graphs(context)
    yield replace(layout, graphs=())
    if layout.cp > 1:
        yield from (replace(layout, cp_comm=cp_comm) for cp_comm in CpComm)


def _take_degrees(pricer: ChangePricer, best: Plan) -> PricedChange | None:
    """Return the change to the degrees and the pipeline of a plan, beside all other choices."""
    before = pricer.before
    degrees = {
        choice.name: getattr(best.layout, choice.name)
        for choice in LAYOUT_FIELDS
        if choice.facts.group in _DEGREES
    }
    layout = replace(before.layout, **degrees)
    plan = pricer.build(before.workload, layout)
    if plan is None or not pricer.fits(plan):
        return None
    plan = _shrink(pricer, plan, before)
    return pricer.price(plan.workload, plan.layout)


def _search(pricer: ChangePricer, workload: Workload) -> Plan | None:
    """Return the planner's best plan of a job, with what the job trains kept; None: none fits."""
    before = pricer.before
    objections = NewObjections(
        object_to=pricer.object_to,
        job=replace(before, workload=workload),
        accepted=frozenset(pricer.object_to(before)),
    )
    names = {
        choice.name
        for choice in LAYOUT_FIELDS
        if choice.name in _KEPT and getattr(before.layout, choice.name) != choice.default
    }
    text = format_fields(before.layout, names)
    try:
        plan = find_best_plan(
            before.model, workload, before.hardware, fixed=text, allowed=objections
        )
    except BadInput:
        return None
    return plan if plan is not None and pricer.fits(plan) else None


def _shrink(pricer: ChangePricer, plan: Plan, base: Plan) -> Plan:
    """Return a plan with those of its choices back at the base's that make no difference."""
    limit_s = (1 + LEAST_GAIN) * plan.estimate.step_s
    for choice in LAYOUT_FIELDS:
        was = getattr(base.layout, choice.name)
        if getattr(plan.layout, choice.name) == was or choice.name in _IMPLIED:
            continue
        layout = replace(plan.layout, **{choice.name: was})
        layout = replace(
            layout,
            sp=layout.tp > 1 and plan.layout.sp,
            schedule=base.layout.schedule if layout.vpp == base.layout.vpp else layout.schedule,
        )
        smaller = pricer.build(plan.workload, layout)
        if smaller and pricer.fits(smaller) and smaller.estimate.step_s <= limit_s:
            plan = smaller
    return plan
