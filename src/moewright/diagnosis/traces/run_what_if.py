"""A change of a traced run: all ranks replayed together, with degrees and schedules of its plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moewright.cost.ledger import predict_rank_ledger
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.rank_replay import RankGraph
from moewright.diagnosis.traces.schedule_change import gain_of_schedule
from moewright.diagnosis.traces.trace_changes import NETWORK, TraceChange
from moewright.diagnosis.traces.what_if_trace import ALL_RANKS, TraceWhatIf
from moewright.rules.grid import group_ranks
from moewright.rules.job import Job, plan_job
from moewright.rules.limits.legality import check_legality
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Collective
from moewright.spec.layout import Schedule
from moewright.spec.plan import Plan

_EXPERT_GRADIENTS = "edp"
_GRADIENTS = "dp_cp"


def replay_run(captures: Sequence[Capture], plan: Plan, change: TraceChange) -> TraceWhatIf:
    """Replay all ranks of a run, unchanged and changed.

    Raises:
        BadInput: the plan's other degree or schedule is not legal, or the traces do not carry it.
    """
    graph = RankGraph(captures, plan.layout)
    job = plan_job(plan)
    shares: Mapping[str, float] = {}
    added_s = 0.0
    count = len(captures[0].steps)
    if change.ep:
        shares, added_bytes = _compare_volumes(job, change.ep)
        rate_s = _measure_rate(graph, job) if added_bytes else 0.0
        added_s += added_bytes * rate_s / change.speeds.get(NETWORK, 1.0)
    if change.schedule:
        added_s += gain_of_schedule(captures, job, Schedule(change.schedule))
    changed_s = graph.replay(change, shares) / count + added_s
    return TraceWhatIf(
        rank=ALL_RANKS,
        steps=count,
        change=change.title(),
        speeds=dict(change.speeds),
        measured_s=graph.measured_s / count,
        replayed_s=graph.replay(TraceChange(), {}) / count,
        low_s=changed_s,
        high_s=changed_s,
    )


def _compare_volumes(job: Job, ep: int) -> tuple[dict[str, float], float]:
    """Return what each group sends under another degree, as a share of before, and what is new.

    New is what a group sends that sent nothing before, in bytes of a step.

    Raises:
        BadInput: the layout with that degree is not legal.
    """
    other = replace(job, layout=replace(job.layout, ep=ep))
    reasons = check_legality(other)
    if reasons:
        raise BadInput(*reasons)
    before, after = _sum_volumes(job), _sum_volumes(other)
    shares = {group: after.get(group, 0.0) / volume for group, volume in before.items() if volume}
    return shares, sum(volume for group, volume in after.items() if not before.get(group))


def _sum_volumes(job: Job) -> dict[str, float]:
    """Return the bytes that cross the links of the first rank in a step, by group.

    In a ring (n-1)/n of the full buffer passes each rank, twice in an all-reduce; an exchange keeps
    one part of n.
    """
    volumes: dict[str, float] = defaultdict(float)
    for row in predict_rank_ledger(job, rank=0, selection=None).comm:
        ranks = len(group_ranks(job.layout, row.group, 0))
        volumes[row.group] += row.bytes * _link_share(row.op, ranks)
    return dict(volumes)


def _link_share(op: Collective, ranks: int) -> float:
    """Return the bytes that cross a rank's link for each byte that it hands in."""
    if op is Collective.P2P:
        return 1.0
    if op is Collective.ALL_GATHER:
        return ranks - 1.0
    return (1 - 1 / ranks) * (2.0 if op is Collective.ALL_REDUCE else 1.0)


def _measure_rate(graph: RankGraph, job: Job) -> float:
    """Return the seconds a byte that the exchange of gradients took.

    Raises:
        BadInput: no gradients were exchanged in the trace.
    """
    volumes = _sum_volumes(job)
    for group in (_EXPERT_GRADIENTS, _GRADIENTS):
        if volumes.get(group):
            return graph.time_group(group) / graph.steps / volumes[group]
    rule = "is not carried: experts' gradients would be exchanged, and nothing like it was traced"
    raise BadInput(Reason(field="--what-if ep", rule=rule, nearest=f"ep={job.layout.ep}"))
