"""The predicted pipeline timetable as a Chrome trace, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moewright.codec import format_layout, write_text
from moewright.rules.timetable.schedule import split_backwards, timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.plan import Estimate, Plan, TimePart

# Parts of a step that follow the last backward.
AFTER_PIPELINE = (TimePart.DP_COMM, TimePart.OPTIMIZER)
KIND_NAMES = {RowKind.F: "forward", RowKind.B: "backward", RowKind.W: "weight gradients"}
# A backward has twice the FLOPs of a forward, half of them for the gradients of the inputs and
# half for those of the weights.
UNIT_SECONDS = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
US_PER_S = 1e6


def write_trace(plan: Plan, path: Path) -> None:
    """Write the trace of a plan's step as JSON.

    Raises:
        BadInput: The layout has no timetable, or the file cannot be written.
    """
    write_text(path, json.dumps(build_trace(plan)))


def build_trace(plan: Plan) -> dict[str, Any]:
    """Build the trace events of one step, one track a pipeline rank, times in microseconds.

    Model chunks are equal, a backward takes twice a forward and communication is free. The times
    are scaled so that the last backward ends where the predicted step reaches gradient reduction
    and the optimizer.

    Raises:
        BadInput: The layout has no timetable.
    """
    layout = plan.layout
    table = timetable(layout, plan.estimate.micro_batches)
    ends = row_end_times(layout, table, [UNIT_SECONDS] * (layout.pp * layout.vpp))
    scale_us = US_PER_S * _pipeline_s(plan.estimate) / max(ends.values())
    events: list[dict[str, Any]] = [_metadata_event("process_name", 0, format_layout(layout))]
    for rank, rows in enumerate(table):
        split = split_backwards(rows)
        events.append(_metadata_event("thread_name", rank, f"pipeline rank {rank}"))
        for row in rows:
            is_full_backward = row.kind is RowKind.B and (row.micro_batch, row.chunk) not in split
            duration = 2.0 if is_full_backward else 1.0
            stage = virtual_stage(layout, rank, row.chunk)
            name = f"{row.kind}{row.micro_batch}"
            if layout.vpp > 1:
                name += f" chunk {row.chunk}"
            event = {
                "name": name,
                "cat": KIND_NAMES[row.kind],
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": (ends[row.kind, row.micro_batch, stage] - duration) * scale_us,
                "dur": duration * scale_us,
                "args": {"micro_batch": row.micro_batch, "virtual_stage": stage},
            }
            events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _pipeline_s(estimate: Estimate) -> float:
    """Return the predicted seconds from the start of a step to the end of its last backward."""
    return estimate.step_s - sum(
        share.seconds for share in estimate.shares if share.part in AFTER_PIPELINE
    )


def _metadata_event(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
