"""The predicted pipeline timetable as a Chrome trace: one track a pipeline rank, for Perfetto or
chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moewright.codec import format_layout, write_text
from moewright.rules.schedule import RowKind, split_backwards, timetable
from moewright.rules.simulate import StageSeconds, row_end_times
from moewright.rules.stages import virtual_stage
from moewright.spec.plan import Estimate, Plan, TimePart

AFTER_PIPELINE = (
    TimePart.DP_COMM,
    TimePart.OPTIMIZER,
)  # parts of a step that follow the last backward
KIND_NAMES = {RowKind.F: "forward", RowKind.B: "backward", RowKind.W: "weight gradients"}
# A backward has twice the FLOPs: as many for the gradients of inputs as for those of weights.
UNIT_SECONDS = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
US_PER_S = 1e6


def write_trace(plan: Plan, path: Path) -> None:
    """Write the trace as JSON. BadInput when there is no timetable for the layout or the file
    cannot be written."""
    write_text(path, json.dumps(build_trace(plan)))


def build_trace(plan: Plan) -> dict[str, Any]:
    """Trace events of one step, times in microseconds.

    Equal chunks, a backward twice a forward, free communication; scaled so that the last backward
    ends where the predicted step stands before gradient reduction and optimizer.
    """
    layout = plan.layout
    table = timetable(layout, plan.estimate.micro_batches)
    unit = row_end_times(layout, table, [UNIT_SECONDS] * (layout.pp * layout.vpp))
    scale_us = US_PER_S * _pipeline_s(plan.estimate) / max(unit.values())
    events: list[dict[str, Any]] = [_name("process_name", 0, format_layout(layout))]
    for rank, rows in enumerate(table):
        split = split_backwards(rows)
        events.append(_name("thread_name", rank, f"pipeline rank {rank}"))
        for row in rows:
            whole = row.kind is RowKind.B and (row.micro_batch, row.chunk) not in split
            length = 2.0 if whole else 1.0
            stage = virtual_stage(layout, rank, row.chunk)
            events.append(
                {
                    "name": f"{row.kind}{row.micro_batch}"
                    + (f" chunk {row.chunk}" if layout.vpp > 1 else ""),
                    "cat": KIND_NAMES[row.kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": (unit[row.kind, row.micro_batch, stage] - length) * scale_us,
                    "dur": length * scale_us,
                    "args": {"micro_batch": row.micro_batch, "virtual_stage": stage},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _pipeline_s(estimate: Estimate) -> float:
    return estimate.step_s - sum(
        share.seconds for share in estimate.shares if share.part in AFTER_PIPELINE
    )


def _name(what: str, thread: int, text: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": {"name": text}}
