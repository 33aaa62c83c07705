"""Advice as a section: the changes that matter, what they gain, and what to write."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.diagnosis.advice import SHOWN_CHANGES, Advice, JobChange
from moewright.report.document import DocumentSection, ItemList
from moewright.spec.finding import Basis, Waterfall
from moewright.spec.plan import Plan
from moewright.spec.units import format_bytes, format_seconds

_PARTS_SHOWN = 5


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


def list_advice_lines(advice: Advice) -> Iterator[str]:
    """Yield advice line by line, with the three changes that gain most."""
    for number, change in enumerate(advice.changes[:SHOWN_CHANGES], 1):
        yield f"{number}. {format_job_change(change)}"
    yield from _list_settings(advice)


def _list_settings(advice: Advice) -> Iterator[str]:
    if advice.changes:
        count = len(advice.changes)
        together = f"all {count} together" if count > 1 else "with it"
        peak = format_bytes(advice.peak_bytes)
        yield (
            f"{together}: {format_seconds(advice.before_s)} -> {format_seconds(advice.after_s)} "
            f"a step by estimate ({-advice.gain:+.0%}), {advice.verdict}, peak {peak}: "
            f"{advice.after}"
        )
    for name, text in (
        ("write", advice.write),
        ("leave out", advice.leave_out),
        ("export", advice.export),
    ):
        if text:
            yield f"{name}: {text}"
    if advice.training:
        gains = (f"{change.text} {_gain(change)}" for change in advice.training)
        yield f"beyond that, what changes training: {'; '.join(gains)}"


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
