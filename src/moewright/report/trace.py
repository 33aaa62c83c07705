"""The predicted pipeline timetable as a Chrome trace: one track a pipeline rank, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moewright.codec import layout_text, write_text
from moewright.rules.events import ends_s
from moewright.rules.schedule import Kind, timetable
from moewright.spec.plan import Estimate, Plan, TimePart

AFTER_PIPELINE = (TimePart.DP_COMM, TimePart.OPTIMIZER)  # parts of a step that follow the last backward
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
BACKWARD_OVER_FORWARD = 2.0  # a backward has twice the FLOPs
US = 1e6


def write_trace(plan: Plan, path: Path) -> None:
    """Write the trace as JSON. BadInput when there is no timetable for the layout or the file cannot be written."""
    write_text(path, json.dumps(trace(plan)))


def trace(plan: Plan) -> dict[str, Any]:
    """Trace events of one step, times in microseconds.

    Equal chunks, a backward twice a forward, free communication; scaled so that the last backward ends where the
    predicted step stands before gradient reduction and optimizer.
    """
    table = timetable(plan.layout, plan.estimate.micro_batches)
    pp = plan.layout.pp
    unit = ends_s(table, forward_s=1.0, backward_s=BACKWARD_OVER_FORWARD)
    scale_us = US * _pipeline_s(plan.estimate) / max(unit.values())
    events: list[dict[str, Any]] = [_name("process_name", 0, layout_text(plan.layout))]
    for rank, rows in enumerate(table):
        events.append(_name("thread_name", rank, f"pipeline rank {rank}"))
        for row in rows:
            length = 1.0 if row.kind is Kind.F else BACKWARD_OVER_FORWARD
            stage = row.chunk * pp + rank
            events.append(
                {
                    "name": f"{row.kind}{row.micro_batch}" + (f" chunk {row.chunk}" if plan.layout.vpp > 1 else ""),
                    "cat": NAMES[row.kind],
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
    return estimate.step_s - sum(share.seconds for share in estimate.shares if share.part in AFTER_PIPELINE)


def _name(what: str, thread: int, text: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": {"name": text}}
