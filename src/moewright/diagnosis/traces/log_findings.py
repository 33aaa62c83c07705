"""Diagnosis of a run of which only the console log is available.

Findings come from what the log measured, and where it measured nothing, from the job's prediction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from moewright.diagnosis.priced_fixes import FixContext, Trainer, price_findings
from moewright.diagnosis.thresholds import (
    CAUSE_OF_PART,
    FRAGMENTED_SHARE,
    MEMORY_SHARE,
    order_findings,
)
from moewright.diagnosis.traces.megatron_log import MegatronLog, MemoryReport
from moewright.diagnosis.traces.megatron_timers import diagnose_timers
from moewright.diagnosis.waterfall import COMPUTE_PARTS
from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import Plan, TimePart, Verdict
from moewright.spec.units import format_bytes, format_seconds

_SPIKE = 1.5  # of the median step
_SPIKE_SHARE = 0.05  # of the steps: more often than checkpoints and evaluations explain
_MIN_STEPS = 10  # of which spikes can be told
_RECOMPUTE_SHARE = 0.1


def diagnose_log(
    log: MegatronLog, job: Plan | None, options: frozenset[str] = frozenset()
) -> tuple[Finding, ...]:
    """Return findings, the wall to work on first in front.

    There are none when neither the log nor a prediction has one; `job` is None where no job is
    known to predict from. `options` are those of the launch script, by name.
    """
    timed = tuple(diagnose_timers(log.timers, log.step_s))
    timed_causes = {finding.cause for finding in timed}
    predicted: list[Finding] = []
    if job is not None:
        predicted = [
            finding
            for finding in predict_findings(job, log.step_s)
            if finding.cause not in timed_causes
        ]
    findings = (*_diagnose_memory(log, job), *_diagnose_spikes(log), *timed, *predicted)
    context = FixContext(
        job=job, trainer=Trainer.MEGATRON, options=options or log.options, has_moe=log.has_experts
    )
    return price_findings(order_findings(findings), context)


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=())


def _diagnose_memory(log: MegatronLog, job: Plan | None) -> Iterator[Finding]:
    report = max(log.memory_reports, key=lambda report: report.peak_bytes, default=None)
    cause = Cause.CAPACITY
    evidence = []
    if report is not None:
        evidence.append(_describe_memory(report))
        unused_bytes = report.max_reserved_bytes - report.max_allocated_bytes
        if unused_bytes > FRAGMENTED_SHARE * report.peak_bytes:
            cause = Cause.FRAGMENTATION
    if log.failures:
        if job is not None:
            evidence.append(_describe_predicted_peak(job))
        failure = _describe_failures(log)
        yield _finding(Wall.MEMORY, cause, "Out of memory", 1.0, failure, *evidence)
    elif report is not None:
        capacity_bytes = round(job.hardware.device.memory_bytes.value) if job else 0
        if capacity_bytes and report.peak_bytes > MEMORY_SHARE * capacity_bytes:
            share = report.peak_bytes / capacity_bytes
            yield _finding(Wall.MEMORY, cause, f"Memory is {share:.0%} full", share, *evidence)
    elif job is not None and job.estimate.verdict is Verdict.OOM and not log.iterations:
        title = "The layout does not fit"
        yield _finding(Wall.MEMORY, cause, title, 1.0, _describe_predicted_peak(job))


def _describe_memory(report: MemoryReport) -> str:
    reserved = format_bytes(report.peak_bytes)
    allocated = format_bytes(report.max_allocated_bytes)
    return f"rank {report.rank} holds {reserved}, {allocated} of it given out at most (measured)"


def _describe_failures(log: MegatronLog) -> str:
    first = log.failures[0]
    size = f" of {format_bytes(first.requested_bytes)}" if first.requested_bytes else ""
    return f"an allocation{size} failed at line {first.line}, {len(log.failures)} in all (measured)"


def _describe_predicted_peak(job: Plan) -> str:
    prediction = job.estimate
    peak = format_bytes(prediction.peak_bytes)
    return (
        f"predicted peak {peak} of {format_bytes(prediction.capacity_bytes)}, "
        f"largest: {prediction.largest} (predicted)"
    )


def _diagnose_spikes(log: MegatronLog) -> Iterator[Finding]:
    """Report steps now and then far above the median: garbage collection, loading, other jobs."""
    steps_s = [iteration.step_s for iteration in log.steady_iterations]
    median_s = log.step_s
    spikes_s = [step_s for step_s in steps_s if step_s > _SPIKE * median_s]
    if len(steps_s) < _MIN_STEPS or len(spikes_s) <= max(1, _SPIKE_SHARE * len(steps_s)):
        return
    lost_share = sum(step_s - median_s for step_s in spikes_s) / sum(steps_s)
    title = f"{len(spikes_s)} of {len(steps_s)} steps take more than {_SPIKE:g} x the median"
    longest = format_seconds(max(steps_s))
    evidence = f"median {format_seconds(median_s)}, longest {longest} (measured)"
    yield _finding(Wall.HOST, Cause.GARBAGE_COLLECTION, title, lost_share, evidence)


def predict_findings(job: Plan, measured_s: float = 0.0) -> Iterator[Finding]:
    """Yield the shares of the predicted step, without fixes.

    They stand in for what was not timed in a run, or for a run that was not made.
    """
    prediction = job.estimate
    measured = f"measured step {format_seconds(measured_s)}, " if measured_s else ""
    basis = (
        f"{measured}predicted {format_seconds(prediction.step_s)}; "
        "the share is the planner's (predicted)"
    )
    seconds_of_cause: dict[Cause, float] = defaultdict(float)
    for part_share in prediction.shares:
        if part_share.part in CAUSE_OF_PART:
            seconds_of_cause[CAUSE_OF_PART[part_share.part]] += part_share.seconds
    for cause, seconds in seconds_of_cause.items():
        share = seconds / prediction.step_s
        title = f"{cause} is expected to expose {share:.0%} of the step"
        predicted = f"{format_seconds(seconds)} (predicted)"
        yield _finding(Wall.COMMUNICATION, cause, title, share, predicted, basis)
    shares = {
        part_share.part: part_share.seconds / prediction.step_s for part_share in prediction.shares
    }
    host = shares.get(TimePart.HOST, 0.0)
    title = f"Host work is expected to expose {host:.0%} of the step"
    yield _finding(Wall.HOST, Cause.LAUNCH, title, host, basis)
    recompute = shares.get(TimePart.RECOMPUTE, 0.0)
    if recompute > _RECOMPUTE_SHARE:
        title = f"Recompute is expected to take {recompute:.0%}"
        yield _finding(Wall.COMPUTE, Cause.RECOMPUTE, title, recompute, basis)
    compute = sum(shares.get(part, 0.0) for part in (*COMPUTE_PARTS, TimePart.ELEMENTWISE))
    title = f"Compute is expected to take {compute:.0%} of the step"
    yield _finding(Wall.COMPUTE, Cause.KERNEL_RATES, title, compute, basis)
