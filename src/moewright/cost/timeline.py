"""The pipeline: from the seconds of one micro-batch on each rank or virtual stage to the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moewright.rules.events import StageSeconds, ends_s
from moewright.rules.schedule import timetable
from moewright.spec.layout import Layout

Numbers = float | np.ndarray


def simulated_s(layout: Layout, stages: Sequence[StageSeconds], *, micro_batches: int, transfer_s: float) -> float:
    """Seconds of all micro-batches through the layout's timetable, row by row; `stages` are the virtual stages.

    A transfer delays who waits for it and nobody else.
    """
    table = timetable(layout, micro_batches)
    return max(ends_s(layout, table, stages, transfer_s=transfer_s).values())


def pipeline_s(stage_s: Sequence[float], *, vpp: int, micro_batches: int, transfer_s: float) -> float:
    """Seconds of all micro-batches through a 1F1B (vpp 1) or interleaved pipeline.

    stage_s: forward + backward of one micro-batch on each pipeline rank, all its chunks, without transfers;
    transfer_s: one activation to the next stage.
    1F1B exposes two transfers a micro-batch, an activation and a gradient: what a rank sends and what it receives go
    both ways at once. The interleaved table posts them a step ahead, so only those of the fill and drain remain.
    1F1B: sum of S + (m - 1) max S, with S the slowest stage setting the pace; interleaved: m max S + (pp - 1)/v mean S.
    """
    return float(
        closed_s(
            max(stage_s), sum(stage_s), pp=len(stage_s), vpp=vpp, micro_batches=micro_batches, transfer_s=transfer_s
        )
    )


def closed_s(
    slowest_s: Numbers, all_s: Numbers, *, pp: Numbers, vpp: Numbers, micro_batches: Numbers, transfer_s: Numbers
) -> np.ndarray:
    """`pipeline_s` from the slowest of pp stages and the sum of all; every argument may be an array."""
    waits = np.equal(vpp, 1)
    fill = np.where(waits, np.subtract(all_s, slowest_s), np.multiply(all_s, np.subtract(pp, 1)) / np.multiply(vpp, pp))
    shown = np.where(waits, np.add(micro_batches, pp) - 1, pp) * np.greater(pp, 1)
    return np.asarray(np.multiply(micro_batches, slowest_s) + fill + 2 * shown * transfer_s)
