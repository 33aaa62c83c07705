"""The user's own runs, as `moewright train` left them, as rows that a fit takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.speed import MeasuredSpeed
from moewright.calibration.table import MeasurementTable, SkippedRow
from moewright.codec.run_files import read_run
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.errors import BadInput
from moewright.spec.run import RunRecord
from moewright.spec.workload import Routing, Workload


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
    plan = record.plan
    tokens = plan.workload.tokens_per_step / plan.layout.world_size / median_step_s(record)
    return MeasuredRow(
        id=name,
        cells={},
        model=plan.model,
        workload=_with_measured_load(plan.workload, record),
        hardware=plan.hardware,
        layout=plan.layout,
        speed=MeasuredSpeed(tokens_per_s_per_device=tokens, origin="median steady step"),
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
