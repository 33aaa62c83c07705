"""The walls of a run with their fixes, and the changes that matter, as sections of a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moewright.diagnosis.advice import SHOWN_CHANGES, Advice, JobChange
from moewright.diagnosis.priced_fixes import ALREADY_ON
from moewright.report.document import (
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Phrase,
    Tone,
)
from moewright.spec.finding import Basis, Finding, Fix, Waterfall
from moewright.spec.plan import Plan
from moewright.spec.units import format_bytes, format_change, format_seconds, mention

_MAX_FINDINGS = 4  # on a terminal
_FIXES_SHOWN = 3  # without -v


def list_finding_sections(
    findings: Sequence[Finding], *, has_headline: bool = False
) -> Iterator[DocumentSection]:
    """Yield the wall to work on first with its evidence and fixes, then those that follow it.

    Where a headline says that the findings do not explain the step, none of them is the wall. A
    short answer has the best fixes of the first, and the headings of the others alone.
    """
    for index, finding in enumerate(findings):
        is_wall = index == 0 and not has_headline
        label = Phrase(
            text=f"WALL: {finding.wall}" if is_wall else f"then: {finding.wall}",
            tone=Tone.DOUBTFUL.where(is_wall),
            face=Face.BADGE,
        )
        fixes = ItemList(
            items=tuple(tuple(list_fix_runs(fix)) for fix in finding.fixes if not fix.excluded),
            is_numbered=True,
            short=_FIXES_SHOWN,
        )
        ruled_out = DocumentSection(
            title="  on already, or cannot be made here",
            lines=tuple(f"  {line}" for line in _list_ruled_out(finding.fixes)),
            extent=Extent.LONG,
        )
        body = DocumentSection(
            lines=tuple(f"  seen: {line}" for line in finding.evidence),
            items=fixes if fixes.items else None,
            sections=(ruled_out,) if ruled_out.lines else (),
            extent=Extent.LONG if index else Extent.SHORT,
        )
        yield DocumentSection(
            title=(label, f" ({finding.cause}): {finding.title}"),
            sections=(body,),
            extent=Extent.SHORT if index < _MAX_FINDINGS else Extent.WHOLE,
        )


def _list_ruled_out(fixes: Sequence[Fix]) -> Iterator[str]:
    """Yield the fixes of a cause that are on already or cannot be made here, which is no advice."""
    for fix in fixes:
        if fix.excluded == ALREADY_ON:
            yield f"{ALREADY_ON}: {fix.text}"
        elif fix.excluded:
            yield f"not here: {fix.text} ({fix.excluded})"


def list_fix_runs(fix: Fix) -> Iterator[str | Phrase]:
    """Yield a fix with its predicted price, its settings, and what it excludes."""
    yield fix.text
    if fix.price is not None:
        price = fix.price
        memory = format_change(price.peak_bytes, format_bytes)
        change = f"step {price.step_share:+.1%}, memory {memory}"
        yield " [predicted: "
        yield Phrase(text=change, tone=Tone.GOOD.where(price.step_share < 0))
        yield f", {price.verdict}; layout: "
        yield Phrase(text=price.layout, face=Face.CODE)
        yield "]"
    if fix.setting:
        yield from (" [set: ", Phrase(text=fix.setting, face=Face.CODE), "]")
    if fix.megatron:
        yield from (" [Megatron: ", Phrase(text=fix.megatron, face=Face.CODE), "]")
    if fix.excludes:
        yield f" [excludes {fix.excludes}]"


_PARTS_SHOWN = 5  # the largest; the rest is small


def build_advice_section(advice: Advice) -> DocumentSection:
    """Build the changes with their gains, the gain of all, what to write, and what stands apart.

    A short answer has the three changes that gain most.
    """
    changes = tuple(map(format_job_change, advice.changes))
    title = "" if changes else "change: nothing that is planned here makes it faster"
    return DocumentSection(
        title=title,
        items=ItemList(items=changes, is_numbered=True, short=SHOWN_CHANGES),
        sections=(DocumentSection(lines=tuple(_list_settings(advice))),),
    )


def _list_settings(advice: Advice) -> Iterator[str]:
    if advice.changes:
        together = _name_together([change.adds for change in advice.changes])
        peak = format_bytes(advice.peak_bytes)
        yield (
            f"{together}: {format_seconds(advice.before_s)} -> {format_seconds(advice.after_s)} "
            f"a step by estimate ({-advice.gain:+.0%}), {advice.verdict}, peak {peak}: "
            f"{advice.after}"
        )
    yield from advice.setting_lines()
    if advice.training:
        gains = (
            f"{change.text} {_gain(change)}{mention(' [set: {}]', change.settings)}"
            for change in advice.training
        )
        yield f"beyond that, what changes training: {'; '.join(gains)}"


def _name_together(adds: Sequence[bool]) -> str:
    """Return which of the numbered changes make the job with all that help."""
    numbers = [str(number) for number, helps in enumerate(adds, 1) if helps]
    if len(numbers) == len(adds):
        return f"all {len(adds)} together" if len(adds) > 1 else "with it"
    if not numbers:
        return "none of them beside the others"
    plural = " together" if len(numbers) > 1 else ""
    pronoun = "them" if plural else "it"
    return f"{', '.join(numbers)}{plural}, beside {pronoun} the rest adds nothing"


def format_job_change(change: JobChange) -> str:
    """Return a change with its gain alone, its evidence and what sets it."""
    text = f"{change.text}: step {_gain(change)}"
    if change.evidence:
        text += f" [{change.evidence}]"
    if change.verdict:
        text += f" [{change.verdict}]"
    if change.settings:
        text += f" [set: {change.settings}]"
    return text


def _gain(change: JobChange) -> str:
    """Return what a change alone does to the step; measured, it is the most that it can do."""
    if change.basis is Basis.MEASURED:
        return f"up to {change.step_share:+.0%}"
    # Of a large gain a decimal says nothing.
    return f"{change.step_share:+.1%}" if change.step_share > -0.1 else f"{change.step_share:+.0%}"


def describe_step(job: Plan, measured_s: float, waterfall: Waterfall | None) -> str:
    """Say how long a step takes beside its prediction, and where it goes, the largest first."""
    predicted_s = job.estimate.step_s
    text = f"a step: {format_seconds(predicted_s)} predicted"
    if measured_s:
        measured = format_seconds(measured_s)
        text = f"a step: {measured} measured, {format_seconds(predicted_s)} predicted"
    if waterfall is None:
        parts = [
            (share.part.value, share.seconds, Basis.PREDICTED) for share in job.estimate.shares
        ]
        whole_s = predicted_s
    else:
        parts = [(drop.name, drop.seconds, drop.basis) for drop in waterfall.drops]
        parts.append(("ideal", waterfall.ideal_s, Basis.PREDICTED))
        whole_s = waterfall.measured_s
    parts.sort(key=lambda part: -part[1])
    shown = (
        f"{name} {seconds / whole_s:.0%}{'' if basis is Basis.MEASURED else ' (predicted)'}"
        for name, seconds, basis in parts[:_PARTS_SHOWN]
        if seconds > 0
    )
    return f"{text}; of it {', '.join(shown)}"
