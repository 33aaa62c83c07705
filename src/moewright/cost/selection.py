"""What is to be expected of a layout that was picked from many, and which of two it tells apart.

A search finds what the model prices too low: the true step of its pick lies above the predicted one
even where predictions are right on average (the winner's curse; Smith and Winkler 2006, "The
optimizer's curse"). Errors of layouts alike are alike and cancel in a choice, those of choices that
no run made do not. Both are those of the intervals: what a fit leaves open fades with the choices
in which two layouts differ (cost.own_runs), and missing choices and pairs add theirs where both
layouts make them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.evidence import JOIN, LEFT_OPEN_SD, likeness, run_distances
from moewright.cost.stage_parts import Array

# Deviations of a difference up to which it decides nothing: the faster layout is so with a
# probability of three in five.
TIE = 0.25
_DRAWS = 2048
_SEED = 31


def error_covariance(
    choices: Sequence[Sequence[str]], unproven: Sequence[Sequence[str]], constants: Constants
) -> Array:
    """Return the covariance [layouts, layouts] of the logarithms of measured over predicted steps.

    `choices` are those of each layout, `unproven` the choices and pairs of each that no run made.
    """
    covariance = LEFT_OPEN_SD**2 * likeness(run_distances(choices, choices))
    names = sorted({name for missing in unproven for name in missing})
    made = np.array([[name in missing for name in names] for missing in unproven], dtype=float)
    sds = [constants["pair_time_sd" if JOIN in name else "choice_time_sd"] for name in names]
    return np.asarray(covariance + (made * np.square(sds)) @ made.T)


def expected_optimism(step_s: Sequence[float], covariance: Array) -> float:
    """Return how far the prediction of the fastest lies below its step, in logarithms, on average.

    Predictions are drawn around `step_s`, in pairs of errors of either sign, and the fastest of
    each draw is picked. The same input has the same answer.
    """
    logs = np.log(np.asarray(step_s, dtype=float))
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    half = np.random.default_rng(_SEED).standard_normal((_DRAWS // 2, len(logs))) @ root.T
    errors = np.concatenate((half, -half))
    picks = (logs + errors).argmin(axis=1)
    return float(-errors[np.arange(len(errors)), picks].mean())


def find_simplest(
    bounds_s: Sequence[float], choices: Sequence[Sequence[str]], burdens: Sequence[int]
) -> int:
    """Return the index of the simplest layout among those that tie with the fastest.

    A layout ties where it lies behind by less than TIE deviations of the two layouts' difference,
    by the errors of choices that runs made: bounds have the others in them. `burdens` count what
    each asks for: choices beside its default, and those without evidence.
    """
    first = int(np.argmin(bounds_s))
    behind = np.log(np.asarray(bounds_s) / min(bounds_s))
    distances = run_distances([choices[first]], choices)[0]
    difference_sd = LEFT_OPEN_SD * np.sqrt(2 * (1 - likeness(distances)))
    tied = np.flatnonzero(behind <= TIE * difference_sd)
    return min(tied.tolist(), key=lambda place: (burdens[place], bounds_s[place]))
