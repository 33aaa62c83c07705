"""What a run came to, in six lines: learned, speed, wall, health, kept, next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from moewright.diagnosis.compare_ledgers import LedgerComparison
from moewright.report.ledger_document import describe_comparisons
from moewright.report.run_sections import describe_learning, is_number
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.finding import Finding, Waterfall
from moewright.spec.run import RunRecord
from moewright.spec.units import format_figures, format_seconds, mention, plural

_NAME_WIDTH = 9  # of the longest name, and a blank


def list_outcome_lines(
    record: RunRecord,
    comparisons: Sequence[LedgerComparison],
    findings: Sequence[Finding],
    waterfall: Waterfall | None,
    *,
    saved: str,
    next_steps: Sequence[str],
) -> Iterator[str]:
    """Yield whether a run was good and what to do now; a ledger that differs takes more lines.

    `saved` is where its state is, `next_steps` are commands.
    """
    lines = {
        "learned": _describe_learning(record),
        "speed": _describe_speed(record),
        "wall": _describe_wall(findings, waterfall),
        "health": _describe_health(record, comparisons),
        "kept": saved,
        "next": "; ".join(next_steps),
    }
    for name, text in lines.items():
        yield f"{name:{_NAME_WIDTH}}{text}"


def _describe_learning(record: RunRecord) -> str:
    losses = [step.loss for step in record.steps if is_number(step.loss)]
    clause = describe_learning(record)
    if len(losses) < 2:
        return clause
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}. {clause[0].upper()}{clause[1:]}"


def _describe_speed(record: RunRecord) -> str:
    measured_s = median_step_s(record)
    if not measured_s:
        return "no step under this layout yet"
    steps = steady_steps(record)
    rate = median([step.tokens / step.step_s for step in steps])
    mfu = median([step.mfu for step in steps])
    text = f"{format_seconds(measured_s)} a step, {format_figures(rate)} tokens/s, MFU {mfu:.1%}"
    estimate = record.plan.estimate
    low_s, high_s = estimate.step_interval_80
    if estimate.untimed or not low_s:
        return text
    ratio = measured_s / estimate.step_s
    word = "slower" if ratio > 1 else "faster"
    place = "in" if low_s <= measured_s <= high_s else "outside of"
    return (
        # A factor above 1, whichever of the two is longer.
        f"{text}; {max(ratio, 1 / ratio):.2f} x {word} than predicted "
        f"({format_seconds(estimate.step_s)}), {place} its 80 % "
        f"({format_seconds(low_s)} to {format_seconds(high_s)})"
    )


def _describe_wall(findings: Sequence[Finding], waterfall: Waterfall | None) -> str:
    if not findings:
        return "none was found"
    first = findings[0]
    text = f"{first.wall} ({first.cause}): {first.title}"
    if waterfall is None or not waterfall.drops:
        return text
    largest = max(waterfall.drops, key=lambda drop: drop.seconds)
    share = largest.seconds / waterfall.measured_s
    return f"{text}; most of what is lost: {largest.name} {share:.0%} of the step"


def _describe_health(record: RunRecord, comparisons: Sequence[LedgerComparison]) -> str:
    skipped = sum(step.skipped for step in record.steps)
    parts = [f"{plural(skipped, 'step')} skipped" if skipped else "no step skipped"]
    count = len(record.incidents)
    parts.append(plural(count, "incident") if count else "no incident")
    if comparisons:
        parts.append("\n".join(describe_comparisons(comparisons)))
    return "; ".join(parts)


def describe_saved(checkpoint: Path | None, record: RunRecord, written: Sequence[Path]) -> str:
    """Say where the state of a run is, and what was written about it."""
    text = str(checkpoint) if checkpoint is not None else "no checkpoint"
    if record.copied_step >= 0:
        copy = mention("step {}", record.copied_step) or "none"
        text += f" (copy elsewhere: {copy})"
    return ", ".join((text, *map(str, written)))
