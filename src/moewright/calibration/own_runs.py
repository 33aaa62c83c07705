"""The user's own runs, as `moewright train` left them, as rows that a fit takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from moewright.calibration.speed import Speed
from moewright.calibration.table import Measured, Skipped, Table
from moewright.codec.run_files import read_run
from moewright.rules.expert_placement import rank_load_factor
from moewright.rules.settled_steps import median_step_s, settled
from moewright.spec.errors import BadInput
from moewright.spec.run import RunRecord
from moewright.spec.workload import Routing, Workload


def read_runs(folder: Path) -> Table:
    """Every run in a folder, or the folder itself where it is one, in the order of their names.

    A run that is damaged or has no steps is skipped with its reason.
    """
    folders = (
        [folder]
        if (folder / "plan.json").exists()
        else sorted(p.parent for p in folder.glob("*/plan.json"))
    )
    rows: list[Measured] = []
    skipped: list[Skipped] = []
    for each in folders:
        try:
            record = read_run(each)
        except BadInput as bad:
            skipped.append(Skipped(id=each.name, cells={}, reason=str(bad)))
            continue
        if median_step_s(record):
            rows.append(row_of(record, name=each.name))
        else:
            skipped.append(Skipped(id=each.name, cells={}, reason="has no steps"))
    order = (*(row.id for row in rows), *(one.id for one in skipped))
    return Table(order=order, rows=tuple(rows), skipped=tuple(skipped), contradictions=())


def row_of(record: RunRecord, *, name: str) -> Measured:
    """A run's median settled step, under the load that its experts had."""
    plan = record.plan
    tokens = plan.workload.tokens_per_step / plan.layout.world_size / median_step_s(record)
    return Measured(
        id=name,
        cells={},
        model=plan.model,
        workload=_loaded(plan.workload, record),
        hardware=plan.hardware,
        layout=plan.layout,
        speed=Speed(tokens_per_s_per_device=tokens, origin="median settled step"),
        peak=None,
        oom=False,
        unknown=(),
    )


def _loaded(workload: Workload, record: RunRecord) -> Workload:
    """The workload with the load of the hottest expert rank, as the run recorded it."""
    ep = record.plan.layout.ep
    factors = [
        rank_load_factor(load.rank_counts or load.counts, ep)
        for step in settled(record)
        for load in step.loads
    ]
    return (
        replace(workload, routing=Routing.LEARNED, load_factor=median(factors))
        if factors and ep > 1
        else workload
    )
