"""The pipeline: from the seconds of one micro-batch on each rank or virtual stage to the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence

from moewright.rules.events import StageSeconds, ends_s
from moewright.rules.schedule import timetable
from moewright.spec.layout import Layout


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
    ranks = len(stage_s)
    if ranks == 1:
        return micro_batches * stage_s[0]
    if vpp == 1:
        total = sum(stage_s) + 2 * transfer_s * ranks
        return total + (micro_batches - 1) * (max(stage_s) + 2 * transfer_s)
    fill = (ranks - 1) / vpp * sum(stage_s) / ranks
    return micro_batches * max(stage_s) + fill + 2 * ranks * transfer_s
