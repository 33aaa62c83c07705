"""Which wall holds one of our runs back: shares of the step, load of the experts, room in memory."""

from __future__ import annotations

from statistics import median

from moewright.rules.routing import rank_load_factor
from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.ledger import Component, Ledger, Phase
from moewright.spec.plan import TimePart
from moewright.spec.run import RunRecord
from moewright.spec.units import show_bytes, show_seconds
from moewright.tune.advise import fixes_for
from moewright.tune.steps import median_phases, median_step_s, settled
from moewright.tune.walls import MEMORY_SHARE, ordered

LOAD_FACTOR = 1.20  # hottest expert rank over the mean


def diagnose(record: RunRecord) -> tuple[Finding, ...]:
    """Findings, the wall to work on first in front; never empty for a run that has steps.

    Shares are medians over settled steps. Forward and backward contain the expert all-to-all, which the engine does
    not time apart: its predicted time is moved from compute to communication, and the evidence says so.
    """
    step_s = median_step_s(record)
    if not step_s:
        return ()
    walls = (_communication(record, step_s), _host(record, step_s), _compute(record, step_s))
    found = (_memory(record), *walls, _imbalance(record, step_s))
    return ordered(each for each in found if each is not None)


def _expert_comm_s(record: RunRecord) -> float:
    return sum(share.seconds for share in record.plan.estimate.shares if share.part is TimePart.EP_COMM)


def _communication(record: RunRecord, step_s: float) -> Finding:
    phases = dict(median_phases(record))
    reduce_s, gather_s = phases.get(Phase.GRAD_REDUCE, 0.0), phases.get(Phase.PARAM_GATHER, 0.0)
    experts_s = _expert_comm_s(record)
    first = Cause.EP if experts_s > reduce_s + gather_s else Cause.DP
    share = (reduce_s + gather_s + experts_s) / step_s
    return Finding(
        wall=Wall.COMMUNICATION,
        cause=first,
        title=f"Communication takes {share:.0%} of the step",
        share=share,
        evidence=(
            f"gradient reduction {show_seconds(reduce_s)}, {reduce_s / step_s:.1%} of the step",
            f"weight gather {show_seconds(gather_s)}, {gather_s / step_s:.1%}",
            f"expert all-to-all inside forward and backward {show_seconds(experts_s)}, {experts_s / step_s:.1%} "
            "(predicted; not timed apart)",
        ),
        fixes=fixes_for(first),
    )


def _host(record: RunRecord, step_s: float) -> Finding:
    phases = dict(median_phases(record))
    data_s, other_s = phases.get(Phase.DATA, 0.0), phases.get(Phase.OTHER, 0.0)
    share = (data_s + other_s) / step_s
    cause = Cause.DATA if data_s > other_s else Cause.HOST_OTHER
    return Finding(
        wall=Wall.HOST,
        cause=cause,
        title=f"Host work outside the model takes {share:.0%} of the step",
        share=share,
        evidence=(
            f"data {show_seconds(data_s)}, {data_s / step_s:.1%} of the step",
            f"unnamed work between phases {show_seconds(other_s)}, {other_s / step_s:.1%}",
        ),
        fixes=fixes_for(cause),
    )


def _compute(record: RunRecord, step_s: float) -> Finding:
    phases = dict(median_phases(record))
    working = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    model_s = sum(phases.get(phase, 0.0) for phase in working) - _expert_comm_s(record)
    share = max(0.0, model_s / step_s)
    parts = ", ".join(f"{phase} {show_seconds(phases.get(phase, 0.0))}" for phase in working)
    mfu = median([step.mfu for step in settled(record)])
    return Finding(
        wall=Wall.COMPUTE,
        cause=Cause.RATES,
        title=f"Compute takes {share:.0%} of the step",
        share=share,
        evidence=(parts, f"MFU {mfu:.1%} of the device's measured or stated peak"),
        fixes=fixes_for(Cause.RATES),
    )


def _memory(record: RunRecord) -> Finding | None:
    """The fullest rank: what it counted, plus what only the prediction knows (transients, allowances)."""
    capacity = record.plan.estimate.capacity_bytes
    counted = max((_held(ledger) for ledger in record.ledgers), default=0)
    peak = max(counted, record.plan.estimate.peak_bytes)
    if peak <= MEMORY_SHARE * capacity:
        return None
    return Finding(
        wall=Wall.MEMORY,
        cause=Cause.CAPACITY,
        title=f"Memory is {peak / capacity:.0%} full",
        share=peak / capacity,
        evidence=(
            f"predicted peak {show_bytes(record.plan.estimate.peak_bytes)} of {show_bytes(capacity)}",
            f"counted on the fullest rank {show_bytes(counted)} of states and saved activations",
            f"largest: {record.plan.estimate.largest}",
        ),
        fixes=fixes_for(Cause.CAPACITY),
    )


def _held(ledger: Ledger) -> int:
    return sum(row.bytes for row in ledger.memory if row.component is not Component.HOST)


def _imbalance(record: RunRecord, step_s: float) -> Finding | None:
    """A hot expert rank makes every other rank of its group wait at the combine."""
    ep = record.plan.layout.ep
    factors = [
        (rank_load_factor(load.counts, ep), load.layer) for step in settled(record) for load in step.loads if ep > 1
    ]
    typical = median(factor for factor, _ in factors) if factors else 1.0
    if typical <= LOAD_FACTOR:
        return None
    worst, layer = max(factors)
    experts_s = sum(share.seconds for share in record.plan.estimate.shares if share.part is TimePart.EXPERTS)
    return Finding(
        wall=Wall.COMPUTE,
        cause=Cause.IMBALANCE,
        title=f"The hottest expert rank gets {typical:.2f} x the mean load",
        share=experts_s * (typical - 1) / step_s,
        evidence=(
            f"median over layers and steps {typical:.2f} x the mean, highest {worst:.2f} x in layer {layer}",
            f"the plan assumed {record.plan.workload.load_factor:.2f} x",
        ),
        fixes=fixes_for(Cause.IMBALANCE),
    )
