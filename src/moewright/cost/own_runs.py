"""Runs of one's own beside a prediction: what no constant explains of them holds for runs alike.

A fit leaves a part of each run open, log(measured / predicted). Runs that make the same choices
share it: its covariance is LEFT_OPEN_SD^2 * exp(-distance), where the distance sums over choices
that one of the two runs makes and the other does not. This is simple kriging over choices (Matheron
1963; Kennedy and O'Hagan 2001, who call it a model's discrepancy). What all layouts of a job share,
its model, part and precision, tells runs apart four times as much as a choice among layouts, so
that what is carried over is mostly a level of the job, and its layouts keep the order that
constants give them: single runs tell little of an order. The numbers are those of runs of one
publisher, docs/log/planner_accuracy.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from moewright.cost.evidence import is_shared_by_layouts, list_choices
from moewright.cost.stage_parts import Array
from moewright.rules.job import Job
from moewright.spec.hardware import Hardware, OwnRun

LEFT_OPEN_SD = 0.14  # of log(measured / predicted), where no run alike is known
JOB_FADING = 0.2  # a choice that all layouts of a job share, such as its model
LAYOUT_FADING = 0.05  # any other: of the layout, the number of devices and their network


def choice_distance(choices: Iterable[str]) -> float:
    """Return how far two runs lie apart of which one makes these choices and the other does not."""
    return sum(JOB_FADING if is_shared_by_layouts(choice) else LAYOUT_FADING for choice in choices)


def likeness(distances: Array | float) -> Array:
    """Return the correlation of what is left open of two runs, by their distance."""
    return np.asarray(np.exp(-np.asarray(distances, dtype=float)))


def run_distances(choices: Sequence[Collection[str]], others: Sequence[Collection[str]]) -> Array:
    """Return the distances of runs, by their choices [choices, others]."""
    sets = [frozenset(other) for other in others]
    rows = [[choice_distance(other.symmetric_difference(run)) for other in sets] for run in choices]
    return np.array(rows, dtype=float).reshape(len(choices), len(sets))


def own_run_factor(own_runs: Sequence[OwnRun], distances: Array) -> Array:
    """Return the factor of predicted seconds, by the distance to each own run.

    `distances` is [..., own runs].
    """
    weights = np.array([run.weight.value for run in own_runs])
    return np.asarray(np.exp(likeness(distances) @ weights))


def job_factor(job: Job, hardware: Hardware) -> float:
    """Return the factor of a job's predicted seconds; 1 where the hardware has no own runs."""
    if not hardware.own_runs:
        return 1.0
    own = [run.choices for run in hardware.own_runs]
    distances = run_distances([list_choices(job, hardware)], own)
    return float(own_run_factor(hardware.own_runs, distances)[0])
