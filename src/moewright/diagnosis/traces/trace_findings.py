"""Which wall holds a traced run back, with the evidence, and the waterfall of its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from moewright.diagnosis.priced_fixes import PricedJob, find_fixes
from moewright.diagnosis.thresholds import FRAGMENTED_SHARE, MEMORY_SHARE, order_findings
from moewright.diagnosis.traces.breakdown import Breakdown, IdleCause
from moewright.diagnosis.traces.capture import KernelKind
from moewright.diagnosis.traces.comm_classes import CAUSE_OF_CLASS, CommClass
from moewright.diagnosis.traces.rank_skew import RankSkew
from moewright.diagnosis.waterfall import (
    BELOW_PEAK,
    close_waterfall,
    describe_ideal_step,
    ideal_step_s,
    peak_flops,
)
from moewright.intake import devices as catalogue
from moewright.rules.micro_batches import micro_batches
from moewright.spec.finding import Basis, Cause, Finding, Wall, Waterfall, WaterfallDrop
from moewright.spec.plan import TimePart
from moewright.spec.units import TERA, format_bytes, format_seconds
from moewright.spec.workload import Dtype

_SAID = 0.03  # of the step: smaller causes are left to the table
_REPLAYED = 0.10
_LOW_RATE = 0.55  # of the peak, which large products of current devices pass
# rows an expert below which a grouped product is far from its best rate (docs/formulas.md 11)
_FEW_ROWS = 256

_IDLES: Mapping[IdleCause, Cause] = {
    IdleCause.DATA: Cause.DATA,
    IdleCause.GC: Cause.GARBAGE_COLLECTION,
    IdleCause.SYNC: Cause.SYNC,
    IdleCause.LAUNCH: Cause.LAUNCH,
    IdleCause.UNKNOWN: Cause.HOST_OTHER,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPeak:
    """FLOP/s of the device, and where the figure is from; 0: not known."""

    flops: float
    note: str


def find_peak_rate(parts: Sequence[Breakdown], known: PricedJob | None) -> MatrixPeak:
    """Of the job's hardware file, else of the part that the trace names, in bf16."""
    if known is not None:
        precision = known.workload.precision
        return MatrixPeak(
            flops=peak_flops(known.hardware, precision),
            note=f"{precision} peak of {known.hardware.name}",
        )
    part = catalogue.find_by_driver_name(parts[0].device) if parts[0].device else None
    if part is None:
        return MatrixPeak(
            flops=0.0,
            note=f"no peak known for {parts[0].device or 'an unnamed device'}; say it with --on",
        )
    flops = peak_flops(catalogue.build_hardware(part, count=1), Dtype.BF16)
    return MatrixPeak(flops=flops, note=f"bf16 peak of {part.name}, by the device's name")


def diagnose_traces(
    parts: Sequence[Breakdown], beside: RankSkew | None, known: PricedJob | None, peak: MatrixPeak
) -> tuple[Finding, ...]:
    """The wall to work on first in front; never empty."""
    step = fmean(part.step_s for part in parts)
    found = (
        *_memory(parts),
        *_communication(parts, beside, step),
        *_host(parts, step),
        *_compute(parts, step, peak),
    )
    return tuple(
        Finding(
            wall=each.wall,
            cause=each.cause,
            title=each.title,
            share=each.share,
            evidence=each.evidence,
            fixes=fixes,
        )
        for each in order_findings(found)
        for fixes in (find_fixes(each.cause, known),)
    )


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=())


def _memory(parts: Sequence[Breakdown]) -> Iterator[Finding]:
    for part in sorted(parts, key=lambda each: -each.reserved_bytes)[:1]:
        if not part.memory_bytes or part.reserved_bytes <= MEMORY_SHARE * part.memory_bytes:
            return
        share = part.reserved_bytes / part.memory_bytes
        loose = part.reserved_bytes - part.allocated_bytes
        cause = (
            Cause.FRAGMENTATION
            if loose > FRAGMENTED_SHARE * part.reserved_bytes
            else Cause.CAPACITY
        )
        evidence = (
            f"rank {part.rank}: allocator holds {format_bytes(part.reserved_bytes)} of {format_bytes(part.memory_bytes)}, "
            f"{format_bytes(part.allocated_bytes)} of it given out (measured)"
        )
        yield _finding(Wall.MEMORY, cause, f"Memory is {share:.0%} full", share, evidence)


def _communication(
    parts: Sequence[Breakdown], beside: RankSkew | None, step: float
) -> Iterator[Finding]:
    waiting = {each.comm: each.seconds for each in beside.waiting} if beside else {}
    typical = {each.comm: each.median_s for each in beside.waiting} if beside else {}
    late = sum(typical.values())
    for comm in CommClass:
        ours = [each for part in parts for each in part.comm_times if each.comm is comm]
        shown = sum(each.exposed_s for each in ours) / len(parts)
        waits = min(shown, waiting.get(comm, 0.0))
        exposed = shown - waits  # with all ranks there
        if exposed < _SAID * step:
            continue
        busy, calls = (
            sum(each.busy_s for each in ours) / len(parts),
            sum(each.calls for each in ours) / len(parts),
        )
        how = "; ".join(dict.fromkeys(text for each in ours for text in each.evidence))
        evidence = [
            f"{format_seconds(shown)} a step exposed of {format_seconds(busy)} in {calls:.0f} calls (measured, unions)",
            f"told as {comm} by: {how}",
        ]
        if waits:
            evidence.append(
                f"{format_seconds(waits)} of it, left out here, is waiting for the last rank (measured)"
            )
        title = f"{comm} communication is exposed for {exposed / step:.0%} of the step"
        yield _finding(Wall.COMMUNICATION, CAUSE_OF_CLASS[comm], title, exposed / step, *evidence)
    if beside and late > _SAID * step:
        worst = beside.slowest_rank
        skew = f"rank {worst} computes longest, {beside.compute_max_over_mean:.2f} x the mean (measured)"
        excess_s = (beside.compute_max_over_mean - 1) * fmean(part.compute_s for part in parts)
        uneven = (
            typical.get(CommClass.EP, 0.0) > 0.5 * late and excess_s > 0.5 * late
        )  # else it was late otherwise
        wall, cause = (
            (Wall.COMPUTE, Cause.IMBALANCE) if uneven else (Wall.COMMUNICATION, Cause.STRAGGLER)
        )
        title = f"Ranks wait {late / step:.0%} of the step for each other"
        yield _finding(wall, cause, title, min(1.0, late / step), skew)


def _host(parts: Sequence[Breakdown], step: float) -> Iterator[Finding]:
    for idle, cause in _IDLES.items():
        seconds = sum(s for part in parts for each, s in part.idle_times if each is idle) / len(
            parts
        )
        if seconds < _SAID * step:
            continue
        kernels, short = (
            fmean(part.kernel_launches for part in parts),
            fmean(part.short_kernel_share for part in parts),
        )
        evidence = [f"{format_seconds(seconds)} a step (measured gaps between device work)"]
        if idle is IdleCause.LAUNCH:
            evidence.append(
                f"{kernels:,.0f} launches a step, {short:.0%} of the kernels shorter than 10 us (measured)"
            )
        if idle is IdleCause.UNKNOWN:
            evidence.append("the trace holds no launches, so the gaps have no finer cause")
        title = f"The device is idle for {seconds / step:.0%} of the step: {idle}"
        yield _finding(Wall.HOST, cause, title, seconds / step, *evidence)


def _compute(parts: Sequence[Breakdown], step: float, peak: MatrixPeak) -> Iterator[Finding]:
    compute = fmean(part.compute_s for part in parts)
    replayed = fmean(part.recompute_s for part in parts)
    if replayed > _REPLAYED * step:
        title = f"Recompute takes {replayed / step:.0%} of the step"
        evidence = f"{format_seconds(replayed)} a step inside checkpoints' backward (measured)"
        yield _finding(Wall.COMPUTE, Cause.RECOMPUTE, title, replayed / step, evidence)
    kinds = {
        work: fmean(dict(part.kind_times).get(work, 0.0) for part in parts) for work in KernelKind
    }
    spent = ", ".join(
        f"{work} {format_seconds(seconds)}" for work, seconds in kinds.items() if seconds > 0
    )
    told = [f"{spent} a step (measured, each kind's union)"]
    rate = _rate(parts)
    if rate and peak.flops:
        told.append(
            f"products with known shapes run at {rate / TERA:.0f} TFLOP/s, {rate / peak.flops:.0%} of {peak.note}"
        )
    cause = Cause.KERNEL_RATES
    if routed := parts[0].grouped_rows:
        rows = routed.rows / max(1, routed.experts)
        told.append(f"{rows:.0f} rows an expert and call over {routed.experts} experts (measured)")
        cause = Cause.FEW_ROWS if rows < _FEW_ROWS else cause
    title = f"Compute takes {compute / step:.0%} of the step"
    if rate and peak.flops and rate < _LOW_RATE * peak.flops:
        title += f", at {rate / peak.flops:.0%} of the peak rate"
    yield _finding(Wall.COMPUTE, cause, title, compute / step, *told)


def _rate(parts: Sequence[Breakdown]) -> float:
    """FLOP/s of the products whose shapes are known; 0: none are."""
    seconds = sum(part.known_matrix_s for part in parts)
    return sum(part.known_matrix_flops for part in parts) / seconds if seconds else 0.0


def build_trace_waterfall(
    parts: Sequence[Breakdown], beside: RankSkew | None, known: PricedJob | None, peak: MatrixPeak
) -> Waterfall | None:
    """None when nothing says what the ideal step is: neither the job nor shapes and a peak."""
    measured = fmean(part.step_s for part in parts)
    if known is not None and ideal_step_s(known):
        ideal, note = (
            ideal_step_s(known),
            describe_ideal_step(known.workload, known.estimate.model_flops_per_step),
        )
    else:
        flops = fmean(part.known_matrix_flops for part in parts)
        if not flops or not peak.flops:
            return None
        ideal, note = (
            flops / peak.flops,
            f"{flops:.4g} FLOPs of products with known shapes at the {peak.note}",
        )
    return close_waterfall(ideal, note, _drops(parts, beside, known, ideal, measured), measured)


def _drops(
    parts: Sequence[Breakdown],
    beside: RankSkew | None,
    known: PricedJob | None,
    ideal: float,
    measured: float,
) -> Iterator[WaterfallDrop]:
    def seen(name: str, seconds: float, note: str = "") -> WaterfallDrop:
        return WaterfallDrop(name=name, seconds=seconds, basis=Basis.MEASURED, note=note)

    waiting = {each.comm: each.seconds for each in beside.waiting} if beside else {}
    late = 0.0
    for comm in CommClass:
        exposed = sum(
            each.exposed_s for part in parts for each in part.comm_times if each.comm is comm
        ) / len(parts)
        waits = min(exposed, waiting.get(comm, 0.0))
        late += waits
        exposed -= waits
        if comm is CommClass.PP and known is not None and known.layout.pp > 1:
            share = next(
                (one.seconds for one in known.estimate.shares if one.part is TimePart.BUBBLE), 0.0
            )
            bubble = min(exposed, share / known.estimate.step_s * measured)
            count = micro_batches(known.workload, known.layout)
            note = f"predicted for {count} micro-batches over {known.layout.pp} stages, seen as exposed PP time"
            yield WaterfallDrop(
                name="pipeline bubble", seconds=bubble, basis=Basis.PREDICTED, note=note
            )
            exposed -= bubble
        yield seen(f"exposed {comm} communication", exposed)
    yield seen(
        "ranks waiting for each other", late, "inside collectives, before the last rank came"
    )
    for cause in IdleCause:
        yield seen(
            f"device idle: {cause}",
            sum(s for part in parts for one, s in part.idle_times if one is cause) / len(parts),
        )
    yield seen("copies not hidden", fmean(part.copies_s for part in parts))
    yield seen(
        "recompute", fmean(part.recompute_s for part in parts), "inside checkpoints' backward"
    )
    matrix, compute = (
        fmean(part.matrix_s for part in parts),
        fmean(part.compute_s for part in parts),
    )
    yield seen(
        "other kernels: norms, permutes, optimizer",
        compute - matrix - fmean(part.recompute_s for part in parts),
    )
    yield seen(BELOW_PEAK, matrix - ideal)
