"""The time of another pipeline schedule, from the passes of a traced one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.rules.grid import coordinate
from moewright.rules.job import Job
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, Schedule
from moewright.spec.ledger import StepPhase

_PIPELINE = "pp"
_WHOLE = (Schedule.ONE_F_ONE_B, Schedule.ZB_H1)  # a stage of a rank is a single chunk
_KINDS_OF_PHASE = (
    (StepPhase.FORWARD, (RowKind.F,)),
    (StepPhase.BACKWARD, (RowKind.B, RowKind.W)),
)


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
