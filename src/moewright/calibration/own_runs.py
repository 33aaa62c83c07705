"""One's own runs: as rows that a fit takes, and what a fit leaves open of them, carried over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median

import numpy as np

from moewright.calibration.fit import RUN_NOISE, MeasuredRun, PriorCentre, fit_constants
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.speed import MeasuredSpeed
from moewright.calibration.table import MeasurementTable, SkippedRow
from moewright.codec.run_files import read_run
from moewright.cost.evidence import LEFT_OPEN_SD, likeness, own_run_factor, run_distances
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.errors import BadInput
from moewright.spec.hardware import OwnRun
from moewright.spec.plan import Plan
from moewright.spec.run import RunRecord
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload

_LARGEST = 0.6  # of |log(measured / predicted)|: what is beyond is taken for a run's own


def weigh_own_runs(
    runs: Sequence[MeasuredRun], predicted: Sequence[float], *, source: str
) -> tuple[OwnRun, ...]:
    """Return runs as a hardware keeps them, given the seconds that constants predict of each.

    Each run has noise of its own (RUN_NOISE) beside what it shares with runs alike.
    """
    choices = [run.choices for run in runs]
    left_open = np.array(
        [log(run.measured_s / step_s) for run, step_s in zip(runs, predicted, strict=True)]
    )
    covariance = LEFT_OPEN_SD**2 * likeness(run_distances(choices, choices))
    # What a run has alone, and carries over to none.
    covariance += RUN_NOISE**2 * np.eye(len(runs))
    solved = np.linalg.solve(covariance, np.clip(left_open, -_LARGEST, _LARGEST))
    return tuple(
        OwnRun(
            choices=tuple(run.choices),
            weight=Sourced(
                value=LEFT_OPEN_SD**2 * float(weight),
                kind=SourceKind.FITTED,
                source=f"{run.id}, {source}",
            ),
        )
        for run, weight in zip(runs, solved, strict=True)
    )


def choose_telling_runs(choices: Sequence[Collection[str]], count: int) -> tuple[int, ...]:
    """Return the indices of the runs that would tell most of all of these, by their choices alone.

    They are taken one after the other, each the one that lowers the summed variance of what is left
    open most.
    """
    covariance = LEFT_OPEN_SD**2 * likeness(run_distances(choices, choices))
    chosen: list[int] = []
    for _ in range(min(count, len(choices))):
        variances = np.diag(covariance)
        # What a measured run takes off the variance of every other: cov^2 / (var + noise).
        told = (covariance**2).sum(axis=0) / (variances + RUN_NOISE**2)
        # A second measurement of a chosen run would still tell a little.
        told[chosen] = -1.0
        best = int(np.argmax(told))
        chosen.append(best)
        seen = covariance[:, best] / (variances[best] + RUN_NOISE**2)
        # The covariance of all, given the run that was chosen.
        covariance = covariance - np.outer(seen, covariance[best])
    return tuple(sorted(chosen))


def carry_over(own_runs: Sequence[OwnRun], run: MeasuredRun) -> float:
    """Return the factor of a run's predicted seconds that own runs speak for."""
    if not own_runs:
        return 1.0
    distances = run_distances([run.choices], [own.choices for own in own_runs])
    return float(own_run_factor(own_runs, distances)[0])


def predict_own_runs(
    runs: Sequence[MeasuredRun], *, centre: PriorCentre = PriorCentre.HARDWARE
) -> tuple[float, ...]:
    """Predict the seconds of each run by all others: constants, and what these leave open.

    A single run is predicted by the hardware's own constants.
    """
    if len(runs) == 1:
        return (runs[0].prepared.step_s(()),)
    fit_of_all = fit_constants(runs, centre=centre)
    errors = fit_of_all.log_errors(runs)
    predicted = []
    for index, run in enumerate(runs):
        kept = [place for place in range(len(runs)) if place != index]
        others = [runs[place] for place in kept]
        start = fit_of_all.restrict_to_runs(kept, errors)
        fit = fit_constants(others, centre=centre, start=start)
        constants = fit.constants_for(run.hardware, publisher=run.publisher, network=run.network)
        steps = [other.prepared.step_s(constants) for other in others]
        own_runs = weigh_own_runs(others, steps, source="")
        predicted.append(run.prepared.step_s(constants) * carry_over(own_runs, run))
    return tuple(predicted)


def read_engine_runs(folder: Path) -> MeasurementTable:
    """Read every run in a folder, or the folder itself where it is a run, in the order of names.

    A run that is damaged or has no steps is skipped with its reason.
    """
    rows: list[MeasuredRow] = []
    skipped: list[SkippedRow] = []
    for run_folder in _run_folders(folder):
        name = run_folder.name
        try:
            record = read_run(run_folder)
        except BadInput as error:
            skipped.append(SkippedRow(id=name, cells={}, reason=str(error)))
            continue
        if median_step_s(record):
            rows.append(row_from_run(record, name=name))
        else:
            skipped.append(SkippedRow(id=name, cells={}, reason="has no steps"))
    order = (*(row.id for row in rows), *(row.id for row in skipped))
    return MeasurementTable(
        order=order, rows=tuple(rows), skipped=tuple(skipped), contradictions=()
    )


def row_from_run(record: RunRecord, *, name: str) -> MeasuredRow:
    """Return a run's median steady step as a row, under the load that its experts had."""
    row = row_from_step(record.plan, median_step_s(record), name=name, origin="median steady step")
    return replace(row, workload=_with_measured_load(row.workload, record))


def row_from_step(plan: Plan, step_s: float, *, name: str, origin: str) -> MeasuredRow:
    """Return a step of a plan's job that took so many seconds as a row."""
    tokens = plan.workload.tokens_per_step / plan.layout.world_size / step_s
    return MeasuredRow(
        id=name,
        cells={},
        model=plan.model,
        workload=plan.workload,
        hardware=plan.hardware,
        layout=plan.layout,
        speed=MeasuredSpeed(tokens_per_s_per_device=tokens, origin=origin),
        peak=None,
        oom=False,
        unstated=(),
    )


def _run_folders(folder: Path) -> list[Path]:
    if (folder / "plan.json").exists():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/plan.json"))


def _with_measured_load(workload: Workload, record: RunRecord) -> Workload:
    """Return the workload with the load of the hottest expert rank, as the run recorded it."""
    ep = record.plan.layout.ep
    if ep == 1:  # every rank has all experts
        return replace(workload, routing=Routing.BALANCED)
    load_factors = [
        rank_load_factor(load.rank_counts or load.counts, ep)
        for step in steady_steps(record)
        for load in step.loads
    ]
    if not load_factors:
        return workload
    return replace(workload, routing=Routing.LEARNED, load_factor=median(load_factors))
