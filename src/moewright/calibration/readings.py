"""The jobs that a row of a table may have been, where its source leaves switches open.

A row's time is then a mixture: it is predicted by the median of the readings, and how far they lie
apart widens the interval. A reading counts less as it fits less likely in memory, for the run ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt
from statistics import NormalDist
from typing import Protocol

import numpy as np

from moewright.cost.constants import LOAD_SCALE
from moewright.cost.memory.estimate_memory import estimate_fullest_rank
from moewright.rules.job import Job
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

# Readings are kept, the likeliest first, until they make up this share, and at most so many.
_KEPT_SHARE = 0.9
_MOST_READINGS = 6
# Shares that add up to one half may fall short of it by rounding.
_HALF = 0.5 - 1e-9
_PEAK_ERROR = 0.06  # of a predicted peak, where what is kept is not stated in full
_SURE = 0.9  # probability of fitting above which readings with more recompute are not estimated


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A job that a row may have been, and how likely that is."""

    share: float
    workload: Workload
    layout: Layout


def likely_readings(
    model: ModelSpec, hardware: Hardware, readings: Sequence[Reading]
) -> tuple[Reading, ...]:
    """Return the likely readings, the likeliest first; shares sum to 1.

    Readings of the same job are one.
    """
    merged: dict[tuple[Layout, Workload], Reading] = {}
    for reading in readings:
        job = reading.layout, reading.workload
        earlier = merged.get(job)
        share = reading.share + (earlier.share if earlier else 0.0)
        merged[job] = replace(reading, share=share)
    ordered = sorted(merged.values(), key=lambda reading: -reading.share)
    # Nothing else that is left open changes memory by much: one policy for all needs no estimate.
    if len({reading.layout.recompute for reading in ordered}) > 1:
        ordered = _weigh_by_memory(model, hardware, ordered)
    kept: list[Reading] = []
    total = 0.0
    whole = sum(reading.share for reading in ordered)
    for reading in ordered[:_MOST_READINGS]:
        kept.append(reading)
        total += reading.share
        if total >= _KEPT_SHARE * whole:
            break
    return tuple(replace(reading, share=reading.share / total) for reading in kept)


def _weigh_by_memory(
    model: ModelSpec, hardware: Hardware, readings: Sequence[Reading]
) -> list[Reading]:
    """Return readings whose shares fall as their recompute fits less likely, for the run ran."""
    probability: dict[object, float] = {}
    for reading in readings:
        recompute = reading.layout.recompute
        if recompute not in probability:
            job = Job(model=model, workload=reading.workload, layout=reading.layout)
            fullest = estimate_fullest_rank(job, hardware)
            margin_bytes = hardware.device.memory_bytes.value - fullest.peak_bytes
            spread = hypot(fullest.sd_bytes, _PEAK_ERROR * fullest.peak_bytes)
            probability[recompute] = NormalDist().cdf(margin_bytes / spread)
            if probability[recompute] > _SURE:
                break
    weighed = [
        # Those behind the first that surely fits were not estimated: they count as fitting.
        replace(reading, share=reading.share * probability.get(reading.layout.recompute, 1.0))
        for reading in readings
    ]
    if not sum(reading.share for reading in weighed):
        # Far over memory in every reading, though the run ran: memory does not tell them apart.
        return list(readings)
    return sorted(weighed, key=lambda reading: -reading.share)


class PricedStep(Protocol):
    """Anything that says how long a step takes under constants."""

    def step_s(self, constants: tuple[Constant, ...]) -> float: ...


class MixedStep:
    """A step that may have been any of several: its time is their median, by share.

    A mean would lie between the readings, where none of them does.
    """

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[tuple[float, PricedStep]]) -> None:
        self._steps = tuple(steps)

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        seconds = sorted((step.step_s(constants), share) for share, step in self._steps)
        below = 0.0
        for step_s, share in seconds:
            below += share
            if below >= _HALF:
                return step_s
        return seconds[-1][0]

    def log_sd(self, constants: tuple[Constant, ...]) -> float:
        """Return the standard deviation of the logarithm of the seconds over the readings."""
        logs = [(share, log(step.step_s(constants))) for share, step in self._steps]
        mean = sum(share * value for share, value in logs)
        return sqrt(sum(share * (value - mean) ** 2 for share, value in logs))


class NaturalStep:
    """A step under natural routing, whose load is a constant of the fit.

    `steps` are prepared at multiples of the expected excess of the hottest rank, in rising order;
    between them the logarithm of the seconds is linear in that of the multiple.
    """

    __slots__ = ("_default", "_scales", "_steps")

    def __init__(self, steps: Sequence[tuple[float, PricedStep]], *, default: float) -> None:
        self._scales = tuple(scale for scale, _ in steps)
        self._steps = tuple(step for _, step in steps)
        self._default = default

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        by_name = {constant.name: constant.value.value for constant in constants}
        scale = by_name.get(LOAD_SCALE, self._default)
        logs = [log(step.step_s(constants)) for step in self._steps]
        # Beyond the prepared multiples np.interp holds the last value.
        return exp(float(np.interp(log(scale), np.log(self._scales), logs)))
