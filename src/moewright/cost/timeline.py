"""The pipeline: from the seconds of one micro-batch on each rank or virtual stage to the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moewright.rules.events import StageSeconds, ends_s
from moewright.rules.schedule import forward_order, group_of, timetable, warmup
from moewright.spec.layout import Layout

Numbers = float | np.ndarray


def simulated_s(layout: Layout, stages: Sequence[StageSeconds], *, micro_batches: int, transfer_s: float) -> float:
    """Seconds of all micro-batches through the layout's timetable, row by row; `stages` are the virtual stages.

    A transfer delays who waits for it and nobody else.
    """
    table = timetable(layout, micro_batches)
    return max(ends_s(layout, table, stages, transfer_s=transfer_s).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What of a 1F1B or interleaved timetable its closed form needs: worked out once for a layout.

    `warm` [pp, vpp] counts the forwards of each chunk that a rank runs before its first backward; `alone` [pp] says
    where these are all that it has.
    """

    pp: int
    vpp: int
    micro_batches: int
    group: int
    warm: np.ndarray
    alone: np.ndarray

    def total_s(self, forward_s: np.ndarray, backward_s: np.ndarray, *, transfer_s: float) -> float:
        """Seconds of all micro-batches, from those of one on each virtual stage, in stage order.

        A rank is busy for m S. It cannot start before a forward has come down to it, nor end before a backward has gone
        up from it; and between it waits twice: for its first backward, once its warm-up is done, and for its last ones
        in the drain, which is a warm-up run backwards. The longest of these paths is the step: exact for equal chunks,
        and for others no more than the timetable takes. With 32 micro-batches a stage 1F1B and interleaved stages with
        uneven ends are within 1 % of it; virtual stages that differ inside stall each other by some percent more
        (tests/cost/test_timeline.py).
        """
        forward = forward_s.reshape(self.vpp, self.pp).T
        backward = backward_s.reshape(self.vpp, self.pp).T
        before, first_wait = self._filled(forward, backward)
        after, last_wait = self._filled(backward, forward)
        waits = np.maximum(first_wait, 0) + np.maximum(last_wait, 0)
        once = np.maximum(0, np.maximum(first_wait, last_wait))
        busy = self.micro_batches * (forward + backward).sum(axis=1)
        longest = float((before + busy + after + np.where(self.alone, once, waits)).max())
        return longest + float(shown_transfers(self.pp, self.vpp, self.micro_batches)) * transfer_s

    def _filled(self, down: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[pp] seconds before each rank starts, and that it waits after its warm-up for what comes back.

        The first micro-batch goes through every chunk of every rank: each lap takes as long as the ranks in turn, or as
        the first rank needs for the group before it comes back to the first micro-batch.
        """
        starts = np.cumsum(down[:, 0]) - down[:, 0]
        group = min(self.group, self.micro_batches)
        laps = np.maximum(down[:, :-1].sum(axis=0), group * down[0, :-1]).sum()
        back = np.cumsum(up[::-1, -1])[::-1] - up[:, -1]
        return starts, laps + down[:, -1].sum() + back - starts - (self.warm * down).sum(axis=1)


def pipeline_of(layout: Layout, micro_batches: int) -> Pipeline:
    """Of a layout with a 1F1B or interleaved timetable."""
    ahead = np.array([warmup(layout, micro_batches, rank) + 1 for rank in range(layout.pp)])
    most = micro_batches * layout.vpp
    group = group_of(layout) if layout.vpp > 1 else micro_batches
    order = forward_order(layout, min(micro_batches, 3 * group))[: int(ahead.max())]
    seen = np.cumsum(np.eye(layout.vpp)[[chunk for _, chunk in order]], axis=0)
    return Pipeline(
        pp=layout.pp,
        vpp=layout.vpp,
        micro_batches=micro_batches,
        group=group,
        warm=seen[np.minimum(ahead, most) - 1],
        alone=ahead > most,
    )


def shown_transfers(pp: Numbers, vpp: Numbers, micro_batches: Numbers) -> np.ndarray:
    """How many times an activation's way to the next stage shows in a step.

    1F1B exposes two transfers a micro-batch, an activation and a gradient: what a rank sends and what it receives go
    both ways at once. The interleaved table posts them a step ahead, so only those of the fill and drain remain.
    """
    return np.asarray(2 * np.where(np.equal(vpp, 1), np.add(micro_batches, pp) - 1, pp) * np.greater(pp, 1))


def closed_s(
    slowest_s: Numbers, all_s: Numbers, *, pp: Numbers, vpp: Numbers, micro_batches: Numbers, transfer_s: Numbers
) -> np.ndarray:
    """About `Pipeline.total_s`, from nothing but the slowest of pp ranks and the sum of all; every argument may be an
    array. 1F1B: sum of S + (m - 1) max S; interleaved: m max S + (pp - 1)/v mean S. Exact for equal chunks.
    """
    fill = np.where(
        np.equal(vpp, 1),
        np.subtract(all_s, slowest_s),
        np.multiply(all_s, np.subtract(pp, 1)) / np.multiply(vpp, pp),
    )
    moving = np.multiply(micro_batches, slowest_s) + fill
    return np.asarray(moving + shown_transfers(pp, vpp, micro_batches) * transfer_s)
