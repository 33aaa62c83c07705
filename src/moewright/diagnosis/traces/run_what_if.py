"""A change of a traced run: all ranks replayed together, with degrees and schedules of its plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from moewright.cost.ledger import predict_rank_ledger
from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.diagnosis.traces.rank_replay import RankGraph
from moewright.diagnosis.traces.trace_changes import NETWORK, TraceChange
from moewright.diagnosis.traces.what_if_trace import ALL_RANKS, TraceWhatIf
from moewright.rules.grid import coordinate, group_ranks
from moewright.rules.job import Job, plan_job
from moewright.rules.limits.legality import check_legality
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout, Schedule
from moewright.spec.ledger import StepPhase
from moewright.spec.plan import Plan

_EXPERT_GRADIENTS = "edp"
_GRADIENTS = "dp_cp"
_PIPELINE = "pp"
_WHOLE = (Schedule.ONE_F_ONE_B, Schedule.ZB_H1)  # a stage of a rank is a single chunk
_KINDS_OF_PHASE = (
    (StepPhase.FORWARD, (RowKind.F,)),
    (StepPhase.BACKWARD, (RowKind.B, RowKind.W)),
)


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


def gain_of_schedule(captures: Sequence[Capture], job: Job, schedule: Schedule) -> float:
    """Return the seconds that a step takes more under another schedule of the same stages.

    The passes of each virtual stage take what they took in the traces, waits for neighbours left
    out; both timetables are simulated with them. Stages that were apart may be joined.

    Raises:
        BadInput: the other schedule cuts layers or backwards finer, or the traces do not name the
            passes.
    """
    layout = job.layout
    vpp = 1 if schedule in _WHOLE else layout.vpp
    other = replace(layout, schedule=schedule, vpp=vpp)
    field = "--what-if schedule"
    if layout.pp == 1 or (schedule not in _WHOLE and layout.vpp == 1):
        rule = "is not carried: it cuts the layers of a rank finer than the trace does"
        raise BadInput(Reason(field=field, value=schedule.value, rule=rule))
    if schedule.splits_backward and not layout.schedule.splits_backward:
        rule = "is not carried: it splits the backward, whose two parts the trace does not tell"
        raise BadInput(Reason(field=field, value=schedule.value, rule=rule))
    table = timetable(layout, job.micro_batches)
    other_table = timetable(other, job.micro_batches)
    stages = _measure_stages(captures, layout, table)
    joined = [
        _join(stages[first : first + layout.vpp // vpp])
        for first in range(0, len(stages), layout.vpp // vpp)
    ]
    before_s = max(row_end_times(layout, table, stages).values())
    return max(row_end_times(other, other_table, joined).values()) - before_s


def _join(stages: Sequence[StageSeconds]) -> StageSeconds:
    return StageSeconds(
        forward=sum(stage.forward for stage in stages),
        input_backward=sum(stage.input_backward for stage in stages),
        weight_backward=sum(stage.weight_backward for stage in stages),
    )


def _measure_stages(
    captures: Sequence[Capture], layout: Layout, table: Sequence[Sequence[TimetableRow]]
) -> list[StageSeconds]:
    """Return the seconds of a pass of each virtual stage, the median of all that were traced."""
    lengths: dict[tuple[int, RowKind], list[float]] = defaultdict(list)
    for capture in captures:
        rank = coordinate(layout, capture.rank, _PIPELINE)
        for step in capture.steps:
            for phase, kinds in _KINDS_OF_PHASE:
                rows = [row for row in table[rank] if row.kind in kinds]
                passes = list(_list_passes(capture, phase.value, step))
                if len(passes) != len(rows):
                    rule = (
                        f"has {len(passes)} passes {phase.value} in a step of rank {capture.rank}, "
                        f"its plan {len(rows)}"
                    )
                    raise BadInput(Reason(field=str(capture.path), rule=rule))
                for row, seconds in zip(rows, passes, strict=True):
                    lengths[virtual_stage(layout, rank, row.chunk), row.kind].append(seconds)
    return [
        StageSeconds(
            forward=median(lengths[stage, RowKind.F]),
            input_backward=median(lengths[stage, RowKind.B]),
            weight_backward=median(lengths.get((stage, RowKind.W), [0.0])),
        )
        for stage in range(layout.pp * layout.vpp)
    ]


def _list_passes(capture: Capture, name: str, step: tuple[float, float]) -> Iterator[float]:
    """Yield the seconds of a step's ranges of that name, without waits of the pipeline in them."""
    ranges = capture.host_ranges
    if ranges is None or name not in ranges.names:
        return
    table = capture.kernels
    waits = table.has_kind(KernelKind.COMMUNICATION) & np.array(
        [
            index >= 0 and capture.channels[index].group == _PIPELINE
            for index in table.channel_index.tolist()
        ],
        dtype=bool,
    )
    spans = table.intervals(waits)
    for index in np.flatnonzero(ranges.name_index == ranges.names.index(name)):
        start_s, end_s = float(ranges.start_s[index]), float(ranges.end_s[index])
        if not step[0] <= start_s < step[1]:
            continue
        inside = np.minimum(spans[:, 1], end_s) - np.maximum(spans[:, 0], start_s)
        yield end_s - start_s - float(np.maximum(inside, 0.0).sum())
