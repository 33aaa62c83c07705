"""Changes of a series of step times: shifts of its level that last, drifts, and what recurs.

A cumulative sum of clipped residuals (Page 1954, with the influence function of Huber 1964) sees a
shift of the level that lasts, and no spike, however high. The clipped residuals are centred on
Huber's location of a reference, so that spikes of one side pull nothing, and scaled by their
long-run deviation in blocks of steps, so that neighbours that are alike count as fewer. The
threshold is Siegmund's (1985) for a mean time between false alarms, with a margin for the error of
the reference. A second rule takes a run of steps that are nearly all above the reference's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHIFT = 0.03  # of the level: what is looked for; half of it is the least that is told
WARM_UP_STEPS = 10
FIRST_REFERENCE = 100  # steps, of which a change can be told first
REFERENCE = 200  # steps, once there are so many
TUNED = (SHIFT, 2 * SHIFT, 4 * SHIFT)  # of the level: a sum of its own looks for each
_CLIPS = (2.0, 5.0)  # deviations, beyond which a residual counts no more: those of a shift between
_LASTS = 10  # steps that a change has lasted when it is told
_MARGIN = 1.25  # times the average, within which most shifts are found
_LEAST_NOISE = 0.002  # of the level: below it clocks and rounding rule
_BLOCK = 10  # steps
_SIGMA = 1.4826  # times the median absolute deviation: that of a normal variable
_SURE = 6.0  # standard errors of a level, beyond which two are not the same
_EPOCH = 800  # steps, after which the level is measured again
_BETWEEN_FALSE_ALARMS = 1e7  # steps
_RUN = 30  # steps, of which so many
_RUN_OUTSIDE = 26  # beyond so much of the reference are a change
_RUN_SHARE = 0.02
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
class _Sum:
    """A cumulative sum that looks for a shift: how residuals are clipped, and when it is over.

    `long_run` is the deviation of clipped residuals, as if they were independent.
    """

    center: float
    clip: float
    long_run: float
    drift: float  # what a step adds on average after the shift
    allowance: float  # what it loses
    bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reference:
    """What is known of a level: itself, its noise, and sums for shifts of several sizes."""

    level: float
    scale: float
    low: float
    high: float
    sums: tuple[_Sum, ...]

    @property
    def error(self) -> float:
        """Return the standard error of a level of so many steps."""
        return self.scale * self.sums[0].long_run / sqrt(REFERENCE)


def find_changes(steps_s: Sequence[float] | Floats) -> tuple[LevelChange, ...]:
    """Return the changes of the level of a series, the first first; warm-up is left out.

    After each the new level is a reference of its own. Changes of less than half of SHIFT are taken
    into the level; what they come to over time is a drift.
    """
    series = np.asarray(steps_s, dtype=float)
    return tuple(_walk(series))


def _walk(series: Floats) -> Iterator[LevelChange]:
    start = WARM_UP_STEPS
    told = 0.0  # the level that was told last
    while len(series) - start >= FIRST_REFERENCE:
        window = series[start : start + _EPOCH]
        reference = _measure(window[:FIRST_REFERENCE])
        told = told or reference.level
        alarm = _detect(window[:REFERENCE], FIRST_REFERENCE, reference)
        if alarm is None and len(window) > REFERENCE:
            reference = _measure(window[:REFERENCE])
            alarm = _detect(window, REFERENCE, reference)
        if alarm is None:
            if len(window) < _EPOCH:
                return
            start += _EPOCH - REFERENCE
            later = _measure(series[start : start + REFERENCE])
            level = later.level
            if abs(level - told) >= max(SHIFT * told, _SURE * later.error):
                kind = ChangeKind.DRIFT if level > told else ChangeKind.FASTER
                yield LevelChange(
                    kind=kind,
                    start=start,
                    sighting=start + REFERENCE - 1,
                    before_s=told,
                    after_s=level,
                )
                told = level
            continue
        first, sighting = start + alarm[0], start + alarm[1]
        after = float(np.median(series[first : sighting + 1]))
        if abs(after / reference.level - 1) >= SHIFT / 2:
            kind = ChangeKind.SLOWER if after > reference.level else ChangeKind.FASTER
            if kind is ChangeKind.SLOWER and _is_drift(series[first : sighting + 1], after):
                kind = ChangeKind.DRIFT
            yield LevelChange(
                kind=kind, start=first, sighting=sighting, before_s=reference.level, after_s=after
            )
            told = after
        start = first


def _is_drift(steps_s: Floats, level: float) -> bool:
    """Return whether the steps that show a change still climb through most of it."""
    third = len(steps_s) // 3
    if third < _BLOCK:
        return False
    early, late = np.median(steps_s[:third]), np.median(steps_s[-third:])
    return bool(late - early > _DRIFT_SHARE * SHIFT * level)


def _measure(steps_s: Floats) -> _Reference:
    level = float(np.median(steps_s))
    scale = max(_SIGMA * float(np.median(np.abs(steps_s - level))), _LEAST_NOISE * level)
    low, high = np.quantile(steps_s, (_RUN_SHARE, 1 - _RUN_SHARE))
    residuals = (steps_s - level) / scale
    return _Reference(
        level=level,
        scale=scale,
        low=float(low),
        high=float(high),
        sums=tuple(_tune(residuals, shift * level / scale) for shift in TUNED),
    )


def _tune(residuals: Floats, shift: float) -> _Sum:
    """Return the sum that looks for a shift of so many deviations, by the residuals of a level."""
    clip = min(max(shift, _CLIPS[0]), _CLIPS[1])
    center = 0.0
    for _ in range(8):  # Newton's steps to the place where clipped residuals have no mean
        inside = max(0.3, float((np.abs(residuals - center) < clip).mean()))
        center += float(np.clip(residuals - center, -clip, clip).mean()) / inside
    clipped = np.clip(residuals - center, -clip, clip)
    count = len(clipped) // _BLOCK
    blocks = clipped[: count * _BLOCK].reshape(count, _BLOCK).mean(axis=1)
    long_run = max(sqrt(_BLOCK * float(blocks.var(ddof=1))), float(clipped.std()), 0.5)
    drift = float(np.clip(residuals - center + shift, -clip, clip).mean()) / long_run
    allowance = min(max(drift / 2, 0.3), 1.2)
    return _Sum(
        center=center,
        clip=clip,
        long_run=long_run,
        drift=drift,
        allowance=allowance,
        bound=_bound(allowance - 1.5 / sqrt(len(residuals))),
    )


def find_least_shift(steps_s: Sequence[float] | Floats, within: int = 50) -> float:
    """Return the least shift that is found within some steps, a share of the level.

    `steps_s` are of one level, without warm-up, and the latest of them tell. The answer is one of
    TUNED, and infinite where the steps are too noisy for each, or too few.
    """
    series = np.asarray(steps_s, dtype=float)[-REFERENCE:]
    if len(series) < FIRST_REFERENCE:
        return inf
    sums = _measure(series).sums
    return next(
        (
            shift
            for shift, total in zip(TUNED, sums, strict=True)
            if (total.drift - total.allowance) * within >= total.bound * _MARGIN
        ),
        inf,
    )


def _detect(steps_s: Floats, after: int, reference: _Reference) -> tuple[int, int] | None:
    """Return where a change begins and where it shows, behind the `after` steps of a reference."""
    residuals = (steps_s[after:] - reference.level) / reference.scale
    hits: list[tuple[int, int]] = list(_find_runs(steps_s, after, reference))
    for total in reference.sums:
        clipped = np.clip(residuals - total.center, -total.clip, total.clip) / total.long_run
        for sign in (1.0, -1.0):
            sums = np.cumsum(sign * clipped - total.allowance)
            lowest = np.minimum.accumulate(np.concatenate(([0.0], sums)))[:-1]
            places = np.arange(len(sums))
            before = np.concatenate(([0.0], sums[:-1]))
            begins = np.maximum.accumulate(np.where(before <= lowest, places, 0))
            over = np.flatnonzero((sums - lowest > total.bound) & (places - begins >= _LASTS - 1))
            if len(over):
                hits.append((after + int(over[0]), after + int(begins[over[0]])))
    if not hits:
        return None
    end, begin = min(hits)
    return begin, end


def _find_runs(steps_s: Floats, after: int, reference: _Reference) -> Iterator[tuple[int, int]]:
    """Yield the first run of steps that are nearly all outside of the reference, for each side."""
    least = SHIFT / 2 * reference.level
    for outside in (
        steps_s[after:] > max(reference.high, reference.level + least),
        steps_s[after:] < min(reference.low, reference.level - least),
    ):
        if len(outside) < _RUN:
            continue
        counts = np.convolve(outside, np.ones(_RUN), mode="valid")
        full = np.flatnonzero(counts >= _RUN_OUTSIDE)
        if len(full):
            begin = int(full[0]) + int(np.argmax(outside[full[0] :]))
            yield after + int(full[0]) + _RUN - 1, after + begin


def _bound(allowance: float) -> float:
    """Return the sum that is exceeded once in _BETWEEN_FALSE_ALARMS steps of noise."""
    allowance = max(allowance, 0.12)
    return log(2 * allowance**2 * _BETWEEN_FALSE_ALARMS) / (2 * allowance) - 1.166


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
        noise = max(_SIGMA * float(np.median(np.abs(part - level))), _LEAST_NOISE * level)
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
