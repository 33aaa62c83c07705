"""Runs of one's own beside a prediction: what no constant explains of them holds for runs alike.

A fit leaves a part of each run open, log(measured / predicted). Runs that make the same choices
share it: its covariance is LEFT_OPEN_SD^2 * exp(-FADING * choices that one of the two runs makes
and the other does not), which is simple kriging over choices (Matheron 1963; Kennedy and O'Hagan
2001, who call it a model's discrepancy). The two numbers are those of runs of one publisher,
docs/log/planner_accuracy.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from moewright.cost.evidence import list_choices
from moewright.cost.stage_parts import Array
from moewright.rules.job import Job
from moewright.spec.hardware import Hardware, OwnRun

LEFT_OPEN_SD = 0.14  # of log(measured / predicted), where no run alike is known
FADING = 0.15  # a choice that differs


def likeness(differing: Array | float) -> Array:
    """Return the correlation of what is left open of two runs, by the choices that differ."""
    return np.exp(-FADING * np.asarray(differing, dtype=float))


def count_differing(choices: Sequence[Collection[str]], others: Sequence[Collection[str]]) -> Array:
    """Count the choices that one run of a pair makes alone [choices, others]."""
    sets = [frozenset(other) for other in others]
    counts = [[len(other.symmetric_difference(run)) for other in sets] for run in choices]
    return np.array(counts, dtype=float).reshape(len(choices), len(sets))


def own_run_factor(own_runs: Sequence[OwnRun], differing: Array) -> Array:
    """Return the factor of predicted seconds, by the choices that differ from each own run.

    `differing` is [..., own runs].
    """
    weights = np.array([run.weight.value for run in own_runs])
    return np.asarray(np.exp(likeness(differing) @ weights))


def job_factor(job: Job, hardware: Hardware) -> float:
    """Return the factor of a job's predicted seconds; 1 where the hardware has no own runs."""
    if not hardware.own_runs:
        return 1.0
    own = [run.choices for run in hardware.own_runs]
    differing = count_differing([list_choices(job, hardware)], own)
    return float(own_run_factor(hardware.own_runs, differing)[0])
