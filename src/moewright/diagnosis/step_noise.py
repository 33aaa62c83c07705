"""The noise of step times, and how surely a window of them shows another level.

Residuals are logarithms of a step over its level, so that a shift of 3 % is 0.03 at any level. What
a step says for a shift is the logarithm of its likelihood ratio under the noise that the series
has had, bounded so that no single step decides. The sum of it over a window is the best test of a
shift that must be found within that window (Lai 1974). Its bound is Chernoff's: the log-moments of
blocks of the series' own scores, which hold the likeness of neighbours (Kunsch 1989), give the
sum that noise exceeds with a probability of FALSE_ALARM; an error of the level raises it.

Grid axes: T tests (a shift, a sign), W windows, H exponents of the moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHIFT = 0.03  # of the level: what is looked for; half of it is the least that is told
TUNED = (SHIFT, 2 * SHIFT, 4 * SHIFT)  # of the level: a test of its own looks for each
WINDOWS = (12, 24, 46)  # steps
FALSE_ALARM = 3e-7  # of a window of noise
LEAST_NOISE = 0.002  # of the level: below it clocks and rounding rule
_SIGMA = 1.4826  # times the median absolute deviation: that of a normal variable
_CLIP = 4.0  # deviations, beyond which a residual tells nothing of the noise's width or memory
_MOST_SCORE = 3.0  # by one step
_LEAST_BOUND = 3.0  # of a sum, as one step alone may say
_GRID = 801
_SMOOTHING = 0.5  # of a deviation
_WIDE, _FAR = 0.1, 0.04  # parts of the density for what the series has not shown yet
_BLOCKS = (10, 20)  # steps: of a short series, of one of _LONG
_LONG = 400  # steps
_FEW = 5.0  # blocks: what is not known of the scores' spread, as a share of the blocks there are
_RIDGE = 10.0  # steps that say that neighbours are not alike
_MOST_MEMORY = 0.8
_POWERS = np.array([0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0])
_MOSTLY = 1.3  # deviations that a sum may fall short of its mean: nine in ten fall less


def measure_spread(values: Floats) -> float:
    """Return the deviation of values by their median absolute deviation."""
    return _SIGMA * float(np.median(np.abs(values - np.median(values))))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNoise:
    """The noise of a series, with the tests for shifts of TUNED up, then down, in turn.

    `scores` [T, grid] are what a step says; `log_moments` [T, H] those of a step, `slopes` [T] what
    a step says more where the level is off by one; `shifted` [T] its mean under the shift, `spread`
    [T] its long-run deviation. `memory` is the share of a residual that the next step repeats,
    `scale` the deviation of a residual, and `level_variance` that of a level of one step.
    """

    count: int
    scale: float
    memory: float
    top: float
    level_variance: float
    wander: float  # variance of the level over a window, beyond its noise
    scores: Floats
    log_moments: Floats
    slopes: Floats
    shifted: Floats
    spread: Floats

    def whiten(self, residuals: Floats, before: Floats) -> Floats:
        """Return what is new in residuals, by the residual before each."""
        limit = _CLIP * self.scale
        return residuals - self.memory * np.clip(before, -limit, limit)

    def score(self, innovations: Floats) -> Floats:
        """Return what each step says for each test, [T, ...]."""
        answer: Floats = self.scores[:, _find_cells(innovations, self.top)]
        return answer

    def bound(self, level_steps: int) -> Floats:
        """Return the sums that noise does not exceed, [T, W], at a level of so many steps.

        The shortest window does not look for the least shift.
        """
        level = self.level_variance / level_steps + self.wander
        windows = np.array(WINDOWS, dtype=float)[:, None]
        error = 0.5 * level * (windows[None] * self.slopes[:, None, None] * _POWERS) ** 2
        exponents = windows[None] * self.log_moments[:, None] + error - log(FALSE_ALARM)
        bounds = np.maximum((exponents / _POWERS).min(axis=-1), _LEAST_BOUND)
        bounds[:2, 0] = np.inf
        answer: Floats = bounds
        return answer

    def level_error(self, *level_steps: int) -> float:
        """Return the standard error of the difference of levels of so many steps each."""
        shares = sum(1 / steps for steps in level_steps)
        return sqrt(self.level_variance * shares) / (1 - self.memory)

    def list_seen(self, level_steps: int) -> Sequence[bool]:
        """Return of each of TUNED whether nine in ten of such shifts show in the longest window."""
        steps = WINDOWS[-1]
        least = steps * self.shifted - _MOSTLY * sqrt(steps) * self.spread
        seen = least >= self.bound(level_steps)[:, -1]
        return [bool(item) for item in seen[::2]]


def _find_cells(values: Floats, top: float) -> NDArray[np.int64]:
    cells = np.rint((values + top) * ((_GRID - 1) / (2 * top)))
    return np.clip(cells, 0, _GRID - 1).astype(np.int64)


def measure_noise(residuals: Floats) -> StepNoise:
    """Return the noise that residuals show: logarithms of steps over their level."""
    residuals = residuals - np.median(residuals)
    scale = max(measure_spread(residuals), LEAST_NOISE)
    inner = np.clip(residuals, -_CLIP * scale, _CLIP * scale)
    memory = float(inner[1:] @ inner[:-1]) / (float(inner @ inner) + _RIDGE * scale**2)
    memory = min(max(memory, 0.0), _MOST_MEMORY)
    fresh = residuals[1:] - memory * inner[:-1]
    width = max(measure_spread(fresh), LEAST_NOISE * (1 - memory))
    block = _BLOCKS[len(residuals) >= _LONG]
    clipped = np.clip(fresh, -_CLIP * width, _CLIP * width)
    level_variance = max(_long_run(clipped), float(clipped.var()), (0.3 * width) ** 2)
    top = log1p(TUNED[-1]) * (1 - memory) + 6 * width
    density = np.log(_smooth_density(clipped, width, top))
    step = 2 * top / (_GRID - 1)
    nudge = max(0.3 * width, step)
    rows = []
    for shift in (sign * log1p(share) * (1 - memory) for share in TUNED for sign in (1, -1)):
        moved = density[np.clip(np.arange(_GRID) - round(shift / step), 0, _GRID - 1)]
        scores = np.clip(moved - density, -_MOST_SCORE, _MOST_SCORE)
        drawn = scores[_find_cells(fresh, top)]
        sums = np.convolve(drawn, np.ones(block), mode="valid")
        mean = sums.mean()
        sums = mean + (sums - mean) * sqrt(1 + _FEW * block / len(residuals))
        most = sums.max()
        moments = np.exp(_POWERS[:, None] * (sums - most)).mean(axis=1)
        nudged = scores[_find_cells(fresh + np.sign(shift) * nudge, top)].mean()
        shifted = scores[_find_cells(fresh + shift, top)]
        rows.append(
            (
                scores,
                (np.log(moments) + _POWERS * most) / block,
                (nudged - drawn.mean()) / nudge,
                shifted.mean(),
                max(sums.std() / sqrt(block), shifted.std()),
            )
        )
    scores_by_test, log_moments, slopes, means, spreads = zip(*rows, strict=True)
    return StepNoise(
        count=len(residuals),
        scale=scale,
        memory=memory,
        top=top,
        level_variance=level_variance,
        wander=_measure_wander(clipped, level_variance),
        scores=np.array(scores_by_test),
        log_moments=np.array(log_moments),
        slopes=np.array(slopes),
        shifted=np.array(means),
        spread=np.array(spreads),
    )


def _long_run(values: Floats) -> float:
    """Return the variance of a step that the means of blocks have, as if steps were independent."""
    block = _BLOCKS[len(values) >= _LONG]
    count = len(values) // block
    means = values[: count * block].reshape(count, block).mean(axis=1)
    return block * float(means.var(ddof=1))


def _measure_wander(values: Floats, level_variance: float) -> float:
    steps = WINDOWS[-1]
    if len(values) < 8 * steps:
        return 0.0
    means = np.convolve(values, np.full(steps, 1 / steps), mode="valid")[:: steps // 2]
    return max(0.0, measure_spread(means) ** 2 - level_variance / steps)


def _smooth_density(values: Floats, width: float, top: float) -> Floats:
    """Return the part of values in each cell, with a little of what may come besides."""
    step = 2 * top / (_GRID - 1)
    counts = np.bincount(_find_cells(values, top), minlength=_GRID) / len(values)
    smoothing = max(_SMOOTHING * width, 0.25 * LEAST_NOISE)
    reach = int(4 * smoothing / step) + 1
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * step / smoothing) ** 2)
    near = np.convolve(counts, kernel / kernel.sum(), mode="full")[reach : reach + _GRID]
    places = np.linspace(-top, top, _GRID)
    wide = np.exp(-0.5 * (places / (2.5 * width)) ** 2)
    far = (1 + (places / (3 * width)) ** 2) ** -1.5
    answer: Floats = (1 - _WIDE - _FAR) * near + _WIDE * wide / wide.sum() + _FAR * far / far.sum()
    return answer
