"""Diagnosis of a run of the engine: the walls that hold it back, and the waterfall of its step.

The evidence is waits by group, time without a core, phases, load of the experts, and memory.
Everything is judged on the critical rank, the one that waits least for the others: what it does
sets the step. A wait has two parts: what even the last rank to arrive spends in the collective is
due to the link, and the rest is due to a late rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from moewright.cost.time.op_time import interpolate
from moewright.diagnosis.compare_ledgers import LedgerComparison, LedgerLine, Section
from moewright.diagnosis.thresholds import CAUSE_OF_PART, MEMORY_SHARE, order_findings
from moewright.diagnosis.traces.comm_classes import CAUSE_OF_CLASS, CLASS_OF_ENGINE_GROUP
from moewright.diagnosis.waterfall import (
    DROP_NAMES,
    close_waterfall,
    describe_ideal_step,
    ideal_step_s,
)
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.job import micro_batches
from moewright.rules.steady_steps import median_phase_seconds, median_step_s, steady_steps
from moewright.spec.finding import Basis, Cause, Finding, Wall, Waterfall, WaterfallDrop
from moewright.spec.hardware import Op
from moewright.spec.layout import Layout
from moewright.spec.ledger import StepPhase, StorageMoment
from moewright.spec.plan import Plan, TimePart
from moewright.spec.run import HostTime, RankTiming, RunRecord
from moewright.spec.units import divide, format_bytes, format_seconds, plural

UNEVEN_LOAD_FACTOR = 1.20  # hottest expert rank over the mean
_MIN_SHARE = 0.03  # of the step: smaller causes are not reported
_RECOMPUTE_SHARE = 0.10
_SLOW_RATE = 0.33  # of the best rate of the curve: a call is too small
_NO_CORE_SHARE = 0.10
_HOST_TIMES = ("running_s", "queued_s", "collecting_s", "asleep_s")
_COMPUTE_PHASES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalRank:
    """The seconds a step of the critical rank.

    `waits` is empty where waits were not timed (on a GPU). Where other programs take the cores, a
    rank that is ready to run has no core, and its peers wait for it. Both times are taken out of
    the step and of the waits, as far as the scheduler recorded them.
    """

    rank: int
    step_s: float
    phases: Mapping[StepPhase, float]
    waits: Mapping[Cause, float]  # of the links; in a pipeline, for its neighbours' work too
    no_core_s: float  # ready to run without a core; not part of step_s
    gc_s: float
    # Asleep outside data loading: not running, not ready, not waiting for a peer. Where the host
    # was not timed: in no phase of the step.
    stalled_s: float
    running_s: float
    late_wait_s: float  # this rank's waits for late ranks
    mean_late_wait_s: float  # the same, mean over all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankTimes:
    """Seconds of a step as a rank recorded them.

    `late_wait_s` are its waits for late ranks, `mean_late_wait_s` the mean over ranks, both less
    the time in which a peer had no core.
    """

    rank: int
    phases: dict[StepPhase, float]
    host: HostTime
    link_waits: Mapping[str, float]  # by group
    late_wait_s: float
    mean_late_wait_s: float


def diagnose_run(
    record: RunRecord, comparisons: Sequence[LedgerComparison] = ()
) -> tuple[Finding, ...]:
    """Return findings without fixes, the wall to work on first in front.

    There are some for every run with steps. `comparisons` are those of its ledgers.
    """
    if not median_step_s(record):
        return ()
    critical = find_critical_rank(record)
    return order_findings(
        (
            *_diagnose_memory(record),
            *_diagnose_storages(record, comparisons),
            *_diagnose_communication(record, critical),
            *_diagnose_host(critical),
            *_diagnose_imbalance(record, critical),
            *_diagnose_compute(record, critical),
        )
    )


def find_critical_rank(record: RunRecord) -> CriticalRank:
    """Find the rank that waits least, and return its times, medians over the steps.

    Only a run that has ended by itself has the times of all ranks. For another one, the times are
    those of rank 0's steady steps.
    """
    has_ended = bool(record.paces) and all(timing.steps for timing in record.paces)
    times = _select_rank(record.paces) if has_ended else _first_rank_times(record)
    host = times.host
    phases = dict(times.phases)
    layout = record.plan.layout
    step_s = sum(phases.values()) or median_step_s(record)
    waits: dict[Cause, float] = defaultdict(float)
    for group, seconds in times.link_waits.items():
        waits[_cause_of_wait(group, layout)] += seconds
    is_timed = host.running_s > 0 and (bool(times.link_waits) or layout.world_size == 1)
    data_s = phases.get(StepPhase.DATA, 0.0)
    if not is_timed:
        return CriticalRank(
            rank=times.rank,
            step_s=step_s,
            phases=phases,
            waits=waits,
            no_core_s=0.0,
            gc_s=host.collecting_s,
            running_s=0.0,
            stalled_s=max(0.0, phases.get(StepPhase.OTHER, 0.0)),
            late_wait_s=times.late_wait_s,
            mean_late_wait_s=times.mean_late_wait_s,
        )
    if step_s:
        # Data loading waits for a core for the same share of its time as the rest of the step.
        data_s *= max(0.0, 1 - host.queued_s / step_s)
        phases[StepPhase.DATA] = data_s
    # The step as it would be with a core for every rank.
    linked_s = sum(times.link_waits.values())
    own_core_s = host.running_s + linked_s + times.late_wait_s + host.asleep_s
    return CriticalRank(
        rank=times.rank,
        step_s=min(step_s, own_core_s),
        phases=phases,
        waits=waits,
        no_core_s=max(0.0, step_s - own_core_s),
        gc_s=host.collecting_s,
        running_s=host.running_s,
        stalled_s=max(0.0, host.asleep_s - data_s),
        late_wait_s=times.late_wait_s,
        mean_late_wait_s=times.mean_late_wait_s,
    )


def _cause_of_wait(group: str, layout: Layout) -> Cause:
    """Return what a wait over a group of ranks is due to."""
    if group == "world" and layout.pp > 1:
        return Cause.PP  # a rank whose last micro-batch is done waits for the others' last
    if group == "tp_cp" and layout.tp == 1:
        return Cause.CP
    return CAUSE_OF_CLASS[CLASS_OF_ENGINE_GROUP[group]]


def _select_rank(timings: tuple[RankTiming, ...]) -> _RankTimes:
    """Return the times of the rank that waits least.

    A peer that has no core for some time arrives that much later, because the machine is crowded:
    this time is taken out of the waits for late ranks. A wait whose single calls were not recorded
    is reduced by the peer's share of its step instead.
    """
    waited_s = {timing.rank: sum(wait.seconds for wait in timing.waits) for timing in timings}
    critical = min(timings, key=lambda timing: waited_s[timing.rank])
    late_wait_s = {timing.rank: _late_wait_s(timing, critical, timings) for timing in timings}
    link_s = {link.group: link.seconds for link in critical.links}
    queued_share = max(
        (timing.host.queued_s / timing.step_s for timing in timings if timing is not critical),
        default=0.0,
    )
    own_share = max(0.0, 1 - queued_share)
    return _RankTimes(
        rank=critical.rank,
        phases={row.phase: row.seconds for row in critical.phases},
        host=critical.host,
        link_waits={
            wait.group: link_s.get(wait.group, own_share * wait.seconds) for wait in critical.waits
        },
        late_wait_s=late_wait_s[critical.rank],
        mean_late_wait_s=fmean(late_wait_s.values()),
    )


def _late_wait_s(
    timing: RankTiming, critical: RankTiming, timings: tuple[RankTiming, ...]
) -> float:
    """Return the seconds that a rank waits for late ranks: its waits less those of its links.

    Where a link's seconds are not known, the critical rank's wait over the same group stands in.
    """
    link_s = {wait.group: wait.seconds for wait in critical.waits}
    link_s |= {link.group: link.seconds for link in timing.links}
    beyond_s = sum(wait.seconds - link_s.get(wait.group, 0.0) for wait in timing.waits)
    peers_queued_s = (peer.host.queued_s for peer in timings if peer is not timing)
    return max(0.0, beyond_s - max(peers_queued_s, default=0.0))


def _first_rank_times(record: RunRecord) -> _RankTimes:
    """Return medians over rank 0's steady steps, for a run whose ranks did not record theirs."""
    steps = steady_steps(record)
    groups = {wait.group for step in steps for wait in step.waits}
    host_s = {name: median(getattr(step.host, name) for step in steps) for name in _HOST_TIMES}
    return _RankTimes(
        rank=0,
        phases=dict(median_phase_seconds(record)),
        host=HostTime(**host_s),
        link_waits={
            group: median(
                sum(wait.seconds for wait in step.waits if wait.group == group) for step in steps
            )
            for group in groups
        },
        late_wait_s=0.0,
        mean_late_wait_s=0.0,
    )


def build_run_waterfall(record: RunRecord, critical: CriticalRank, job: Plan) -> Waterfall:
    """Build the waterfall from the ideal step to the measured one, on the critical rank.

    Waits, host and the crowded machine are measured. The parts of compute were not timed: recompute
    gets its share of the FLOPs, and the rest is what rates below the peak cost.
    """
    ideal_s = ideal_step_s(job)
    step_s = sum(critical.phases.values())
    drops = [
        *_waiting_drops(critical, job),
        _measured(Cause.DATA, critical.phases.get(StepPhase.DATA, 0.0)),
        _measured(Cause.GARBAGE_COLLECTION, critical.gc_s),
        _measured("host asleep, or in no phase", max(0.0, critical.stalled_s - critical.gc_s)),
        _measured("no core free: other programs", critical.no_core_s),
    ]
    busy_s = max(0.0, step_s - sum(drop.seconds for drop in drops))
    if critical.running_s:
        busy_s = min(busy_s, max(0.0, critical.running_s - critical.gc_s))
    recompute_s = busy_s * _recompute_share(job.estimate.mfu, job.estimate.hfu)
    optimizer_s = min(busy_s, critical.phases.get(StepPhase.OPTIMIZER, 0.0))
    recompute = WaterfallDrop(
        name="recompute",
        seconds=recompute_s,
        basis=Basis.PREDICTED,
        note="its share of the FLOPs, of measured work",
    )
    below_peak_s = busy_s - recompute_s - optimizer_s - ideal_s
    drops += [
        recompute,
        _measured("optimizer", optimizer_s),
        _measured("work below the peak rate", below_peak_s),
    ]
    note = describe_ideal_step(job.workload, job.estimate.model_flops_per_step)
    return close_waterfall(ideal_s, note, drops, step_s)


def _waiting_drops(critical: CriticalRank, job: Plan) -> Iterator[WaterfallDrop]:
    """Yield the waits as drops: measured, or predicted where they were not timed."""
    for cause, seconds in critical.waits.items():
        yield _measured(f"waiting: {cause}", seconds)
    yield _measured("waiting for late ranks", critical.late_wait_s)
    if critical.waits:
        return
    for share in job.estimate.shares:
        if share.part in CAUSE_OF_PART:
            yield WaterfallDrop(
                name=DROP_NAMES[share.part], seconds=share.seconds, basis=Basis.PREDICTED
            )


def _measured(name: str, seconds: float) -> WaterfallDrop:
    return WaterfallDrop(name=name, seconds=seconds, basis=Basis.MEASURED)


def _recompute_share(mfu: float, hfu: float) -> float:
    """Return the share of the FLOPs that recompute makes."""
    return 1 - divide(mfu, hfu, otherwise=1.0)


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=())


def _predicted_seconds(record: RunRecord, part: TimePart) -> float:
    shares = record.plan.estimate.shares
    return sum(share.seconds for share in shares if share.part is part)


def _diagnose_communication(record: RunRecord, critical: CriticalRank) -> Iterator[Finding]:
    """Report what even the last rank to arrive waits for: the link, or in a pipeline the bubble."""
    if critical.waits:
        waits = dict(critical.waits)
        basis = f"measured on rank {critical.rank}: all ranks being there, or a neighbour's work"
    else:
        waits = _untimed_waits(record, critical)
        basis = "predicted where phases do not tell it"
    bubble_s = _predicted_seconds(record, TimePart.BUBBLE)
    for cause, seconds in waits.items():
        share = seconds / critical.step_s
        if share < _MIN_SHARE:
            continue
        evidence = [f"{format_seconds(seconds)} a step blocked on {cause} ({basis})"]
        if cause is Cause.PP and bubble_s:
            bubble = format_seconds(bubble_s)
            evidence.append(f"{bubble} of bubble expected of the timetable (predicted)")
        if cause is Cause.DP:
            reduce_s = format_seconds(critical.phases.get(StepPhase.GRAD_REDUCE, 0.0))
            gather_s = format_seconds(critical.phases.get(StepPhase.PARAM_GATHER, 0.0))
            evidence.append(f"gradient reduction {reduce_s}, weight gather {gather_s} (measured)")
        title = f"{cause} is waited for during {share:.0%} of the step"
        yield _finding(Wall.COMMUNICATION, cause, title, share, *evidence)


def _untimed_waits(record: RunRecord, critical: CriticalRank) -> dict[Cause, float]:
    """Return the waits of a run that did not time them.

    Reduction and gather are the measured phases; inside forward and backward it is the prediction.
    """
    waits: dict[Cause, float] = defaultdict(float)
    for share in record.plan.estimate.shares:
        if share.part in CAUSE_OF_PART:
            waits[CAUSE_OF_PART[share.part]] += share.seconds
    reduce_s = critical.phases.get(StepPhase.GRAD_REDUCE, 0.0)
    gather_s = critical.phases.get(StepPhase.PARAM_GATHER, 0.0)
    waits[Cause.DP] = reduce_s + gather_s
    return waits


def _diagnose_host(critical: CriticalRank) -> Iterator[Finding]:
    data_s = critical.phases.get(StepPhase.DATA, 0.0)
    other_s = critical.stalled_s - critical.gc_s
    causes = (
        (Cause.DATA, data_s, "loading the step's batches"),
        (Cause.GARBAGE_COLLECTION, critical.gc_s, "inside Python's garbage collection"),
        (Cause.HOST_OTHER, other_s, "asleep, or in no phase"),
    )
    for cause, seconds, activity in causes:
        if seconds < _MIN_SHARE * critical.step_s:
            continue
        share = min(1.0, seconds / critical.step_s)
        evidence = f"{format_seconds(seconds)} a step {activity} (measured on rank {critical.rank})"
        title = f"{cause.capitalize()} holds the step up for {share:.0%} of it"
        yield _finding(Wall.HOST, cause, title, share, evidence)


def _diagnose_compute(record: RunRecord, critical: CriticalRank) -> Iterator[Finding]:
    prediction = record.plan.estimate
    compute_s = _compute_s(record, critical)
    share = compute_s / critical.step_s
    recompute = share * _recompute_share(prediction.mfu, prediction.hfu)
    if recompute > _RECOMPUTE_SHARE:
        title = f"Recompute takes about {recompute:.0%} of the step"
        more_flops = prediction.hfu / prediction.mfu - 1
        evidence = (
            f"{more_flops:.0%} more FLOPs than the model has (counted), "
            f"of {format_seconds(compute_s)}"
        )
        yield _finding(Wall.COMPUTE, Cause.RECOMPUTE, title, recompute, evidence)
    yield from _diagnose_small_products(record, share)
    phases = ", ".join(
        f"{phase} {format_seconds(critical.phases.get(phase, 0.0))}" for phase in _COMPUTE_PHASES
    )
    mfu = median([step.mfu for step in steady_steps(record)])
    evidence_lines = [phases, f"MFU {mfu:.1%} of the device's measured or stated peak"]
    if critical.no_core_s > _NO_CORE_SHARE * critical.step_s:
        evidence_lines.append(
            f"left out: {format_seconds(critical.no_core_s)} a step without a core, "
            "the machine is crowded (measured)"
        )
    title = f"Compute takes {share:.0%} of the step"
    yield _finding(Wall.COMPUTE, Cause.KERNEL_RATES, title, share, *evidence_lines)


def _compute_s(record: RunRecord, critical: CriticalRank) -> float:
    """Return the seconds that the critical rank computes.

    Where the host was not timed, they are the compute phases less the predicted EP communication in
    them.
    """
    if critical.running_s:
        return max(0.0, critical.running_s - critical.gc_s)
    phases_s = sum(critical.phases.get(phase, 0.0) for phase in _COMPUTE_PHASES)
    return max(0.0, phases_s - _predicted_seconds(record, TimePart.EP_COMM))


def _diagnose_small_products(record: RunRecord, share: float) -> Iterator[Finding]:
    """Compare rows and FLOPs of one expert's product with the curves of the hardware file."""
    plan = record.plan
    moe = plan.model.moe
    layout = plan.layout
    counts = [sum(load.counts) for step in steady_steps(record) for load in step.loads]
    if moe is None or not counts:
        return
    calls = moe.experts * micro_batches(plan.workload, layout) * max(1, layout.edp)
    rows = median(counts) / calls
    hidden_size = plan.model.hidden_size
    width = moe.ffn_size // layout.etp
    rate_by_rows = _share_of_best_rate(plan, Op.GROUPED_GEMM, rows)
    rate_by_flops = _share_of_best_rate(plan, Op.GEMM, 2.0 * rows * hidden_size * width)
    slowest = min(rate_by_rows, rate_by_flops)
    if slowest < _SLOW_RATE:
        title = f"Experts' products are small: {plural(rows, 'row')} of {hidden_size} by {width}"
        evidence = (
            f"grouped products of so many rows reach {rate_by_rows:.0%} of their best rate, "
            f"products of so many FLOPs {rate_by_flops:.0%} (curves of the hardware file)"
        )
        yield _finding(Wall.COMPUTE, Cause.FEW_ROWS, title, share * (1 - slowest), evidence)


def _share_of_best_rate(plan: Plan, op: Op, x: float) -> float:
    """Return the rate at x over the best of the curve, in the job's precision; 1 without a curve.

    A call smaller than the smallest measured takes as long as that one.
    """
    curves = [
        rate.curve
        for rate in plan.hardware.device.rates
        if rate.op is op and rate.dtype is plan.workload.precision
    ]
    shares = (
        interpolate(curve, x)
        * min(1.0, x / curve.points[0][0])
        / max(rate for _, rate in curve.points)
        for curve in curves
    )
    return min(shares, default=1.0)


def _diagnose_memory(record: RunRecord) -> Iterator[Finding]:
    """Report the fullest rank where it is nearly full.

    Its peak is what it counted, or the prediction, which knows transients and allowances.
    """
    prediction = record.plan.estimate
    counted_bytes = max((ledger.device_bytes for ledger in record.ledgers), default=0)
    peak_bytes = max(counted_bytes, prediction.peak_bytes)
    if peak_bytes <= MEMORY_SHARE * prediction.capacity_bytes:
        return
    share = peak_bytes / prediction.capacity_bytes
    predicted = format_bytes(prediction.peak_bytes)
    counted = format_bytes(counted_bytes)
    yield _finding(
        Wall.MEMORY,
        Cause.CAPACITY,
        f"Memory is {share:.0%} full",
        share,
        f"predicted peak {predicted} of {format_bytes(prediction.capacity_bytes)}",
        f"counted on the fullest rank {counted} of states and saved activations",
        f"largest: {prediction.largest}",
    )


def _diagnose_storages(
    record: RunRecord, comparisons: Sequence[LedgerComparison]
) -> Iterator[Finding]:
    """Report storages that live on a rank although no row of the ledger lists them."""
    capacity = record.plan.estimate.capacity_bytes
    worst: tuple[float, LedgerLine, LedgerComparison] | None = None
    for comparison in comparisons:
        for line in comparison.lines_in(Section.STORAGES):
            excess = line.counted - line.predicted - line.allowance
            if not line.keeps_rule and (worst is None or excess > worst[0]):
                worst = excess, line, comparison
    if worst is None:
        return
    excess, line, comparison = worst
    moment = StorageMoment(line.key[-1])
    beyond = format_bytes(line.counted - line.predicted)
    title = f"Rank {comparison.rank} holds {beyond} that no row of the ledger lists"
    if excess < 0:  # less lives than the rows say
        title = f"Rank {comparison.rank} holds less than the rows of the ledger list"
    places = [row for row in comparison.unlisted if row.moment is moment]
    yield _finding(
        Wall.MEMORY,
        Cause.UNLISTED,
        title,
        max(0.0, line.counted - line.predicted) / capacity,
        f"{moment}: {format_bytes(line.counted)} counted, {format_bytes(line.predicted)} listed, "
        f"{format_bytes(line.allowance)} allowed beside",
        *(f"{format_bytes(row.bytes)} of {row.module}: {row.place}" for row in places[:3]),
    )


def _diagnose_imbalance(record: RunRecord, critical: CriticalRank) -> Iterator[Finding]:
    """Report uneven load of the expert ranks, else any late rank.

    A hot expert rank makes every other rank of its group wait at the combine; a late rank does so
    elsewhere.
    """
    factors = _load_factors(record)
    typical = median([factor for factor, _ in factors] or [1.0])
    late_share = critical.mean_late_wait_s / critical.step_s
    waited = format_seconds(critical.mean_late_wait_s)
    if typical > UNEVEN_LOAD_FACTOR:
        worst, layer = max(factors)
        experts_s = _predicted_seconds(record, TimePart.EXPERTS)
        cost = max(late_share, experts_s * (typical - 1) / critical.step_s)
        yield _finding(
            Wall.COMPUTE,
            Cause.IMBALANCE,
            f"The hottest expert rank gets {typical:.2f} x the mean load",
            cost,
            f"median over layers and steps {typical:.2f} x the mean, "
            f"highest {worst:.2f} x in layer {layer} (measured)",
            f"the plan assumed {record.plan.workload.load_factor:.2f} x",
            f"ranks wait {waited} a step for late ones (measured, mean over ranks)",
        )
    elif late_share > _MIN_SHARE:
        evidence = f"{waited} a step (measured, mean over ranks); rank {critical.rank} waits least"
        title = f"Ranks wait {late_share:.0%} of the step for a late one"
        yield _finding(Wall.COMMUNICATION, Cause.STRAGGLER, title, late_share, evidence)


def _load_factors(record: RunRecord) -> list[tuple[float, int]]:
    """Return the load of the hottest expert rank over the mean, with the layer, of steady steps."""
    ep = record.plan.layout.ep
    if ep == 1:
        return []
    return [
        (rank_load_factor(load.rank_counts or load.counts, ep), load.layer)
        for step in steady_steps(record)
        for load in step.loads
    ]
