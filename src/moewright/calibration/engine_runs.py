"""The user's own runs, as `moewright train` left them, as rows that a fit takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from moewright.calibration.speed import MeasuredSpeed
from moewright.calibration.table import MeasuredRow, MeasurementTable, SkippedRow
from moewright.codec.run_files import read_run
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.errors import BadInput
from moewright.spec.run import RunRecord
from moewright.spec.workload import Routing, Workload


def read_engine_runs(folder: Path) -> MeasurementTable:
    """Every run in a folder, or the folder itself where it is one, in the order of their names.

    A run that is damaged or has no steps is skipped with its reason.
    """
    folders = (
        [folder]
        if (folder / "plan.json").exists()
        else sorted(p.parent for p in folder.glob("*/plan.json"))
    )
    rows: list[MeasuredRow] = []
    skipped: list[SkippedRow] = []
    for each in folders:
        try:
            record = read_run(each)
        except BadInput as bad:
            skipped.append(SkippedRow(id=each.name, cells={}, reason=str(bad)))
            continue
        if median_step_s(record):
            rows.append(row_from_run(record, name=each.name))
        else:
            skipped.append(SkippedRow(id=each.name, cells={}, reason="has no steps"))
    order = (*(row.id for row in rows), *(one.id for one in skipped))
    return MeasurementTable(
        order=order, rows=tuple(rows), skipped=tuple(skipped), contradictions=()
    )


def row_from_run(record: RunRecord, *, name: str) -> MeasuredRow:
    """A run's median settled step, under the load that its experts had."""
    plan = record.plan
    tokens = plan.workload.tokens_per_step / plan.layout.world_size / median_step_s(record)
    return MeasuredRow(
        id=name,
        cells={},
        model=plan.model,
        workload=_loaded(plan.workload, record),
        hardware=plan.hardware,
        layout=plan.layout,
        speed=MeasuredSpeed(tokens_per_s_per_device=tokens, origin="median settled step"),
        peak=None,
        oom=False,
        unstated=(),
    )


def _loaded(workload: Workload, record: RunRecord) -> Workload:
    """The workload with the load of the hottest expert rank, as the run recorded it."""
    ep = record.plan.layout.ep
    factors = [
        rank_load_factor(load.rank_counts or load.counts, ep)
        for step in steady_steps(record)
        for load in step.loads
    ]
    return (
        replace(workload, routing=Routing.LEARNED, load_factor=median(factors))
        if factors and ep > 1
        else workload
    )
