"""Changes of a series of step times: shifts of its level that last, drifts, and what recurs.

A level is the median of up to 200 steps, that end 50 steps before those which are held beside it.
Windows of 12 to 46 steps behind it are tested for a shift that lasts, by the noise of the series
itself (`step_noise`). The noise is kept over changes of the level, so that a new level of 40 steps
is enough to look for the next change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import exp, inf, log1p

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.step_noise import (
    LEAST_NOISE,
    SHIFT,
    TUNED,
    WINDOWS,
    Floats,
    StepNoise,
    measure_noise,
    measure_spread,
)

WARM_UP_STEPS = 10  # allocator, autotuning and caches settle in them
FIRST_REFERENCE = 100  # steps, of which a change can be told first
REFERENCE = 200  # steps, once there are so many
_YOUNG = 40  # steps of a new level, of which the next change can be told
_GAP = 50  # steps between a level and those that are told of it at once
_STRIDE = 25  # steps that are told of one level
_LASTS = 16  # steps that a change has lasted when it is told
_HISTORY = 800  # steps, of which the noise is measured
_MOST_STRIDES = 160  # at once
_RENEWED = 0.1  # of all steps, after which the noise is measured anew, and 200 steps at least
_BLOCK = 10  # steps
_SURE = 6.0  # standard errors of a level, beyond which two are not the same
_EPOCH = 800  # steps, of which spikes have a level of their own
_DRIFT_SHARE = 0.5  # of a change that comes within the steps that show it
_SPIKE_DEVIATIONS = 6.0
_SPIKE_SHARE = 0.1  # of the level
_LEAST_SPIKES = 3
_REGULAR = 0.7  # of the gaps, or of a period's steps


class ChangeKind(StrEnum):
    """How a level changes."""

    SLOWER = "slower"
    FASTER = "faster"
    DRIFT = "drift"  # step by step, to a slower level


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelChange:
    """A change of the level: from which step on, when it showed, and what the levels are.

    `sighting` is the step at which it was told; both are places in the series, from 0.
    """

    kind: ChangeKind
    start: int
    sighting: int
    before_s: float
    after_s: float

    @property
    def growth(self) -> float:
        """Return the change over the level before."""
        return self.after_s / self.before_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Steps that take longer again and again: every `period` steps, 0 for no regular time.

    `share` is the part of all time that they add.
    """

    period: int
    name: str
    count: int
    added_s: float  # of one of them, the median
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hit:
    """A window that shows another level: its first step and the step behind its last."""

    row: int  # of the stretch
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """Steps beside their levels: a row for each level of `level_steps` steps.

    `levels` [rows] are logarithms, `residuals` [rows, steps] and those of the step `before` each
    are over them. Row r begins at step `first` + r * _STRIDE of the series; its steps from column
    `begin` on have not been looked at.
    """

    first: int
    begin: int
    level_steps: int
    levels: Floats
    residuals: Floats
    before: Floats

    @property
    def stop(self) -> int:
        """The step of the series behind the last."""
        rows, steps = self.residuals.shape
        return int(self.first + (rows - 1) * _STRIDE + steps)

    def find_hit(self, noise: StepNoise) -> _Hit | None:
        """Return the first window of the first row that shows a shift."""
        scores = noise.score(noise.whiten(self.residuals, self.before))
        sums = np.zeros((*scores.shape[:2], scores.shape[2] + 1))
        np.cumsum(scores, axis=2, out=sums[:, :, 1:])
        ends = np.arange(self.begin + 1, sums.shape[2])
        bounds = noise.bound(self.level_steps)[:, :, None, None]
        is_hit = np.zeros((*sums.shape[:2], len(ends)), dtype=bool)
        for number, steps in enumerate(WINDOWS):
            total = sums[:, :, ends] - sums[:, :, np.maximum(ends - steps, 0)]
            # What has gone again meanwhile is no change.
            latest = sums[:, :, ends] - sums[:, :, np.maximum(ends - steps // 3, 0)]
            is_hit |= (total > bounds[:, number]) & (latest > 0)
        if not is_hit.any():
            return None
        lowest = sums <= np.minimum.accumulate(sums, axis=2)
        begins = np.maximum.accumulate(np.where(lowest, np.arange(sums.shape[2]), 0), axis=2)
        begins = begins[:, :, ends - 1]
        is_hit &= ends - begins >= _LASTS
        hit_rows = np.flatnonzero(is_hit.any(axis=(0, 2)))
        if not len(hit_rows):
            return None
        row = int(hit_rows[0])
        end = int(np.argmax(is_hit[:, row].any(axis=0)))
        begun = begins[:, row, end]
        evidence = sums[:, row, ends[end]] - sums[np.arange(len(sums)), row, begun]
        test = int(np.argmax(evidence))
        first = self.first + row * _STRIDE
        return _Hit(row=row, start=first + int(begun[test]), stop=first + int(ends[end]))


def find_changes(steps_s: Sequence[float] | Floats) -> tuple[LevelChange, ...]:
    """Return the changes of the level of a series, the first first; warm-up is left out.

    After each the new level is a reference of its own. Changes of less than half of SHIFT are taken
    into the level; what they come to over time is a drift.
    """
    series = np.asarray(steps_s, dtype=float)
    if len(series) < WARM_UP_STEPS + FIRST_REFERENCE:
        return ()
    return tuple(_Walk(np.log(np.maximum(series, 1e-9))).list_changes())


class _Walk:
    """The walk through the logarithms of a series, level by level."""

    def __init__(self, logs: Floats) -> None:
        self._logs = logs
        self._start = WARM_UP_STEPS  # of the level
        self._base = FIRST_REFERENCE  # steps of it that nothing is told of
        self._next = WARM_UP_STEPS + FIRST_REFERENCE  # the first step that was not looked at
        first = logs[self._start : self._next]
        self._told = float(np.median(first))  # the level that was told last
        self._told_steps = len(first)
        self._compared = self._start  # the first step of the level that was held beside it last
        self._history = first - self._told
        self._looked_at = 0  # steps
        self._noise = measure_noise(self._history)
        self._renewal = self._next + REFERENCE // 2

    def list_changes(self) -> Iterator[LevelChange]:
        """Yield the changes, the first first."""
        while self._next < len(self._logs):
            stretch = self._cut()
            hit = stretch.find_hit(self._noise)
            rows = len(stretch.levels) if hit is None else hit.row
            yield from self._find_drifts(stretch, rows)
            if hit is None:
                self._next = stretch.stop
                self._renew(stretch)
                continue
            level = float(stretch.levels[hit.row])
            shown = self._logs[hit.start : hit.stop]
            after = float(np.median(shown))
            if abs(after - level) >= log1p(SHIFT / 2):
                kind = ChangeKind.SLOWER if after > level else ChangeKind.FASTER
                if kind is ChangeKind.SLOWER and _is_drift(shown):
                    kind = ChangeKind.DRIFT
                yield LevelChange(
                    kind=kind,
                    start=hit.start,
                    sighting=hit.stop - 1,
                    before_s=exp(level),
                    after_s=exp(after),
                )
                self._told, self._told_steps = after, len(shown)
            self._start = self._compared = hit.start
            self._base = _YOUNG
            self._next = max(hit.stop, hit.start + _YOUNG)

    def _cut(self) -> _Stretch:
        """Return the next steps, with a level for each few of them."""
        rest = len(self._logs) - self._next
        first = max(self._start + self._base, self._next - _GAP)
        begin = self._next - first
        level_steps = min(REFERENCE, first - self._start)
        rows = 1
        width = begin + min(rest, _STRIDE)
        if begin == _GAP and level_steps == REFERENCE:
            due = -(-(self._renewal - self._next) // _STRIDE)
            rows = max(1, min(rest // _STRIDE, due, _MOST_STRIDES))
        levels = np.median(self._rows(first - level_steps, rows, level_steps), axis=1)
        return _Stretch(
            first=first,
            begin=begin,
            level_steps=level_steps,
            levels=levels,
            residuals=self._rows(first, rows, width) - levels[:, None],
            before=self._rows(first - 1, rows, width) - levels[:, None],
        )

    def _rows(self, first: int, rows: int, steps: int) -> Floats:
        """Return so many steps from each _STRIDE-th on, [rows, steps]."""
        width = self._logs.itemsize
        return np.ndarray(
            shape=(rows, steps),
            dtype=self._logs.dtype,
            buffer=self._logs,
            offset=first * width,
            strides=(_STRIDE * width, width),
        )

    def _renew(self, stretch: _Stretch) -> None:
        """Take the residuals of a stretch into the noise, and measure it anew where that is due."""
        latest = stretch.residuals[:, stretch.begin :].ravel()
        self._looked_at += len(latest)
        # The first reference is wider than noise, as levels move most in the beginning.
        kept = min(_HISTORY, max(REFERENCE, self._looked_at - _GAP)) + _GAP
        self._history = np.concatenate((self._history, latest))[-kept:]
        if self._next >= self._renewal:
            # The latest steps may be the first of a change that has not been told yet.
            self._noise = measure_noise(self._history[:-_GAP])
            self._renewal = self._next + max(REFERENCE, int(_RENEWED * self._next))

    def _find_drifts(self, stretch: _Stretch, rows: int) -> Iterator[LevelChange]:
        """Yield where the level of the first rows is another than was told."""
        if stretch.level_steps < REFERENCE:
            return
        for row in range(rows):
            start = stretch.first - REFERENCE + row * _STRIDE
            if start - self._compared < REFERENCE:
                continue
            self._compared = start
            level = float(stretch.levels[row])
            error = self._noise.level_error(REFERENCE, self._told_steps)
            if abs(level - self._told) >= max(log1p(SHIFT), _SURE * error):
                yield LevelChange(
                    kind=ChangeKind.DRIFT if level > self._told else ChangeKind.FASTER,
                    start=start,
                    sighting=stretch.first + row * _STRIDE + stretch.begin - 1,
                    before_s=exp(self._told),
                    after_s=exp(level),
                )
                self._told, self._told_steps = level, REFERENCE


def _is_drift(logs: Floats) -> bool:
    """Return whether the steps that show a change still climb through most of it."""
    third = len(logs) // 3
    if third < _BLOCK:
        return False
    return bool(np.median(logs[-third:]) - np.median(logs[:third]) > _DRIFT_SHARE * SHIFT)


def find_least_shift(steps_s: Sequence[float] | Floats) -> float:
    """Return the least shift that is found within 50 steps, a share of the level.

    `steps_s` are of one level, without warm-up, and the latest of them tell. The answer is one of
    TUNED, and infinite where the steps are too noisy for each, or too few.
    """
    series = np.asarray(steps_s, dtype=float)[-_HISTORY:]
    if len(series) < FIRST_REFERENCE:
        return inf
    logs = np.log(np.maximum(series, 1e-9))
    seen = measure_noise(logs - np.median(logs)).list_seen(min(REFERENCE, len(series)))
    return next((shift for shift, is_seen in zip(TUNED, seen, strict=True) if is_seen), inf)


def find_recurrences(
    numbers: Sequence[int],
    steps_s: Sequence[float] | Floats,
    periods: Mapping[str, int],
    changes: Sequence[LevelChange] = (),
) -> tuple[Recurrence, ...]:
    """Return the steps that take longer than their neighbours, by their period.

    `numbers` are those of the iterations; `periods` are those of arguments, by name;
    between `changes` each level has neighbours of its own. What fits no period that is known, and
    none of its own, comes last with period 0.
    """
    series = np.asarray(steps_s, dtype=float)[WARM_UP_STEPS:]
    places = np.asarray(numbers, dtype=int)[WARM_UP_STEPS:]
    if len(series) < FIRST_REFERENCE:
        return ()
    added = np.empty_like(series)
    spikes = np.zeros(len(series), dtype=bool)
    starts = {change.start - WARM_UP_STEPS for change in changes}
    edges = sorted({*starts, *range(0, len(series), _EPOCH), len(series)})
    for begin, end in pairwise(edges):
        part = series[begin:end]
        level = float(np.median(part))
        noise = max(measure_spread(part), LEAST_NOISE * level)
        added[begin:end] = part - level
        least = max(_SPIKE_DEVIATIONS * noise, _SPIKE_SHARE * level)
        spikes[begin:end] = added[begin:end] > least
    answers = []
    for name, period in sorted(periods.items(), key=lambda item: -item[1]):
        at_period = places % period == 0 if period > 1 else np.zeros(len(places), dtype=bool)
        hits = spikes & at_period
        if hits.sum() >= _LEAST_SPIKES and hits.sum() >= _REGULAR * at_period.sum():
            answers.append(_sum_up(added, hits, period, name, float(series.sum())))
            spikes = spikes & ~hits
    if spikes.sum() < _LEAST_SPIKES:
        return tuple(answers)
    gaps = Counter(np.diff(places[spikes]).tolist())
    period, count = gaps.most_common(1)[0]
    is_regular = period > 1 and count >= _REGULAR * gaps.total()
    answers.append(_sum_up(added, spikes, period if is_regular else 0, "", float(series.sum())))
    return tuple(answers)


def _sum_up(
    added: Floats, hits: NDArray[np.bool_], period: int, name: str, total_s: float
) -> Recurrence:
    return Recurrence(
        period=period,
        name=name,
        count=int(hits.sum()),
        added_s=float(np.median(added[hits])),
        share=float(added[hits].sum()) / total_s,
    )
