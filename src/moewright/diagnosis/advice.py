"""What to change in a run, in the order of gain: the end of a diagnosis and of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from moewright.codec import format_layout
from moewright.diagnosis.job_changes import (
    LEAST_GAIN,
    ChangePricer,
    ChangeSearch,
    PricedChange,
    describe_change,
    find_changes,
    part_savings,
    scaled_step_s,
)
from moewright.diagnosis.waterfall import DROP_NAMES
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.rules.low_precision import list_narrow_forms
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput
from moewright.spec.finding import Basis, Cause, Finding, Waterfall
from moewright.spec.plan import Plan, TimePart, Verdict
from moewright.spec.record import Record, Row
from moewright.spec.units import divide, format_bytes, format_seconds
from moewright.spec.workload import Dtype, Workload

SHOWN_CHANGES = 3  # what somebody tries in a day
_PARTS_OF_EVIDENCE = 2  # the rest saves less than these
_PART_NAMES = {
    **DROP_NAMES,
    TimePart.ATTENTION: "attention",
    TimePart.DENSE: "dense layers",
    TimePart.EXPERTS: "experts",
    TimePart.HEAD: "head and loss",
    TimePart.OFFLOAD: "waits for offloading",
}
_PART_OF_DROP = {name: part for part, name in DROP_NAMES.items()}
# What no layout changes. Only measurements find it, and a step loses to it what they show.
_OUTSIDE_LAYOUT = frozenset(
    {
        Cause.COLLECTIVES,
        Cause.COPIES,
        Cause.DATA,
        Cause.DEVICE_COPIES,
        Cause.FRAGMENTATION,
        Cause.GARBAGE_COLLECTION,
        Cause.GROWING,
        Cause.HOST_OTHER,
        Cause.QUEUED,
        Cause.STRAGGLER,
        Cause.SYNC,
        Cause.UNLISTED,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChange:
    """One change of a run, with what it gains alone.

    `step_share` is the change of the step over the step, less than 0 where it is faster: predicted,
    or measured as the most that the change can gain. `settings` are what sets it, where no layout
    does; `evidence` says which parts of the step it shortens. One that adds nothing
    beside those before it is not among the settings to write. `fields` are those of the layout
    that it changes, and "trainer." with those of the kernels; none where only a measurement shows
    it.
    """

    text: str
    step_share: float
    basis: Basis
    evidence: str
    settings: str = ""
    verdict: str = ""  # of the memory with it; "" where memory stays as it is
    adds: bool = True
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Advice(Record):
    """The changes of a run, the most gainful first, and the job with all that help together.

    `before_s` and `after_s` are predicted steps, with measured parts in place of predicted where
    there are any; `after` is the layout text of the job with all changes. `training` are changes of
    what is trained (precision, batch), which gain beyond `after`. `write`, `leave_out` and `export`
    are the settings that make the difference, in the words of the run's trainer.
    """

    changes: tuple[JobChange, ...]
    training: tuple[JobChange, ...]
    before_s: float
    after_s: float
    after: str
    verdict: str
    peak_bytes: int
    write: str = ""
    leave_out: str = ""
    export: str = ""

    @property
    def gain(self) -> float:
        """Return the share of the step that all changes take away by estimate."""
        return 1 - divide(self.after_s, self.before_s, otherwise=1.0)

    def setting_lines(self) -> tuple[str, ...]:
        """Return a line for each of what to write, to leave out and to export that is not empty."""
        named = (("write", self.write), ("leave out", self.leave_out), ("export", self.export))
        return tuple(f"{name}: {text}" for name, text in named if text)

    def title(self) -> str:
        """Return what all changes gain together."""
        if not self.changes:
            return "nothing to change that is planned here"
        return (
            f"{format_seconds(self.before_s)} -> {format_seconds(self.after_s)} a step by estimate"
        )

    def to_rows(self) -> list[Row]:
        """Return a row for each change."""
        return [
            {
                "change": change.text,
                "step": change.step_share,
                "basis": change.basis.value,
                "evidence": change.evidence,
            }
            for change in self.changes
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvisedJob:
    """Advice with the plans that it is about, of which its settings are written.

    `retrained` are the plans of the changes of what is trained, in their order.
    """

    advice: Advice
    before: Plan
    after: Plan
    retrained: tuple[Plan, ...]


def measured_parts(waterfall: Waterfall | None) -> dict[TimePart, float]:
    """Return the measured seconds of the parts of a step that a waterfall has measured."""
    if waterfall is None:
        return {}
    return {
        _PART_OF_DROP[drop.name]: drop.seconds
        for drop in waterfall.drops
        if drop.basis is Basis.MEASURED and drop.name in _PART_OF_DROP and drop.seconds > 0
    }


def advise(pricer: ChangePricer, findings: Iterable[Finding]) -> AdvisedJob:
    """Return what to change in a run, whose findings say what its layout does not."""
    result = find_changes(pricer)
    changes = [
        *_describe_measured(findings),
        *(
            replace(_describe(pricer, change), adds=change in result.applied)
            for change in result.changes
        ),
    ]
    changes.sort(key=lambda change: change.step_share)
    if result.rest is not None:
        rest = _describe(pricer, result.rest, since=_before_rest(pricer, result))
        changes.append(rest)
    together = result.together
    before_s = scaled_step_s(pricer.before, pricer.measured_s)
    training = tuple(_change_training(together))
    advice = Advice(
        changes=tuple(changes),
        training=tuple(change for change, _ in training),
        before_s=before_s,
        after_s=before_s - pricer.saved_s(pricer.before, together),
        after=format_layout(together.layout),
        verdict=together.estimate.verdict.value,
        peak_bytes=together.estimate.peak_bytes,
    )
    return AdvisedJob(
        advice=advice,
        before=pricer.before,
        after=together,
        retrained=tuple(plan for _, plan in training),
    )


def _before_rest(pricer: ChangePricer, result: ChangeSearch) -> Plan:
    """Return the plan with all changes but the rest of the planner's layout."""
    plan = pricer.before
    for change in result.applied:
        plan = pricer.build(*change.apply(plan)) or plan
    return plan


def _describe(pricer: ChangePricer, change: PricedChange, since: Plan | None = None) -> JobChange:
    """Return a priced change in words; `since` is the plan that it changes, else the run's."""
    before = pricer.before if since is None else since
    step_s = scaled_step_s(before, pricer.measured_s)
    text = describe_change(before, change.after)
    savings = part_savings(before, change.after, pricer.measured_s)
    return JobChange(
        text=text if since is None else f"then, with those above: {text}",
        step_share=-change.saved_s / step_s,
        basis=Basis.PREDICTED,
        evidence="; ".join(_show_evidence(before, savings, pricer.measured_s)),
        verdict=_describe_memory(pricer, change.after),
        fields=tuple(sorted(change.fields)),
    )


def _show_evidence(
    before: Plan, savings: Mapping[TimePart, float], measured_s: Mapping[TimePart, float]
) -> Iterator[str]:
    """Yield the parts that a change shortens most, with their seconds before and after."""
    was = {share.part: share.seconds for share in before.estimate.shares}
    largest = sorted(savings, key=lambda part: -savings[part])[:_PARTS_OF_EVIDENCE]
    for part in largest:
        if savings[part] <= LEAST_GAIN * before.estimate.step_s:
            continue
        seconds = measured_s.get(part, was.get(part, 0.0))
        basis = Basis.MEASURED if part in measured_s else Basis.PREDICTED
        after = format_seconds(max(0.0, seconds - savings[part]))
        yield f"{_PART_NAMES[part]} {format_seconds(seconds)} -> {after} ({basis})"


def _describe_memory(pricer: ChangePricer, plan: Plan) -> str:
    """Say how full a changed job is, where it did not fit or may not fit."""
    estimate = plan.estimate
    if not pricer.must_shrink and estimate.verdict is Verdict.FITS:
        return ""
    peak = f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.capacity_bytes)}"
    return f"{estimate.verdict.value}, {peak}"


def _describe_measured(findings: Iterable[Finding]) -> Iterator[JobChange]:
    """Yield the first fix of each finding that no layout changes."""
    for finding in findings:
        fixes = [fix for fix in finding.fixes if not fix.excluded and fix.price is None]
        if finding.cause not in _OUTSIDE_LAYOUT or not fixes:
            continue
        fix = fixes[0]
        yield JobChange(
            text=fix.text,
            step_share=-min(1.0, finding.share),
            basis=Basis.MEASURED,
            evidence=f"{finding.title} (measured)",
            settings=fix.setting or fix.megatron,
        )


def _change_training(plan: Plan) -> Iterator[tuple[JobChange, Plan]]:
    """Yield what gains beyond a plan by changing what is trained: precision, then the batch."""
    for narrow in list_narrow_forms(plan.workload, plan.hardware):
        text = f"{_describe_format(narrow)} products"
        if narrow.precision is Dtype.NVFP4:
            text += " once wider ones are stable"
        yield from _price_training(plan, narrow, text)
    batch = 2 * plan.workload.global_batch
    wider = replace(plan.workload, global_batch=batch)
    yield from _price_training(plan, wider, f"a global batch of {batch:,}", samples=2)


def _describe_format(workload: Workload) -> str:
    if workload.precision is Dtype.FP8:
        return f"{workload.tensor_scaling.value} FP8"
    return workload.precision.value.upper()


def _price_training(
    plan: Plan, workload: Workload, text: str, *, samples: int = 1
) -> Iterator[tuple[JobChange, Plan]]:
    """Yield a change of the workload where it is legal and gains; `samples` times as many train."""
    if check_legality(replace(plan_job(plan), workload=workload)):
        return
    try:
        changed = build_plan(plan.model, workload, plan.hardware, plan.layout)
    except BadInput:
        return
    share = changed.estimate.step_s / samples / plan.estimate.step_s - 1
    if share <= -LEAST_GAIN and changed.estimate.verdict is not Verdict.OOM:
        per = "for the same tokens" if samples > 1 else "of the step"
        change = JobChange(text=text, step_share=share, basis=Basis.PREDICTED, evidence=per)
        yield change, changed
