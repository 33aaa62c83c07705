"""The timetable of a step as a page draws it: rows as packed arrays, and what each keeps."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass

import numpy as np

from moewright.cost.pipeline_rows import simulate_plan
from moewright.rules.timetable.stages import virtual_stage
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.view.plan_view import JobView, build_job_view


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TimetableView(Record):
    """The rows of every pipeline rank, in packed arrays of `ranks` x `rows`.

    `kinds` and `chunks` are bytes, `micro_batches` 32-bit integers and `starts` and `lengths`
    64-bit floats in seconds, little-endian, in base64. `kinds` are 0 F, 1 B, 2 W. `saved_bytes`
    [ranks][chunks] is what a forward keeps, `peaks` the predicted peak of each rank. `idle_s` is
    what the rank that works longest waits; transfers take `transfer_s` in the estimate, and no time
    in the rows.
    """

    job: JobView
    ranks: int
    rows: int
    micro_batch_count: int
    kinds: str
    micro_batches: str
    chunks: str
    starts: str
    lengths: str
    end_s: float
    step_s: float
    idle_s: float
    bubble_s: float
    transfer_s: float
    saved_bytes: tuple[tuple[float, ...], ...]
    peaks: tuple[int, ...]
    capacity_bytes: int

    def title(self) -> str:
        """Return the job."""
        return self.job.title()

    def to_rows(self) -> list[Row]:
        """Return a row for the whole timetable."""
        return [
            {"ranks": self.ranks, "rows": self.rows, "end_s": self.end_s, "idle_s": self.idle_s}
        ]


def build_timetable_view(plan: Plan) -> TimetableView:
    """Simulate the timetable of a plan and pack it."""
    simulated = simulate_plan(plan)
    layout = plan.layout
    seconds = {share.part.value: share.seconds for share in plan.estimate.shares}
    ranks, rows = simulated.start_s.shape
    return TimetableView(
        job=build_job_view(plan),
        ranks=ranks,
        rows=rows,
        micro_batch_count=plan.estimate.micro_batches,
        kinds=_pack(simulated.kind, "<u1"),
        micro_batches=_pack(simulated.micro_batch, "<u4"),
        chunks=_pack(simulated.chunk, "<u1"),
        starts=_pack(simulated.start_s, "<f8"),
        lengths=_pack(simulated.length_s, "<f8"),
        end_s=simulated.end_s,
        step_s=plan.estimate.step_s,
        idle_s=simulated.idle_s,
        bubble_s=seconds.get("bubble", 0.0),
        transfer_s=seconds.get("pp_comm", 0.0),
        saved_bytes=tuple(
            tuple(
                float(simulated.prices.saved_bytes[virtual_stage(layout, rank, chunk)])
                for chunk in range(layout.vpp)
            )
            for rank in range(ranks)
        ),
        peaks=tuple(ledger.device_bytes for ledger in plan.estimate.ledgers),
        capacity_bytes=plan.estimate.capacity_bytes,
    )


def _pack(values: np.ndarray, dtype: str) -> str:
    return b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()
