"""Which wall holds a run back of which only the console log is at hand: what it measured, beside
the prediction."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.diagnosis.priced_fixes import Known, fixes_for
from moewright.diagnosis.thresholds import MEMORY_SHARE, RESERVED_OVER, WAITS_FOR, ordered
from moewright.diagnosis.traces.megatron_log import MegatronLog
from moewright.diagnosis.traces.timers import timed
from moewright.diagnosis.waterfall import WORKING
from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import TimePart, Verdict
from moewright.spec.units import show_bytes, show_seconds

_SPIKE = 1.5  # of the median step
_SPIKES = 0.05  # of the steps: more often than checkpoints and evaluations explain


def findings(log: MegatronLog, known: Known | None) -> tuple[Finding, ...]:
    """The wall to work on first in front; () when neither the log nor the prediction tells one."""
    measured = tuple(timed(log.timers, log.step_s))
    said = {each.cause for each in measured}
    unmeasured = expected(known, log.step_s) if known is not None else ()
    found = (
        *_memory(log, known),
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
            fixes=fixes_for(f.cause, known),
        )
        for f in found
    )
    return ordered(priced)


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=())


def _memory(log: MegatronLog, known: Known | None) -> Iterator[Finding]:
    capacity = max((each.capacity_bytes for each in log.failures), default=0)
    capacity = capacity or (round(known.hardware.device.memory_bytes.value) if known else 0)
    peak = max(
        log.memory,
        key=lambda each: each.max_reserved_bytes or each.max_allocated_bytes,
        default=None,
    )
    evidence = []
    cause = Cause.CAPACITY
    if peak is not None:
        held = peak.max_reserved_bytes or peak.max_allocated_bytes
        text = f"rank {peak.rank} holds {show_bytes(held)}, {show_bytes(peak.max_allocated_bytes)} of it given out at most"
        evidence.append(f"{text} (measured)")
        if peak.max_reserved_bytes - peak.max_allocated_bytes > RESERVED_OVER * held:
            cause = Cause.FRAGMENTATION
    if log.failures:
        first = log.failures[0]
        wanted = f" of {show_bytes(first.wanted_bytes)}" if first.wanted_bytes else ""
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


def _expected(known: Known) -> str:
    found = known.estimate
    return (
        f"predicted peak {show_bytes(found.peak_bytes)} of {show_bytes(found.capacity_bytes)}, "
        f"largest: {found.largest} (predicted)"
    )


def _uneven(log: MegatronLog) -> Iterator[Finding]:
    """Steps now and then far above the median: garbage collection, loading, other jobs."""
    steps = [each.step_s for each in log.settled]
    typical = log.step_s
    spikes = [step for step in steps if step > _SPIKE * typical]
    if len(steps) >= 10 and len(spikes) > max(1, _SPIKES * len(steps)):
        lost = sum(step - typical for step in spikes) / sum(steps)
        title = f"{len(spikes)} of {len(steps)} steps take more than {_SPIKE:g} x the median"
        seen = f"median {show_seconds(typical)}, longest {show_seconds(max(steps))} (measured)"
        yield _finding(Wall.HOST, Cause.COLLECTING, title, lost, seen)


def expected(known: Known, measured_s: float = 0.0) -> Iterator[Finding]:
    """Shares of the predicted step, without fixes: what nobody timed in a run, or where there is
    none."""
    found = known.estimate
    measured = f"measured step {show_seconds(measured_s)}, " if measured_s else ""
    beside = (
        f"{measured}predicted {show_seconds(found.step_s)}; the share is the planner's (predicted)"
    )
    causes: dict[Cause, float] = {}
    for share in found.shares:
        if share.part in WAITS_FOR:
            causes[WAITS_FOR[share.part]] = causes.get(WAITS_FOR[share.part], 0.0) + share.seconds
    for cause, seconds in causes.items():
        part = seconds / found.step_s
        title = f"{cause} is expected to expose {part:.0%} of the step"
        yield _finding(
            Wall.COMMUNICATION, cause, title, part, f"{show_seconds(seconds)} (predicted)", beside
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
    work = sum(parts.get(part, 0.0) for part in (*WORKING, TimePart.ELEMENTWISE))
    yield _finding(
        Wall.COMPUTE,
        Cause.RATES,
        f"Compute is expected to take {work:.0%} of the step",
        work,
        beside,
    )
