"""Which wall holds one of our runs back: waits by group, time without a core, phases, load of the
experts, memory.

Everything is judged on the critical rank, the one that waits least for the others: what it does
sets the step. Of its waits, what even the last rank to come spends is the link's; the rest is a
late rank's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from moewright.cost.op_time import interpolate
from moewright.diagnosis.priced_fixes import PricedJob, find_fixes
from moewright.diagnosis.thresholds import CAUSE_OF_PART, MEMORY_SHARE, order_findings
from moewright.diagnosis.traces.comm_classes import CAUSE_OF_CLASS, CLASS_OF_ENGINE_GROUP
from moewright.diagnosis.waterfall import (
    DROP_NAMES,
    close_waterfall,
    describe_ideal_step,
    ideal_step_s,
)
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.micro_batches import micro_batches
from moewright.rules.steady_steps import median_phase_seconds, median_step_s, steady_steps
from moewright.spec.finding import Basis, Cause, Finding, Wall, Waterfall, WaterfallDrop
from moewright.spec.hardware import Op
from moewright.spec.ledger import StepPhase
from moewright.spec.plan import Plan, TimePart
from moewright.spec.run import HostTime, RankTiming, RunRecord
from moewright.spec.units import format_bytes, format_seconds

UNEVEN_LOAD_FACTOR = 1.20  # hottest expert rank over the mean
_MIN_SHARE = 0.03  # of the step: smaller causes go unsaid
_RECOMPUTE_SHARE = 0.10
_SLOW_RATE = 0.33  # of the best rate of the curve: a call is too small
_NO_CORE_SHARE = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalRank:
    """Seconds a step of the critical rank. `waits` is empty where nobody timed them (on a GPU).

    Where other programs take the cores, a rank stands ready without one, and its peers wait for it:
    both are taken out of the step and of the waits, as far as the scheduler told them.
    """

    rank: int
    step_s: float
    phases: Mapping[StepPhase, float]
    waits: Mapping[Cause, float]  # of the links; in a pipeline, for its neighbours' work too
    no_core_s: float  # taken out
    gc_s: float
    # neither working, nor ready, nor waiting for a peer, outside the loading of data; or in no
    # phase
    stalled_s: float
    running_s: float
    late_wait_s: float  # of this rank: waiting for late ranks
    mean_late_wait_s: float  # the same, mean over ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankTimes:
    """What a rank wrote down of a step, seconds: `late_s` its waits for late ranks, `mean_late_s`
    the mean over ranks, both less the time in which a peer had no core.
    """

    rank: int
    phases: dict[StepPhase, float]
    host: HostTime
    links: Mapping[str, float]
    late_s: float
    mean_late_s: float


def diagnose_run(record: RunRecord) -> tuple[Finding, ...]:
    """Findings, the wall to work on first in front; never empty for a run that has steps."""
    if not median_step_s(record):
        return ()
    pace = find_critical_rank(record)
    found = (
        *_memory(record),
        *_communication(record, pace),
        *_host(pace),
        *_imbalance(record, pace),
        *_compute(record, pace),
    )
    return order_findings(found)


def find_critical_rank(record: RunRecord) -> CriticalRank:
    """From the means of all ranks; from rank 0's settled steps for a run that has not ended by
    itself."""
    ended = bool(record.paces) and all(pace.steps for pace in record.paces)
    seen = _of_ranks(record.paces) if ended else _of_first(record)
    phases, host = seen.phases, seen.host
    step_s, linked = sum(phases.values()) or median_step_s(record), sum(seen.links.values())
    of_cause: dict[Cause, float] = defaultdict(float)
    for group, seconds in seen.links.items():
        drains = (
            group == "world" and record.plan.layout.pp > 1
        )  # who has done its last row waits for the others' last
        cause = (
            Cause.CP
            if group == "tp_cp" and record.plan.layout.tp == 1
            else CAUSE_OF_CLASS[CLASS_OF_ENGINE_GROUP[group]]
        )
        of_cause[Cause.PP if drains else cause] += seconds
    timed = host.running_s > 0 and (bool(seen.links) or record.plan.layout.world_size == 1)
    if timed and step_s:  # loading stands in line for a core as all else does
        phases[StepPhase.DATA] = phases.get(StepPhase.DATA, 0.0) * max(
            0.0, 1 - host.queued_s / step_s
        )
    apart = (
        host.running_s + linked + seen.late_s + host.asleep_s
    )  # the step as it were with a core for every rank
    idle_s = host.asleep_s if timed else phases.get(StepPhase.OTHER, 0.0)
    return CriticalRank(
        rank=seen.rank,
        step_s=min(step_s, apart) if timed else step_s,
        phases=phases,
        waits=of_cause,
        no_core_s=max(0.0, step_s - apart) if timed else 0.0,
        gc_s=host.collecting_s,
        running_s=host.running_s if timed else 0.0,
        stalled_s=max(0.0, idle_s - phases.get(StepPhase.DATA, 0.0) * timed),
        late_wait_s=seen.late_s,
        mean_late_wait_s=seen.mean_late_s,
    )


def _of_ranks(paces: tuple[RankTiming, ...]) -> _RankTimes:
    """The rank that waits least. A peer without a core for some time comes so much later: that much
    of a wait for late ranks is the crowd's, and of a wait whose calls were not kept as large a
    share.
    """
    totals = {pace.rank: sum(wait.seconds for wait in pace.waits) for pace in paces}
    chosen = min(paces, key=lambda pace: totals[pace.rank])
    late = {pace.rank: _late_s(pace, chosen, paces) for pace in paces}
    known = {link.group: link.seconds for link in chosen.links}
    crowd = max(
        (pace.host.queued_s / pace.step_s for pace in paces if pace is not chosen), default=0.0
    )
    return _RankTimes(
        rank=chosen.rank,
        phases={row.phase: row.seconds for row in chosen.phases},
        host=chosen.host,
        links={
            wait.group: known.get(wait.group, max(0.0, 1 - crowd) * wait.seconds)
            for wait in chosen.waits
        },
        late_s=late[chosen.rank],
        mean_late_s=fmean(late.values()),
    )


def _late_s(pace: RankTiming, chosen: RankTiming, paces: tuple[RankTiming, ...]) -> float:
    """What the rank waits beyond the links; where those are not known, beyond what the chosen rank
    waits."""
    known = {wait.group: wait.seconds for wait in chosen.waits} | {
        link.group: link.seconds for link in pace.links
    }
    waited = sum(wait.seconds - known.get(wait.group, 0.0) for wait in pace.waits)
    return max(
        0.0, waited - max((each.host.queued_s for each in paces if each is not pace), default=0.0)
    )


def _of_first(record: RunRecord) -> _RankTimes:
    """Rank 0's settled steps, of a run whose other ranks have not written down theirs."""
    steps = steady_steps(record)
    groups = {wait.group for step in steps for wait in step.waits}
    names = ("running_s", "queued_s", "collecting_s", "asleep_s")
    return _RankTimes(
        rank=0,
        phases=dict(median_phase_seconds(record)),
        host=HostTime(
            **{name: median(getattr(step.host, name) for step in steps) for name in names}
        ),
        links={
            group: median(sum(w.seconds for w in step.waits if w.group == group) for step in steps)
            for group in groups
        },
        late_s=0.0,
        mean_late_s=0.0,
    )


def build_run_waterfall(record: RunRecord, critical: CriticalRank, job: PricedJob) -> Waterfall:
    """Ideal to measured on the critical rank: waits, host and crowd as measured; inside the
    compute, which nobody timed apart, recompute by its FLOPs and the rest as what rates below the
    peak cost.
    """

    def seen(name: str, seconds: float, note: str = "") -> WaterfallDrop:
        return WaterfallDrop(name=name, seconds=seconds, basis=Basis.MEASURED, note=note)

    found, ideal = job.estimate, ideal_step_s(job)
    step_s = sum(critical.phases.values())
    drops = [seen(f"waiting: {cause}", seconds) for cause, seconds in critical.waits.items()]
    drops.append(seen("waiting for late ranks", critical.late_wait_s))
    if not critical.waits:
        drops += [
            WaterfallDrop(name=DROP_NAMES[share.part], seconds=share.seconds, basis=Basis.PREDICTED)
            for share in found.shares
            if share.part in CAUSE_OF_PART
        ]
    data_s = critical.phases.get(StepPhase.DATA, 0.0)
    host = max(0.0, critical.stalled_s - critical.gc_s)
    drops += [
        seen(Cause.DATA, data_s),
        seen(Cause.GARBAGE_COLLECTION, critical.gc_s),
        seen("host asleep, or in no phase", host),
        seen("no core free: other programs", critical.no_core_s),
    ]
    busy = max(0.0, step_s - sum(drop.seconds for drop in drops))
    if critical.running_s:
        busy = min(busy, max(0.0, critical.running_s - critical.gc_s))
    replayed = busy * (1 - found.mfu / found.hfu) if found.hfu else 0.0
    optimizer = min(busy, critical.phases.get(StepPhase.OPTIMIZER, 0.0))
    drops += [
        WaterfallDrop(
            name="recompute",
            seconds=replayed,
            basis=Basis.PREDICTED,
            note="its share of the FLOPs, of measured work",
        ),
        seen("optimizer", optimizer),
        seen("work below the peak rate", busy - replayed - optimizer - ideal),
    ]
    return close_waterfall(
        ideal, describe_ideal_step(job.workload, found.model_flops_per_step), drops, step_s
    )


def _finding(wall: Wall, cause: Cause, title: str, share: float, *evidence: str) -> Finding:
    return Finding(
        wall=wall, cause=cause, title=title, share=share, evidence=evidence, fixes=find_fixes(cause)
    )


def _communication(record: RunRecord, pace: CriticalRank) -> Iterator[Finding]:
    """What even the last rank to come waits for is the link or, in a pipeline, the bubble."""
    if pace.waits:
        spent, basis = (
            dict(pace.waits),
            f"measured on rank {pace.rank}: all ranks being there, or a neighbour's work",
        )
    else:
        spent, basis = _unwatched(record, pace), "predicted where phases do not tell it"
    bubble = sum(
        share.seconds for share in record.plan.estimate.shares if share.part is TimePart.BUBBLE
    )
    for cause, seconds in spent.items():
        share = seconds / pace.step_s
        if share < _MIN_SHARE:
            continue
        evidence = [f"{format_seconds(seconds)} a step blocked on {cause} ({basis})"]
        if cause is Cause.PP and bubble:
            evidence.append(
                f"{format_seconds(bubble)} of bubble expected of the timetable (predicted)"
            )
        if cause is Cause.DP:
            reduce_s, gather_s = (
                pace.phases.get(phase, 0.0)
                for phase in (StepPhase.GRAD_REDUCE, StepPhase.PARAM_GATHER)
            )
            text = f"gradient reduction {format_seconds(reduce_s)}, weight gather {format_seconds(gather_s)} (measured)"
            evidence.append(text)
        title = f"{cause} is waited for during {share:.0%} of the step"
        yield _finding(Wall.COMMUNICATION, cause, title, share, *evidence)


def _unwatched(record: RunRecord, pace: CriticalRank) -> dict[Cause, float]:
    """Without timed waits: the phases of reduction and gather, and what is predicted inside forward
    and backward."""
    found: dict[Cause, float] = defaultdict(float)
    for share in record.plan.estimate.shares:
        if share.part in CAUSE_OF_PART:
            found[CAUSE_OF_PART[share.part]] += share.seconds
    found[Cause.DP] = pace.phases.get(StepPhase.GRAD_REDUCE, 0.0) + pace.phases.get(
        StepPhase.PARAM_GATHER, 0.0
    )
    return found


def _host(pace: CriticalRank) -> Iterator[Finding]:
    parts = (
        (Cause.DATA, pace.phases.get(StepPhase.DATA, 0.0), "loading the step's batches"),
        (Cause.GARBAGE_COLLECTION, pace.gc_s, "inside Python's garbage collection"),
        (Cause.HOST_OTHER, pace.stalled_s - pace.gc_s, "asleep, or in no phase"),
    )
    for cause, seconds, what in parts:
        if seconds < _MIN_SHARE * pace.step_s:
            continue
        share = min(1.0, seconds / pace.step_s)
        seen = f"{format_seconds(seconds)} a step {what} (measured on rank {pace.rank})"
        title = f"{cause.capitalize()} holds the step up for {share:.0%} of it"
        yield _finding(Wall.HOST, cause, title, share, seen)


def _compute(record: RunRecord, pace: CriticalRank) -> Iterator[Finding]:
    working = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)
    inside = sum(
        share.seconds for share in record.plan.estimate.shares if share.part is TimePart.EP_COMM
    )
    busy = max(0.0, sum(pace.phases.get(phase, 0.0) for phase in working) - inside)
    model_s = max(0.0, pace.running_s - pace.gc_s) if pace.running_s else busy
    share = model_s / pace.step_s
    found = record.plan.estimate
    replayed = share * (1 - found.mfu / found.hfu) if found.hfu else 0.0
    if replayed > _RECOMPUTE_SHARE:
        seen = f"{found.hfu / found.mfu - 1:.0%} more FLOPs than the model has (counted), of {format_seconds(model_s)}"
        yield _finding(
            Wall.COMPUTE,
            Cause.RECOMPUTE,
            f"Recompute takes about {replayed:.0%} of the step",
            replayed,
            seen,
        )
    yield from _small_calls(record, share)
    parts = ", ".join(f"{phase} {format_seconds(pace.phases.get(phase, 0.0))}" for phase in working)
    mfu = median([step.mfu for step in steady_steps(record)])
    evidence = [parts, f"MFU {mfu:.1%} of the device's measured or stated peak"]
    if pace.no_core_s > _NO_CORE_SHARE * pace.step_s:
        crowd = f"left out: {format_seconds(pace.no_core_s)} a step without a core, the machine is crowded (measured)"
        evidence.append(crowd)
    yield _finding(
        Wall.COMPUTE, Cause.KERNEL_RATES, f"Compute takes {share:.0%} of the step", share, *evidence
    )


def _small_calls(record: RunRecord, share: float) -> Iterator[Finding]:
    """Rows and FLOPs of one expert's product against the curves of the hardware file."""
    plan = record.plan
    moe, layout = plan.model.moe, plan.layout
    counts = [sum(load.counts) for step in steady_steps(record) for load in step.loads]
    if moe is None or not counts:
        return
    calls = moe.experts * micro_batches(plan.workload, layout) * max(1, layout.edp)
    rows = median(counts) / calls
    width = moe.ffn_size // layout.etp
    by_rows = _of_best(plan, Op.GROUPED_GEMM, rows)
    by_flops = _of_best(plan, Op.GEMM, 2.0 * rows * plan.model.hidden_size * width)
    if min(by_rows, by_flops) < _SLOW_RATE:
        title = (
            f"Experts' products are small: {rows:.0f} rows of {plan.model.hidden_size} by {width}"
        )
        seen = (
            f"grouped products of so many rows reach {by_rows:.0%} of their best rate, "
            f"products of so many FLOPs {by_flops:.0%} (curves of the hardware file)"
        )
        yield _finding(
            Wall.COMPUTE, Cause.FEW_ROWS, title, share * (1 - min(by_rows, by_flops)), seen
        )


def _of_best(plan: Plan, op: Op, x: float) -> float:
    """Rate at x over the best of the curve, in the job's precision; 1 without a curve. A call
    smaller than the smallest measured takes as long as that one.
    """
    rates = plan.hardware.device.rates
    curves = [
        rate.curve for rate in rates if rate.op is op and rate.dtype is plan.workload.precision
    ]
    return min(
        (
            interpolate(curve, x)
            * min(1.0, x / curve.points[0][0])
            / max(y for _, y in curve.points)
            for curve in curves
        ),
        default=1.0,
    )


def _memory(record: RunRecord) -> Iterator[Finding]:
    """The fullest rank: what it counted, plus what only the prediction knows (transients,
    allowances)."""
    found = record.plan.estimate
    counted = max((ledger.device_bytes for ledger in record.ledgers), default=0)
    peak = max(counted, found.peak_bytes)
    if peak <= MEMORY_SHARE * found.capacity_bytes:
        return
    yield _finding(
        Wall.MEMORY,
        Cause.CAPACITY,
        f"Memory is {peak / found.capacity_bytes:.0%} full",
        peak / found.capacity_bytes,
        f"predicted peak {format_bytes(found.peak_bytes)} of {format_bytes(found.capacity_bytes)}",
        f"counted on the fullest rank {format_bytes(counted)} of states and saved activations",
        f"largest: {found.largest}",
    )


def _imbalance(record: RunRecord, pace: CriticalRank) -> Iterator[Finding]:
    """A hot expert rank makes every other rank of its group wait at the combine; any late rank does
    so elsewhere."""
    ep = record.plan.layout.ep
    factors = [
        (rank_load_factor(load.rank_counts or load.counts, ep), load.layer)
        for step in steady_steps(record)
        for load in step.loads
        if ep > 1
    ]
    typical = median(factor for factor, _ in factors) if factors else 1.0
    late = pace.mean_late_wait_s / pace.step_s
    if typical > UNEVEN_LOAD_FACTOR:
        worst, layer = max(factors)
        experts_s = sum(
            share.seconds for share in record.plan.estimate.shares if share.part is TimePart.EXPERTS
        )
        cost = max(late, experts_s * (typical - 1) / pace.step_s)
        yield _finding(
            Wall.COMPUTE,
            Cause.IMBALANCE,
            f"The hottest expert rank gets {typical:.2f} x the mean load",
            cost,
            f"median over layers and steps {typical:.2f} x the mean, highest {worst:.2f} x in layer {layer} (measured)",
            f"the plan assumed {record.plan.workload.load_factor:.2f} x",
            f"ranks wait {format_seconds(pace.mean_late_wait_s)} a step for late ones (measured, mean over ranks)",
        )
    elif late > _MIN_SHARE:
        seen = f"{format_seconds(pace.mean_late_wait_s)} a step (measured, mean over ranks); rank {pace.rank} waits least"
        title = f"Ranks wait {late:.0%} of the step for a late one"
        yield _finding(Wall.COMMUNICATION, Cause.STRAGGLER, title, late, seen)
