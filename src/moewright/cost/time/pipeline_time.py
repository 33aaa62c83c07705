"""The pipeline: from the seconds of one micro-batch on each virtual stage to those of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from moewright.rules.timetable.schedule import (
    forward_order,
    interleaved_group_size,
    timetable,
    warmup_forwards,
)
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.spec.layout import Layout, Overlap

# Of a long timetable only the first rows are computed: so many forwards of a rank, or so many
# groups of micro-batches if these are more. The time of a group follows from two timetables that
# are _GROUPS_APART groups apart.
_MOST_FORWARDS = 512
_FEWEST_GROUPS = 6
_GROUPS_APART = 2

FloatOrArray = float | np.ndarray


def simulate_pipeline_s(
    layout: Layout, stages: Sequence[StageSeconds], *, micro_batches: int, transfer_s: float
) -> float:
    """Return the seconds of all micro-batches through the layout's timetable, row by row.

    `stages` are the seconds of one micro-batch on each virtual stage, in stage order. A transfer
    delays the row that waits for it and no other.
    """
    table = timetable(layout, micro_batches)
    return max(row_end_times(layout, table, stages, transfer_s=transfer_s).values())


class TimetableEnd(Protocol):
    """A timetable that tells when all its rows have ended."""

    def end_s(self, seconds: np.ndarray) -> float:
        """Return when the last row ends, in seconds after the start of the step.

        `seconds` [2 * virtual stages] are those of the forwards of one micro-batch, then those of
        its backwards.
        """
        ...


class TimetableRows:
    """The rows of a 1F1B or interleaved timetable as arrays.

    A row starts when the row before it on its rank and the row whose result it takes (from the
    neighbouring virtual stage) have both ended. Rows of one wave wait for rows of earlier waves
    alone, so that a wave is computed at once, for many columns of stage times side by side.
    """

    __slots__ = ("_after", "_message", "_place", "_stage", "_waves")

    def __init__(self, layout: Layout, micro_batches: int) -> None:
        pp = layout.pp
        vpp = layout.vpp
        order = np.array(forward_order(layout, micro_batches))
        micro_batch = order[:, 0]
        chunk = order[:, 1]
        count = len(order)
        turn = np.arange(count)  # position of a forward, or of a backward, among those of its rank
        rank = np.arange(pp)[:, None]
        # Warm-up forwards as if there were micro-batches enough for every warm-up.
        enough = micro_batches + interleaved_group_size(layout) + 2 * pp
        warmup = np.array([[warmup_forwards(layout, enough, pp_rank)] for pp_rank in range(pp)])
        turn_of = np.empty((micro_batches, vpp), dtype=int)
        turn_of[micro_batch, chunk] = turn
        # Turn of the same micro-batch one chunk before. Backwards have the same turns, with the
        # chunks reversed.
        previous_turn = np.where(chunk > 0, turn_of[micro_batch, chunk - 1], 0)

        # Rows are numbered forwards rank by rank, then backwards; the last number is the start of
        # the step, for rows that wait for nothing.
        forward = rank * count + turn
        backward = (pp + rank) * count + turn
        step_start = 2 * pp * count
        after_forward = np.where(
            turn > warmup, backward - warmup - 1, np.where(turn > 0, forward - 1, step_start)
        )
        after_backward = np.where(
            warmup + turn < count,
            forward + warmup,
            np.where(turn > 0, backward - 1, rank * count + count - 1),
        )
        # The first rank takes the hidden states of its later chunks from the last rank, and the
        # last rank the gradients of its earlier chunks from the first.
        from_last_rank = np.where(chunk > 0, (pp - 1) * count + previous_turn, step_start)
        from_first_rank = np.where(chunk > 0, pp * count + previous_turn, step_start)
        forward_message = np.where(rank > 0, forward - count, from_last_rank)
        backward_message = np.where(rank < pp - 1, backward + count, from_first_rank)
        # A wave holds no two rows that wait for each other.
        skew = rank * (1 if vpp == 1 else 2)
        wave = _flat(2 * turn + skew, 2 * (turn + warmup) + skew + 1)
        # Index into the seconds: virtual stages of forwards, then of backwards.
        stage = _flat(chunk * pp + rank, (2 * vpp - 1 - chunk) * pp + rank)

        by_wave = np.argsort(wave, kind="stable")
        place_by_wave = np.append(np.empty(step_start, dtype=int), step_start)
        place_by_wave[by_wave] = np.arange(step_start)
        self._place = place_by_wave[:-1].reshape(2, pp, count)
        self._after = place_by_wave[_flat(after_forward, after_backward)[by_wave]]
        self._message = place_by_wave[_flat(forward_message, backward_message)[by_wave]]
        self._stage = stage[by_wave]
        starts = [*np.flatnonzero(np.diff(wave[by_wave], prepend=-1)).tolist(), step_start]
        self._waves = [
            (slice(first, end), self._after[first:end], self._message[first:end])
            for first, end in pairwise(starts)
        ]

    def end_s(self, seconds: np.ndarray) -> float:
        return float(self._ends_s(seconds).max())

    def row_ends(self, seconds: np.ndarray) -> np.ndarray:
        """Return when every row ends [forwards and backwards, ranks, turns], in seconds.

        Turns of a rank's forwards are those of `forward_order`; its backwards have the same turns,
        with the chunks reversed. `seconds` are as for `end_s`.
        """
        return np.asarray(self._ends_s(seconds)[self._place])

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
        """Return the ends of all rows [rows + 1, ...] by wave; the last is the step's start."""
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

    `counts` [paths, 2 * virtual stages] says how often each path passes through the forward and
    through the backward of every virtual stage.
    """

    counts: np.ndarray

    def end_s(self, seconds: np.ndarray) -> float:
        return float((self.counts @ seconds).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimetable:
    """A 1F1B or interleaved timetable, worked out once for a layout.

    `whole` are its rows or, for a long timetable, those of the first groups of micro-batches; then
    `groups_left_out` groups are not in `whole`, and `shorter` has two groups fewer than `whole`.
    """

    layout: Layout
    micro_batches: int
    whole: TimetableEnd
    shorter: TimetableEnd
    groups_left_out: int
    group: int

    def total_s(self, forward_s: np.ndarray, backward_s: np.ndarray) -> float:
        """Return the seconds of all micro-batches; transfers take none.

        The arguments are the seconds of one micro-batch on each virtual stage, in stage order. The
        groups left out of a long table take as long as the groups before them, and no less than the
        slowest rank works. For stages that differ, the result is within 1 % of that of all rows
        (tests/cost/test_pipeline_time.py).
        """
        rank_s = (forward_s + backward_s).reshape(self.layout.vpp, self.layout.pp).sum(axis=0)
        if self.layout.pp == 1:
            return self.micro_batches * float(rank_s[0])
        seconds = np.concatenate([forward_s, backward_s])
        end_s = self.whole.end_s(seconds)
        if not self.groups_left_out:
            return end_s
        busy_s = self.group * float(rank_s.max())
        group_s = (end_s - self.shorter.end_s(seconds)) / _GROUPS_APART
        return end_s + self.groups_left_out * max(busy_s, group_s)

    def restrict_to_longest_paths(
        self, forward_s: np.ndarray, backward_s: np.ndarray
    ) -> PipelineTimetable:
        """Return the same timetable reduced to its longest paths, which is much faster.

        The paths are the longest ones under the stage times in the columns [virtual stages,
        columns] of the arguments. The result is exact for these stage times; for others it ends no
        later than the rows do.
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
    # Only what a timetable depends on: layouts that differ in all else share the cached rows.
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
    # Rounded up: whole groups alone can be left out.
    left_out = max(0, -((most - micro_batches) // group))
    whole = TimetableRows(layout, micro_batches - left_out * group)
    shorter = whole
    if left_out:
        shorter = TimetableRows(layout, micro_batches - (left_out + _GROUPS_APART) * group)
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
    """Return how many transfers between neighbouring stages are exposed in a step.

    1F1B exposes two transfers a micro-batch, an activation and a gradient, since a rank sends and
    receives at the same time. The interleaved timetable posts transfers one row ahead, so that only
    those of fill and drain are exposed.
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
    """Return about `PipelineTimetable.total_s` plus exposed transfers, in closed form.

    `slowest_s` are the seconds of a micro-batch on the slowest of the pp ranks, `all_s` the sum
    over all ranks; every argument may be an array.
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
