"""Which wall holds a run back of which only the console log is at hand: what it measured, beside
the prediction."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.diagnosis.priced_fixes import PricedJob, find_fixes
from moewright.diagnosis.thresholds import (
    CAUSE_OF_PART,
    FRAGMENTED_SHARE,
    MEMORY_SHARE,
    order_findings,
)
from moewright.diagnosis.traces.megatron_log import MegatronLog
from moewright.diagnosis.traces.megatron_timers import diagnose_timers
from moewright.diagnosis.waterfall import COMPUTE_PARTS
from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import TimePart, Verdict
from moewright.spec.units import format_bytes, format_seconds

_SPIKE = 1.5  # of the median step
_SPIKES = 0.05  # of the steps: more often than checkpoints and evaluations explain


def diagnose_log(log: MegatronLog, job: PricedJob | None) -> tuple[Finding, ...]:
    """The wall to work on first in front; () when neither the log nor the prediction tells one."""
    measured = tuple(diagnose_timers(log.timers, log.step_s))
    said = {each.cause for each in measured}
    unmeasured = predict_findings(job, log.step_s) if job is not None else ()
    found = (
        *_memory(log, job),
        *_uneven(log),
        *measured,
        *(each for each in unmeasured if each.cause not in said),
    )
    priced = (
        Finding(
            wall=f.wall,
            cause=f.cause,
            title=f.title,
            share=f.share,
            evidence=f.evidence,
            fixes=find_fixes(f.cause, job),
        )
        for f in found
    )
    return order_findings(priced)


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=())


def _memory(log: MegatronLog, known: PricedJob | None) -> Iterator[Finding]:
    capacity = max((each.capacity_bytes for each in log.failures), default=0)
    capacity = capacity or (round(known.hardware.device.memory_bytes.value) if known else 0)
    peak = max(
        log.memory_reports,
        key=lambda each: each.max_reserved_bytes or each.max_allocated_bytes,
        default=None,
    )
    evidence = []
    cause = Cause.CAPACITY
    if peak is not None:
        held = peak.max_reserved_bytes or peak.max_allocated_bytes
        text = f"rank {peak.rank} holds {format_bytes(held)}, {format_bytes(peak.max_allocated_bytes)} of it given out at most"
        evidence.append(f"{text} (measured)")
        if peak.max_reserved_bytes - peak.max_allocated_bytes > FRAGMENTED_SHARE * held:
            cause = Cause.FRAGMENTATION
    if log.failures:
        first = log.failures[0]
        wanted = f" of {format_bytes(first.requested_bytes)}" if first.requested_bytes else ""
        line = f"an allocation{wanted} failed at line {first.line}, {len(log.failures)} in all (measured)"
        evidence.insert(0, line)
        if known is not None:
            evidence.append(_expected(known))
        yield _finding(Wall.MEMORY, cause, "Out of memory", 1.0, *evidence)
    elif peak is not None and capacity and held > MEMORY_SHARE * capacity:
        share = held / capacity
        yield _finding(Wall.MEMORY, cause, f"Memory is {share:.0%} full", share, *evidence)
    elif (
        known is not None
        and known.estimate.verdict is Verdict.OOM
        and peak is None
        and not log.iterations
    ):
        yield _finding(Wall.MEMORY, cause, "The layout does not fit", 1.0, _expected(known))


def _expected(known: PricedJob) -> str:
    found = known.estimate
    return (
        f"predicted peak {format_bytes(found.peak_bytes)} of {format_bytes(found.capacity_bytes)}, "
        f"largest: {found.largest} (predicted)"
    )


def _uneven(log: MegatronLog) -> Iterator[Finding]:
    """Steps now and then far above the median: garbage collection, loading, other jobs."""
    steps = [each.step_s for each in log.steady_iterations]
    typical = log.step_s
    spikes = [step for step in steps if step > _SPIKE * typical]
    if len(steps) >= 10 and len(spikes) > max(1, _SPIKES * len(steps)):
        lost = sum(step - typical for step in spikes) / sum(steps)
        title = f"{len(spikes)} of {len(steps)} steps take more than {_SPIKE:g} x the median"
        seen = f"median {format_seconds(typical)}, longest {format_seconds(max(steps))} (measured)"
        yield _finding(Wall.HOST, Cause.GARBAGE_COLLECTION, title, lost, seen)


def predict_findings(job: PricedJob, measured_s: float = 0.0) -> Iterator[Finding]:
    """Shares of the predicted step, without fixes: what nobody timed in a run, or where there is
    none."""
    found = job.estimate
    measured = f"measured step {format_seconds(measured_s)}, " if measured_s else ""
    beside = f"{measured}predicted {format_seconds(found.step_s)}; the share is the planner's (predicted)"
    causes: dict[Cause, float] = {}
    for share in found.shares:
        if share.part in CAUSE_OF_PART:
            causes[CAUSE_OF_PART[share.part]] = (
                causes.get(CAUSE_OF_PART[share.part], 0.0) + share.seconds
            )
    for cause, seconds in causes.items():
        part = seconds / found.step_s
        title = f"{cause} is expected to expose {part:.0%} of the step"
        yield _finding(
            Wall.COMMUNICATION, cause, title, part, f"{format_seconds(seconds)} (predicted)", beside
        )
    parts = {share.part: share.seconds / found.step_s for share in found.shares}
    host = parts.get(TimePart.HOST, 0.0)
    yield _finding(
        Wall.HOST,
        Cause.LAUNCH,
        f"Host work is expected to expose {host:.0%} of the step",
        host,
        beside,
    )
    if (replayed := parts.get(TimePart.RECOMPUTE, 0.0)) > 0.1:
        yield _finding(
            Wall.COMPUTE,
            Cause.RECOMPUTE,
            f"Recompute is expected to take {replayed:.0%}",
            replayed,
            beside,
        )
    work = sum(parts.get(part, 0.0) for part in (*COMPUTE_PARTS, TimePart.ELEMENTWISE))
    yield _finding(
        Wall.COMPUTE,
        Cause.KERNEL_RATES,
        f"Compute is expected to take {work:.0%} of the step",
        work,
        beside,
    )
