"""The pipeline: from the seconds of one micro-batch on each virtual stage to those of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from moewright.rules.schedule import (
    forward_order,
    interleaved_group_size,
    timetable,
    warmup_forwards,
)
from moewright.rules.simulate import StageSeconds, row_end_times
from moewright.spec.layout import Layout, Overlap

# A longer table is worked out up to so many forwards of a rank, or groups of micro-batches if these
# are more.
_MOST_FORWARDS = 512
_FEWEST_GROUPS = 6
_GROUPS_APART = 2

FloatOrArray = float | np.ndarray


def simulate_pipeline_s(
    layout: Layout, stages: Sequence[StageSeconds], *, micro_batches: int, transfer_s: float
) -> float:
    """Return the seconds of all micro-batches through the layout's timetable, row by row.

    `stages` are the virtual stages. A transfer delays who waits for it and nobody else.
    """
    table = timetable(layout, micro_batches)
    return max(row_end_times(layout, table, stages, transfer_s=transfer_s).values())


class TimetableEnd(Protocol):
    """Says when all rows of a table have ended."""

    def end_s(self, seconds: np.ndarray) -> float:
        """Return the end under these seconds [2 * virtual stages].

        They are of the forwards of one micro-batch, then of its backwards.
        """
        ...


class TimetableRows:
    """The rows of a 1F1B or interleaved timetable as arrays.

    Each ends its own seconds after the later of the row before it on its rank and the message it
    waits for. Rows of one wave wait for earlier waves alone, so a wave is worked out at once, for
    many stage times side by side.
    """

    __slots__ = ("_after", "_message", "_stage", "_waves")

    def __init__(self, layout: Layout, micro_batches: int) -> None:
        pp, vpp = layout.pp, layout.vpp
        order = np.array(forward_order(layout, micro_batches))
        count, chunk = len(order), order[:, 1]
        turn, rank = np.arange(count), np.arange(pp)[:, None]
        # As if there were micro-batches enough for every warm-up.
        enough = micro_batches + interleaved_group_size(layout) + 2 * pp
        ahead = np.array([[warmup_forwards(layout, enough, pp_rank)] for pp_rank in range(pp)])
        last = vpp - 1
        place = np.empty((micro_batches, vpp), dtype=int)
        place[order[:, 0], chunk] = turn
        lap = np.where(
            chunk > 0, place[order[:, 0], chunk - 1], 0
        )  # the same micro-batch, a chunk before

        forward, backward = rank * count + turn, (pp + rank) * count + turn
        nothing = 2 * pp * count
        after_forward = np.where(
            turn > ahead, backward - ahead - 1, np.where(turn > 0, forward - 1, nothing)
        )
        after_backward = np.where(
            ahead + turn < count,
            forward + ahead,
            np.where(turn > 0, backward - 1, rank * count + count - 1),
        )
        around = np.where(chunk > 0, 1, 0)
        down = np.where(
            rank > 0, forward - count, np.where(around, (pp - 1) * count + lap, nothing)
        )
        up = np.where(rank < pp - 1, backward + count, np.where(around, pp * count + lap, nothing))
        # A wave holds no two rows that wait for each other.
        skew = rank * (1 if vpp == 1 else 2)
        wave = _flat(2 * turn + skew, 2 * (turn + ahead) + skew + 1)
        stage = _flat(chunk * pp + rank, (vpp + last - chunk) * pp + rank)

        by_wave = np.argsort(wave, kind="stable")
        place_by_wave = np.append(np.empty(nothing, dtype=int), nothing)
        place_by_wave[by_wave] = np.arange(nothing)
        self._after = place_by_wave[_flat(after_forward, after_backward)[by_wave]]
        self._message = place_by_wave[_flat(down, up)[by_wave]]
        self._stage = stage[by_wave]
        starts = [*np.flatnonzero(np.diff(wave[by_wave], prepend=-1)).tolist(), nothing]
        self._waves = [
            (slice(first, end), self._after[first:end], self._message[first:end])
            for first, end in pairwise(starts)
        ]

    def end_s(self, seconds: np.ndarray) -> float:
        return float(self._ends_s(seconds).max())

    def longest_paths(self, seconds: np.ndarray) -> TimetablePaths:
        """Return the paths that take longest under the columns of `seconds`."""
        ends = self._ends_s(seconds)
        columns = np.arange(seconds.shape[1])
        counts = np.zeros(seconds.T.shape)
        nothing, row = len(ends) - 1, ends.argmax(axis=0)
        while (row < nothing).any():
            on = columns[row < nothing]
            row_on = row[on]
            counts[on, self._stage[row_on]] += 1
            after, message = self._after[row_on], self._message[row_on]
            row[on] = np.where(ends[after, on] >= ends[message, on], after, message)
        return TimetablePaths(counts=np.unique(counts, axis=0))

    def _ends_s(self, seconds: np.ndarray) -> np.ndarray:
        """Return the ends of all rows [rows + 1, ...]; the last is when the step starts."""
        lengths = seconds[self._stage]
        ends = np.zeros((len(lengths) + 1, *seconds.shape[1:]))
        for rows, after, message in self._waves:
            of_wave = ends[rows]
            np.maximum(ends.take(after, axis=0), ends.take(message, axis=0), out=of_wave)
            of_wave += lengths[rows]
        return ends


def _flat(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return values of all forwards rank by rank, then of all backwards."""
    both = np.broadcast_arrays(forward, backward)
    return np.concatenate([rows.ravel() for rows in both])


@dataclass(frozen=True, kw_only=True, slots=True)
class TimetablePaths:
    """Some paths through a timetable.

    `counts` [paths, 2 * virtual stages] is how often each passes every forward and backward.
    """

    counts: np.ndarray

    def end_s(self, seconds: np.ndarray) -> float:
        return float((self.counts @ seconds).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimetable:
    """A 1F1B or interleaved timetable, worked out once for a layout.

    `whole` are its rows, or, of a long one, the first groups of micro-batches; then `shorter` are
    two groups fewer, and `groups_left_out` groups are not in `whole`.
    """

    layout: Layout
    micro_batches: int
    whole: TimetableEnd
    shorter: TimetableEnd
    groups_left_out: int
    group: int

    def total_s(self, forward_s: np.ndarray, backward_s: np.ndarray) -> float:
        """Return the seconds of all micro-batches; transfers take none.

        The arguments are the seconds of one micro-batch on each virtual stage, in stage order. What
        is left out of a long table takes as long as the groups before it, and no less than the
        slowest rank works: for stages that differ within 1 % of the rows themselves
        (tests/cost/test_pipeline_time.py).
        """
        of_rank = (forward_s + backward_s).reshape(self.layout.vpp, self.layout.pp).sum(axis=0)
        if self.layout.pp == 1:
            return self.micro_batches * float(of_rank[0])
        seconds = np.concatenate([forward_s, backward_s])
        end_s = self.whole.end_s(seconds)
        if not self.groups_left_out:
            return end_s
        busy_s = self.group * float(of_rank.max())
        return end_s + self.groups_left_out * max(
            busy_s, (end_s - self.shorter.end_s(seconds)) / _GROUPS_APART
        )

    def restrict_to_longest_paths(
        self, forward_s: np.ndarray, backward_s: np.ndarray
    ) -> PipelineTimetable:
        """Return the same timetable by its longest paths alone, much faster.

        The paths are those of stage times in columns [virtual stages, columns]: it is exact for
        these, and no longer than the rows for others.
        """
        if self.layout.pp == 1:
            return self
        seconds = np.concatenate([forward_s, backward_s])
        whole, shorter = (
            rows.longest_paths(seconds) if isinstance(rows, TimetableRows) else rows
            for rows in (self.whole, self.shorter)
        )
        return replace(self, whole=whole, shorter=shorter)


def build_pipeline(layout: Layout, micro_batches: int) -> PipelineTimetable:
    """Return the timetable of a layout that is 1F1B or interleaved."""
    bare = Layout(
        world_size=layout.pp,
        pp=layout.pp,
        vpp=layout.vpp,
        vpp_group=layout.vpp_group,
        overlap=(Overlap.EP,) if Overlap.EP in layout.overlap else (),
    )
    return _pipeline(bare, micro_batches)


@lru_cache(maxsize=8)
def _pipeline(layout: Layout, micro_batches: int) -> PipelineTimetable:
    group = interleaved_group_size(layout)
    most = max(_MOST_FORWARDS // layout.vpp, _FEWEST_GROUPS * group)
    left_out = max(0, -((most - micro_batches) // group))
    whole = TimetableRows(layout, micro_batches - left_out * group)
    shorter = (
        TimetableRows(layout, micro_batches - (left_out + _GROUPS_APART) * group)
        if left_out
        else whole
    )
    return PipelineTimetable(
        layout=layout,
        micro_batches=micro_batches,
        whole=whole,
        shorter=shorter,
        groups_left_out=left_out,
        group=group,
    )


def exposed_transfers(
    pp: FloatOrArray, vpp: FloatOrArray, micro_batches: FloatOrArray
) -> np.ndarray:
    """Return how many times an activation's way to the next stage shows in a step.

    1F1B exposes two transfers a micro-batch, an activation and a gradient: what a rank sends and
    what it receives go both ways at once. The interleaved table posts them a step ahead, so only
    those of the fill and drain remain.
    """
    return np.asarray(
        2 * np.where(np.equal(vpp, 1), np.add(micro_batches, pp) - 1, pp) * np.greater(pp, 1)
    )


def closed_form_s(
    slowest_s: FloatOrArray,
    all_s: FloatOrArray,
    *,
    pp: FloatOrArray,
    vpp: FloatOrArray,
    micro_batches: FloatOrArray,
    transfer_s: FloatOrArray,
) -> np.ndarray:
    """Return about `PipelineTimetable.total_s` and the transfers that show, in closed form.

    It takes nothing but the slowest of pp ranks and the sum of all; every argument may be an array.
    1F1B: sum of S + (m - 1) max S; interleaved: m max S + (pp - 1)/v mean S. It is exact for equal
    chunks.
    """
    fill = np.where(
        np.equal(vpp, 1),
        np.subtract(all_s, slowest_s),
        np.multiply(all_s, np.subtract(pp, 1)) / np.multiply(vpp, pp),
    )
    moving = np.multiply(micro_batches, slowest_s) + fill
    return np.asarray(moving + exposed_transfers(pp, vpp, micro_batches) * transfer_s)
