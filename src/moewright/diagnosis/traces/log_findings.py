"""Diagnosis of a run of which only the console log is available.

Findings come from what the log measured, and where it measured nothing, from the job's prediction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import ceil, floor, log2
from statistics import median

from moewright.diagnosis.priced_fixes import FixContext, Trainer, price_findings
from moewright.diagnosis.thresholds import (
    CAUSE_OF_PART,
    FRAGMENTED_SHARE,
    MEMORY_SHARE,
    order_findings,
)
from moewright.diagnosis.traces.megatron_log import MegatronLog, MemoryReport
from moewright.diagnosis.traces.megatron_timers import FORWARD_BACKWARD, diagnose_timers
from moewright.diagnosis.waterfall import COMPUTE_PARTS, peak_flops
from moewright.spec.errors import BadInput, Reason
from moewright.spec.finding import Cause, Finding, Wall, Waterfall
from moewright.spec.plan import Plan, TimePart, Verdict
from moewright.spec.units import TERA, format_bytes, format_given, format_seconds, mention
from moewright.spec.workload import NARROW_FORMATS

_SPIKE = 1.5  # of the median step
_SPIKE_SHARE = 0.05  # of the steps: more often than checkpoints and evaluations explain
_MIN_STEPS = 10  # of which spikes can be told
_RECOMPUTE_SHARE = 0.1
_GROWTH = 1.2  # of the steps' first third over the last
_UNEXPLAINED_SHARE = 0.25  # of the measured step
_OTHER_FLOPS = 1.6  # times ours: more than conventions of counting differ by
TRACE_COMMAND = (
    "--profile --use-pytorch-profiler --profile-step-start 10 --profile-step-end 12 "
    "--profile-ranks 0 --tensorboard-dir DIR, then moewright diagnose DIR"
)


def diagnose_log(
    log: MegatronLog, job: Plan | None, options: frozenset[str] = frozenset()
) -> tuple[Finding, ...]:
    """Return findings, the wall to work on first in front.

    There are none when neither the log nor a prediction has one; `job` is None where no job is
    known to predict from. `options` are those of the launch script, by name.
    """
    context = FixContext(
        job=job,
        trainer=Trainer.MEGATRON,
        options=options or log.options,
        has_moe=bool(log.has_experts),
    )
    return price_findings(find_log_walls(log, job), context)


def find_log_walls(log: MegatronLog, job: Plan | None) -> tuple[Finding, ...]:
    """Return the findings of a log without fixes, the wall to work on first in front."""
    timed = tuple(diagnose_timers(log.timers, log.step_s))
    timed_causes = {finding.cause for finding in timed}
    predicted: list[Finding] = []
    if job is not None:
        predicted = [
            finding
            for finding in predict_findings(job, log.step_s)
            if finding.cause not in timed_causes
        ]
    findings = (
        *_diagnose_memory(log, job),
        *_diagnose_growth(log),
        *_diagnose_spikes(log),
        *timed,
        *predicted,
    )
    return order_findings(findings)


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
    size = mention(" of {}", format_given(first.requested_bytes, format_bytes))
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


def _diagnose_growth(log: MegatronLog) -> Iterator[Finding]:
    """Report steps that take longer and longer while the batch stays as it is."""
    steps_s = log.steps_s
    third = len(steps_s) // 3
    batches = {iteration.global_batch for iteration in log.iterations}
    if len(steps_s) < _MIN_STEPS or len(batches) > 1:
        return
    # Warm-up is slow, and so cannot be taken for growth.
    thirds = (steps_s[:third], steps_s[third : 2 * third], steps_s[-third:])
    early_s, middle_s, late_s = map(median, thirds)
    if not _GROWTH * early_s < late_s or not early_s < middle_s < late_s:
        return
    lost_share = 1 - early_s * len(steps_s) / sum(steps_s)
    levels = ", ".join(map(format_seconds, (early_s, middle_s, late_s)))
    evidence = [f"medians of the first, middle and last third: {levels} (measured)"]
    if timer := _growing_timer(log):
        evidence.append(timer)
    title = f"Steps grow to {late_s / early_s:.1f} x their length"
    yield _finding(Wall.HOST, Cause.GROWING, title, max(0.0, lost_share), *evidence)


def _growing_timer(log: MegatronLog) -> str:
    """Name the timer that grows most; "" without timers."""
    blocks = log.timer_blocks
    if len(blocks) < _MIN_STEPS:
        return ""
    growth_s = {
        name: blocks[-1][name].max_s - blocks[0][name].max_s
        for name in blocks[0]
        if name in blocks[-1] and name != FORWARD_BACKWARD
    }
    if not growth_s:
        return ""
    name = max(growth_s, key=lambda timer: growth_s[timer])
    first, last = (format_seconds(block[name].max_s) for block in (blocks[0], blocks[-1]))
    return f"{name} grows most, from {first} to {last} (measured)"


def describe_gap(waterfall: Waterfall | None, job: Plan | None) -> str:
    """Say that a run is much slower than its plan where nothing measured says why; else ""."""
    if waterfall is None or job is None:
        return ""
    unexplained_s = waterfall.drops[-1].seconds
    if unexplained_s <= _UNEXPLAINED_SHARE * waterfall.measured_s:
        return ""
    times = waterfall.measured_s / job.estimate.step_s
    share = unexplained_s / waterfall.measured_s
    return (
        f"{times:.1f} x slower than the plan: the log cannot say where {share:.0%} of the step "
        f"goes; take a trace: {TRACE_COMMAND}"
    )


# What a log prints of its job, and what a job says of the same. The values of a log are whole
# numbers, or "None" where the trainer was not told.
_LOGGED: tuple[tuple[str, str, Callable[[Plan], int]], ...] = (
    ("world_size", "--on", lambda job: job.layout.world_size),
    ("seq_length", "--seq-len", lambda job: job.workload.seq_len),
    ("global_batch_size", "--global-batch", lambda job: job.workload.global_batch),
    ("micro_batch_size", "layout.mbs", lambda job: job.layout.mbs),
    ("tensor_model_parallel_size", "layout.tp", lambda job: job.layout.tp),
    ("pipeline_model_parallel_size", "layout.pp", lambda job: job.layout.pp),
    ("context_parallel_size", "layout.cp", lambda job: job.layout.cp),
    ("expert_model_parallel_size", "layout.ep", lambda job: job.layout.ep),
    ("num_layers", "--model", lambda job: job.model.layers),
    ("hidden_size", "--model", lambda job: job.model.hidden_size),
)


def check_logged_job(log: MegatronLog, job: Plan, *, source: str) -> None:
    """Refuse a job that a log contradicts: what it ran is what its lines and arguments say.

    `source` is where the job comes from, in words.

    Raises:
        BadInput: a reason for each value that differs.
    """
    reasons = []
    for name, field, read in _LOGGED:
        logged, stated = log.find_size(name), read(job)
        if logged is not None and logged != stated:
            rule = f"the log's {name} is {logged}, {source} says {stated}"
            reasons.append(Reason(field=field, value=str(stated), rule=rule, nearest=str(logged)))
    if not reasons:
        reasons = list(_find_too_much_work(log, job))
    if reasons:
        raise BadInput(*reasons)


def _find_too_much_work(log: MegatronLog, job: Plan) -> Iterator[Reason]:
    """Yield what is wrong where the job's FLOPs are more than its devices can do in a logged step.

    It is the batch, which else the log would have stated, the precision, or the devices.
    """
    estimate = job.estimate
    if not log.step_s or estimate.untimed:
        return
    mfu = estimate.mfu * estimate.step_s / log.step_s
    if mfu <= 1:
        return
    rule = (
        f"the log's step of {format_seconds(log.step_s)} would be an MFU of {mfu:.0%}, where no"
        f" device reaches 100%"
    )
    if log.find_size("global_batch_size") is not None:
        if narrower := _find_narrower(job, mfu):
            precision = job.workload.precision
            yield Reason(
                field="--precision",
                value=precision,
                rule=f"{rule} in {precision}",
                nearest=narrower,
            )
            return
        count = job.layout.world_size
        nearest = f"{ceil(count * mfu)} devices or more"
        yield Reason(field="--on", value=str(count), rule=rule, nearest=nearest)
    else:
        batch = job.workload.global_batch
        nearest = f"the run's own, at most {floor(batch / mfu)}"
        yield Reason(field="--global-batch", value=str(batch), rule=rule, nearest=nearest)


def _find_narrower(job: Plan, mfu: float) -> str:
    """Return the slowest of the narrow precisions in which the job could be as fast, or ""."""
    peak = peak_flops(job.hardware, job.workload.precision)
    fast_enough = [
        (rate, dtype)
        for dtype in NARROW_FORMATS
        if peak and (rate := peak_flops(job.hardware, dtype)) >= mfu * peak
    ]
    return min(fast_enough)[1] if fast_enough else ""


def compare_flops(log: MegatronLog, job: Plan | None) -> str:
    """Say where the trainer counts far more or fewer FLOPs than the job as described; else ""."""
    if job is None or not log.tflops_per_device or not log.step_s:
        return ""
    counted = log.tflops_per_device * TERA * job.layout.world_size * log.step_s
    ratio = counted / job.estimate.model_flops_per_step
    if 1 / _OTHER_FLOPS < ratio < _OTHER_FLOPS:
        return ""
    seq_len = job.workload.seq_len
    nearest = seq_len * 2 ** round(log2(ratio))
    text = f"the trainer counts {ratio:.2g} x the FLOPs of the job as described"
    if nearest != seq_len:
        text += f": as if sequences were {nearest:,} tokens long, not {seq_len:,}"
    return f"{text}; what follows is of the job as described"


def suggest_switches(log: MegatronLog) -> str:
    """Say what to switch on for a log that tells more; "" where all of it is on."""
    if log.sizes:
        return ""  # they are Megatron-LM's
    wanted = []
    if not log.timers:
        wanted.append("--timing-log-level 2 (the parts of a step)")
    if log.iterations and not log.tflops_per_device:
        wanted.append("--log-throughput (the rate)")
    if not log.memory_reports:
        wanted.append("--log-memory-interval 10 (the room left)")
    if not wanted:
        return ""
    return (
        f"for a log that tells more: {', '.join(wanted)}; for all of it, a trace: {TRACE_COMMAND}"
    )


def predict_findings(job: Plan, measured_s: float = 0.0) -> Iterator[Finding]:
    """Yield the shares of the predicted step, without fixes.

    They stand in for what was not timed in a run, or for a run that was not made.
    """
    prediction = job.estimate
    measured = mention("measured step {}, ", format_given(measured_s, format_seconds))
    basis = f"{measured}predicted {format_seconds(prediction.step_s)} (predicted)"
    # A part is what was predicted of a slower run, and the same share of a faster one.
    whole_s = max(measured_s, prediction.step_s)
    seconds_of_cause: dict[Cause, float] = defaultdict(float)
    for part_share in prediction.shares:
        if part_share.part in CAUSE_OF_PART:
            seconds_of_cause[CAUSE_OF_PART[part_share.part]] += part_share.seconds
    for cause, seconds in seconds_of_cause.items():
        share = seconds / whole_s
        title = f"{cause} is expected to expose {share:.0%} of the step"
        predicted = f"{format_seconds(seconds)} (predicted)"
        yield _finding(Wall.COMMUNICATION, cause, title, share, predicted, basis)
    shares = {part_share.part: part_share.seconds / whole_s for part_share in prediction.shares}
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
