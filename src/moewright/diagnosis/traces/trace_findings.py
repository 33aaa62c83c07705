"""Diagnosis of a traced run: the walls that hold it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from moewright.diagnosis.priced_fixes import FixContext, Trainer, price_findings
from moewright.diagnosis.thresholds import FRAGMENTED_SHARE, MEMORY_SHARE, order_findings
from moewright.diagnosis.traces.breakdown import Breakdown, CopyTime
from moewright.diagnosis.traces.capture import KernelKind, TrainerMark
from moewright.diagnosis.traces.comm_classes import CAUSE_OF_CLASS, CommClass
from moewright.diagnosis.traces.gaps import Gap, IdleCause
from moewright.diagnosis.traces.rank_skew import RankSkew, mean_idle_s, measure_comm
from moewright.diagnosis.traces.trace_waterfall import PeakRate
from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import Plan
from moewright.spec.units import GB, TERA, divide, format_bytes, format_seconds, plural

_MIN_SHARE = 0.03  # of the step: smaller causes are left to the table
_RECOMPUTE_SHARE = 0.10
_LOW_RATE = 0.55  # of the peak, which large products of current devices pass
# Rows an expert below which a grouped product is far from its best rate (docs/formulas.md 11).
_FEW_ROWS = 256
_NAME_WIDTH = 72
_HOST_COPY = re.compile(r"HtoD|DtoH|HtoH|memcpy$", re.IGNORECASE)
_SHOWN_GAPS = 3
_SHOWN_COPIES = 3
_MAIN_SHARE = 0.5  # of late waiting that the dispatch and the excess compute must explain

_CAUSE_OF_IDLE: Mapping[IdleCause, Cause] = {
    IdleCause.DATA: Cause.DATA,
    IdleCause.GC: Cause.GARBAGE_COLLECTION,
    IdleCause.SYNC: Cause.SYNC,
    IdleCause.LAUNCH: Cause.LAUNCH,
    IdleCause.HOST: Cause.HOST_OTHER,
    IdleCause.DEVICE: Cause.QUEUED,
    IdleCause.UNKNOWN: Cause.HOST_OTHER,
}


def diagnose_traces(
    breakdowns: Sequence[Breakdown],
    skew: RankSkew | None,
    job: Plan | None,
    peak: PeakRate,
    options: frozenset[str] = frozenset(),
) -> tuple[Finding, ...]:
    """Return findings, the wall to work on first in front; never empty.

    `options` are those of the launch script, by name; it is empty where there is none.
    """
    step_s = fmean(breakdown.step_s for breakdown in breakdowns)
    findings = (
        *_diagnose_memory(breakdowns),
        *_diagnose_communication(breakdowns, skew, step_s),
        *_diagnose_skew(breakdowns, skew, step_s),
        *_diagnose_host(breakdowns, step_s),
        *_diagnose_copies(breakdowns, step_s),
    )
    compute = tuple(_diagnose_compute(breakdowns, step_s, peak))
    # What takes next to nothing is told only where nothing else is.
    told = tuple(finding for finding in compute if finding.share >= _MIN_SHARE or not findings)
    findings = (*findings, *told)
    return price_findings(order_findings(findings), _fix_context(breakdowns, job, options))


def _fix_context(
    breakdowns: Sequence[Breakdown], job: Plan | None, options: frozenset[str]
) -> FixContext:
    marks = tuple(dict.fromkeys(mark for rank in breakdowns for mark in rank.trainer_marks))
    is_megatron = bool(options) or TrainerMark.MEGATRON in marks
    return FixContext(
        job=job,
        trainer=Trainer.MEGATRON if is_megatron else Trainer.UNKNOWN,
        options=options,
        marks=marks,
        has_moe=TrainerMark.MOE in marks,
    )


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=())


def _diagnose_memory(breakdowns: Sequence[Breakdown]) -> Iterator[Finding]:
    fullest = max(breakdowns, key=lambda breakdown: breakdown.reserved_bytes)
    reserved_bytes = fullest.reserved_bytes
    if not fullest.memory_bytes or reserved_bytes <= MEMORY_SHARE * fullest.memory_bytes:
        return
    share = reserved_bytes / fullest.memory_bytes
    unused_bytes = reserved_bytes - fullest.allocated_bytes
    is_fragmented = unused_bytes > FRAGMENTED_SHARE * reserved_bytes
    cause = Cause.FRAGMENTATION if is_fragmented else Cause.CAPACITY
    memory = format_bytes(fullest.memory_bytes)
    evidence = (
        f"rank {fullest.rank}: allocator holds {format_bytes(reserved_bytes)} of {memory}, "
        f"{format_bytes(fullest.allocated_bytes)} of it given out (measured)"
    )
    yield _finding(Wall.MEMORY, cause, f"Memory is {share:.0%} full", share, evidence)


def _diagnose_communication(
    breakdowns: Sequence[Breakdown], skew: RankSkew | None, step_s: float
) -> Iterator[Finding]:
    for comm in CommClass:
        measured = measure_comm(breakdowns, skew, comm)
        share = measured.own_s / step_s
        if measured.own_s < _MIN_SHARE * step_s:
            continue
        exposed = format_seconds(measured.exposed_s)
        busy = format_seconds(measured.busy_s)
        evidence = [
            f"{exposed} a step exposed of {busy} in "
            f"{plural(measured.calls, 'call')} (measured, unions)",
            f"told as {comm} by: {'; '.join(measured.evidence)}",
        ]
        if measured.waiting_s:
            waiting = format_seconds(measured.waiting_s)
            evidence.append(
                f"{waiting} of it, left out here, is waiting for the last rank (measured)"
            )
        evidence += _describe_exposed(breakdowns, comm)
        title = f"{comm} communication is exposed for {share:.0%} of the step"
        yield _finding(Wall.COMMUNICATION, CAUSE_OF_CLASS[comm], title, share, *evidence)


def _diagnose_skew(
    breakdowns: Sequence[Breakdown], skew: RankSkew | None, step_s: float
) -> Iterator[Finding]:
    """Report ranks that wait for each other: for a hot expert rank, else for a late one."""
    if skew is None:
        return
    waiting_s = {waiting.comm: waiting.median_s for waiting in skew.waiting}
    late_s = sum(waiting_s.values())
    if late_s <= _MIN_SHARE * step_s:
        return
    mean_compute_s = fmean(breakdown.compute_s for breakdown in breakdowns)
    excess_s = (skew.compute_max_over_mean - 1) * mean_compute_s
    at_dispatch = waiting_s.get(CommClass.EP, 0.0) > _MAIN_SHARE * late_s
    wall = Wall.COMMUNICATION
    cause = Cause.STRAGGLER
    if at_dispatch and excess_s > _MAIN_SHARE * late_s:
        wall = Wall.COMPUTE
        cause = Cause.IMBALANCE
    evidence = (
        f"rank {skew.slowest_rank} computes longest, "
        f"{skew.compute_max_over_mean:.2f} x the mean (measured)"
    )
    title = f"Ranks wait {late_s / step_s:.0%} of the step for each other"
    yield _finding(wall, cause, title, min(1.0, late_s / step_s), evidence)


def _diagnose_host(breakdowns: Sequence[Breakdown], step_s: float) -> Iterator[Finding]:
    for idle_cause, cause in _CAUSE_OF_IDLE.items():
        idle_s = mean_idle_s(breakdowns, idle_cause)
        if idle_s < _MIN_SHARE * step_s:
            continue
        evidence = [f"{format_seconds(idle_s)} a step (measured gaps between device work)"]
        if idle_cause is IdleCause.LAUNCH:
            launches = fmean(breakdown.kernel_launches for breakdown in breakdowns)
            short_share = fmean(breakdown.short_kernel_share for breakdown in breakdowns)
            evidence.append(
                f"{plural(launches, 'launch')} a step, {short_share:.0%} of the kernels shorter "
                "than 10 us (measured)"
            )
        if idle_cause is IdleCause.UNKNOWN:
            evidence.append("the trace holds no launches, so the gaps have no finer cause")
        reason = str(idle_cause)
        if idle_cause is IdleCause.DEVICE:
            reason = "work is queued, and waits"
            evidence.append(
                "the host launched what follows in time: it waited for an event, for another "
                "process or device, or for work that the trace does not show"
            )
        evidence += _describe_gaps(breakdowns, idle_cause)
        title = f"The device is idle for {idle_s / step_s:.0%} of the step: {reason}"
        yield _finding(Wall.HOST, cause, title, idle_s / step_s, *evidence)


def _describe_gaps(breakdowns: Sequence[Breakdown], cause: IdleCause) -> Iterator[str]:
    """Describe the longest gaps of a cause, with the times at which a viewer shows them."""
    gaps = [(breakdown, gap) for breakdown in breakdowns for gap in breakdown.worst_gaps]
    chosen = sorted((pair for pair in gaps if pair[1].cause is cause), key=_gap_seconds)
    for breakdown, gap in chosen[:_SHOWN_GAPS]:
        after_s = gap.start_s - breakdown.first_s
        text = f"{format_seconds(gap.seconds)} without work from {after_s:.6f} s on"
        if len(breakdowns) > 1:
            text += f", rank {breakdown.rank}"
        if gap.filler:
            text += f", filled by {shorten(gap.filler)}"
        if gap.next_kernel:
            text += f", ended by {shorten(gap.next_kernel)}"
        yield f"{text} (measured)"


def _describe_exposed(breakdowns: Sequence[Breakdown], comm: CommClass) -> Iterator[str]:
    """Describe the longest exposed spans of a class, with the times at which a viewer has them."""
    spans = [
        (seconds, start_s - breakdown.first_s, breakdown.rank)
        for breakdown in breakdowns
        for time in breakdown.comm_times
        if time.comm is comm
        for start_s, seconds in time.longest
    ]
    for seconds, after_s, rank in sorted(spans, key=lambda span: -span[0])[:_SHOWN_GAPS]:
        where = f", rank {rank}" if len(breakdowns) > 1 else ""
        yield f"{format_seconds(seconds)} exposed from {after_s:.6f} s on{where} (measured)"


def _gap_seconds(pair: tuple[Breakdown, Gap]) -> float:
    return -pair[1].seconds


def shorten(name: str) -> str:
    """Return a name of a kernel or a frame in a length that a line holds."""
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"


def _diagnose_copies(breakdowns: Sequence[Breakdown], step_s: float) -> Iterator[Finding]:
    copies_s = fmean(breakdown.copies_s for breakdown in breakdowns)
    if copies_s < _MIN_SHARE * step_s:
        return
    times = [time for breakdown in breakdowns for time in breakdown.copy_times]
    of_host = [time for time in times if _HOST_COPY.search(time.name)]
    of_device = [time for time in times if not _HOST_COPY.search(time.name)]
    for wall, cause, group in (
        (Wall.HOST, Cause.COPIES, of_host),
        (Wall.COMPUTE, Cause.DEVICE_COPIES, of_device),
    ):
        exposed_s = min(copies_s, sum(time.exposed_s for time in group) / len(breakdowns))
        if exposed_s < _MIN_SHARE * step_s:
            continue
        share = exposed_s / step_s
        where = "between host and device" if wall is Wall.HOST else "within the device"
        title = f"Copies {where} take {share:.0%} of the step, overlapped with nothing"
        evidence = (
            f"{format_seconds(exposed_s)} a step in which nothing else runs (measured, unions)",
            *_describe_copies(group),
        )
        yield _finding(wall, cause, title, share, *evidence)


def _describe_copies(times: Sequence[CopyTime]) -> Iterator[str]:
    longest = sorted(times, key=lambda time: -time.exposed_s)
    for time in longest[:_SHOWN_COPIES]:
        text = f"{time.name}: {format_seconds(time.busy_s)} in {plural(time.calls, 'call')}"
        if time.bytes and time.busy_s:
            rate = time.bytes / time.busy_s / GB
            text += f", {format_bytes(round(time.bytes))} at {rate:.1f} GB/s"
        yield f"{text} (measured)"


def _diagnose_compute(
    breakdowns: Sequence[Breakdown], step_s: float, peak: PeakRate
) -> Iterator[Finding]:
    compute_s = fmean(breakdown.compute_s for breakdown in breakdowns)
    recompute_s = fmean(breakdown.recompute_s for breakdown in breakdowns)
    if recompute_s > _RECOMPUTE_SHARE * step_s:
        title = f"Recompute takes {recompute_s / step_s:.0%} of the step"
        inside = f"{format_seconds(recompute_s)} a step inside checkpoints' backward (measured)"
        yield _finding(Wall.COMPUTE, Cause.RECOMPUTE, title, recompute_s / step_s, inside)
    evidence = [f"{_describe_kinds(breakdowns)} a step (measured, each kind's union)"]
    title = f"Compute takes {compute_s / step_s:.0%} of the step"
    rate = _known_matrix_rate(breakdowns)
    if rate and peak.flops:
        rate_share = rate / peak.flops
        evidence.append(
            f"products with known shapes run at {rate / TERA:.0f} TFLOP/s, "
            f"{rate_share:.0%} of {peak.note}"
        )
        if rate < _LOW_RATE * peak.flops:
            title += f", at {rate_share:.0%} of the peak rate"
    cause = Cause.KERNEL_RATES
    grouped = breakdowns[0].grouped_rows
    if grouped:
        rows = grouped.rows / max(1, grouped.experts)
        evidence.append(
            f"{plural(rows, 'row')} an expert and call over "
            f"{plural(grouped.experts, 'expert')} (measured)"
        )
        if rows < _FEW_ROWS:
            cause = Cause.FEW_ROWS
    yield _finding(Wall.COMPUTE, cause, title, compute_s / step_s, *evidence)


def _describe_kinds(breakdowns: Sequence[Breakdown]) -> str:
    seconds_of_kind = {
        kind: fmean(dict(breakdown.kind_times).get(kind, 0.0) for breakdown in breakdowns)
        for kind in KernelKind
    }
    return ", ".join(
        f"{kind} {format_seconds(seconds)}" for kind, seconds in seconds_of_kind.items() if seconds
    )


def _known_matrix_rate(breakdowns: Sequence[Breakdown]) -> float:
    """Return the FLOP/s of the products whose shapes are known; 0: none are."""
    seconds = sum(breakdown.known_matrix_s for breakdown in breakdowns)
    flops = sum(breakdown.known_matrix_flops for breakdown in breakdowns)
    return divide(flops, seconds)
