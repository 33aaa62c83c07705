"""Which wall holds one of our runs back: shares of the step, load of the experts, room in memory."""

from __future__ import annotations

from statistics import median

from moewright.rules.routing import rank_load_factor
from moewright.spec.finding import Finding, Wall
from moewright.spec.ledger import Component, Ledger, Phase
from moewright.spec.plan import TimePart
from moewright.spec.run import RunRecord
from moewright.spec.units import show_bytes, show_seconds
from moewright.tune.steps import median_phases, median_step_s, settled

# Thresholds of docs/formulas.md 10: exposed communication above about 15% of the step, memory within 10% of capacity.
COMMUNICATION_SHARE = 0.15
HOST_SHARE = 0.10
MEMORY_SHARE = 0.90
LOAD_FACTOR = 1.20  # hottest expert rank over the mean

COMM_FIXES = {
    TimePart.EP_COMM: (
        "fold EP into the fast domain (EP x ETP no wider than it)",
        "take a dispatcher that sends a token once per destination rank",
        "overlap the expert all-to-all with compute (overlap=ep)",
    ),
    TimePart.DP_COMM: (
        "more micro-batches a step (a larger global batch) spread the one gradient reduction",
        "overlap it with backward and the gather with forward (overlap=grad+param)",
    ),
}
MEMORY_FIXES = (
    "recompute=moe_act+layernorm",
    "a better split of layers over pipeline ranks (layout=...)",
    "offload activations or the optimizer",
    "recompute=moe, then recompute=full",
)
HOST_FIXES = ("a larger micro-batch (mbs)", "a smaller tp", "pin each rank's threads to its own cores")
COMPUTE_FIXES = (
    "more tokens an expert and call: a larger mbs, or a larger ep",
    "fused elementwise kernels",
    "a lower compute precision, where the device has a faster rate for it",
)
BALANCE_FIXES = (
    "a larger auxiliary loss coefficient, while the loss does not suffer",
    "a capacity factor for the hottest experts",
    "a smaller ep, so that one rank averages over more experts",
)


def diagnose(record: RunRecord) -> tuple[Finding, ...]:
    """Findings, the wall to work on first in front; never empty for a run that has steps.

    Shares are medians over settled steps. Forward and backward contain the expert all-to-all, which the engine does
    not time apart: its predicted time is moved from compute to communication, and the evidence says so.
    """
    step_s = median_step_s(record)
    if not step_s:
        return ()
    walls = sorted(
        (_communication(record, step_s), _host(record, step_s), _compute(record, step_s)), key=lambda each: -each.share
    )
    crossed = [each for each in walls if _crosses(each)]
    pressing = [each for each in (_memory(record), *crossed, _imbalance(record, step_s)) if each is not None]
    return (*pressing, *(each for each in walls[:1] if each not in pressing))


def _crosses(finding: Finding) -> bool:
    limits = {Wall.COMMUNICATION: COMMUNICATION_SHARE, Wall.HOST: HOST_SHARE}
    return finding.wall in limits and finding.share > limits[finding.wall]


def _expert_comm_s(record: RunRecord) -> float:
    return sum(share.seconds for share in record.plan.estimate.shares if share.part is TimePart.EP_COMM)


def _communication(record: RunRecord, step_s: float) -> Finding:
    phases = dict(median_phases(record))
    reduce_s, gather_s = phases.get(Phase.GRAD_REDUCE, 0.0), phases.get(Phase.PARAM_GATHER, 0.0)
    experts_s = _expert_comm_s(record)
    first = TimePart.EP_COMM if experts_s > reduce_s + gather_s else TimePart.DP_COMM
    share = (reduce_s + gather_s + experts_s) / step_s
    return Finding(
        wall=Wall.COMMUNICATION,
        title=f"Communication takes {share:.0%} of the step",
        share=share,
        evidence=(
            f"gradient reduction {show_seconds(reduce_s)}, {reduce_s / step_s:.1%} of the step",
            f"weight gather {show_seconds(gather_s)}, {gather_s / step_s:.1%}",
            f"expert all-to-all inside forward and backward {show_seconds(experts_s)}, {experts_s / step_s:.1%} "
            "(predicted; not timed apart)",
        ),
        fixes=(*COMM_FIXES[first], *(fix for part, fixes in COMM_FIXES.items() if part is not first for fix in fixes)),
    )


def _host(record: RunRecord, step_s: float) -> Finding:
    phases = dict(median_phases(record))
    data_s, other_s = phases.get(Phase.DATA, 0.0), phases.get(Phase.OTHER, 0.0)
    share = (data_s + other_s) / step_s
    return Finding(
        wall=Wall.HOST,
        title=f"Host work outside the model takes {share:.0%} of the step",
        share=share,
        evidence=(
            f"data {show_seconds(data_s)}, {data_s / step_s:.1%} of the step",
            f"unnamed work between phases {show_seconds(other_s)}, {other_s / step_s:.1%}",
        ),
        fixes=HOST_FIXES,
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
        title=f"Compute takes {share:.0%} of the step",
        share=share,
        evidence=(parts, f"MFU {mfu:.1%} of the device's measured or stated peak"),
        fixes=COMPUTE_FIXES,
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
        title=f"Memory is {peak / capacity:.0%} full",
        share=peak / capacity,
        evidence=(
            f"predicted peak {show_bytes(record.plan.estimate.peak_bytes)} of {show_bytes(capacity)}",
            f"counted on the fullest rank {show_bytes(counted)} of states and saved activations",
            f"largest: {record.plan.estimate.largest}",
        ),
        fixes=MEMORY_FIXES,
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
        title=f"The hottest expert rank gets {typical:.2f} x the mean load",
        share=experts_s * (typical - 1) / step_s,
        evidence=(
            f"median over layers and steps {typical:.2f} x the mean, highest {worst:.2f} x in layer {layer}",
            f"the plan assumed {record.plan.workload.load_factor:.2f} x",
        ),
        fixes=BALANCE_FIXES,
    )
