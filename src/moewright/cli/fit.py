"""`moewright fit`: the constants of the time model from one's own runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout

if TYPE_CHECKING:
    from moewright.calibration.table import MeasuredRow


def _runs_here(row: MeasuredRow, layout: Layout) -> bool:
    from moewright.rules.engine_limits import unsupported_layout

    return not unsupported_layout(layout, model=row.model, workload=row.workload)


def fit(table: Path, /, *, on: str, out: Annotated[Path, Parameter(name="--out")]) -> int:
    """Refit the constants of a hardware to measured runs, and write a hardware file with them.

    Parameters
    ----------
    table
        A CSV of measured runs with the columns that `validate` reads, or a folder of runs that `train` wrote; three
        will do.
    on
        The hardware, as "H800" or "runs/machine.toml"; rows measured on other parts are left out.
    out
        The hardware file to write; name it in --on from then on.
    """
    from statistics import fmean

    from moewright.calibration.engine_runs import read_engine_runs
    from moewright.calibration.fit import PriorCentre, predict_left_out
    from moewright.calibration.fit import fit_constants as fit_runs
    from moewright.calibration.fit_inputs import (
        apply_fit,
        is_other_hardware,
        reason_not_fittable,
        relative_errors,
        require_enough_runs,
        runs_from_rows,
        suggest_next_run,
    )
    from moewright.calibration.table import read_table
    from moewright.codec import write_toml
    from moewright.intake import catalogue
    from moewright.report.console import make_console

    hardware = catalogue.hardware(on)
    read = (
        read_engine_runs(table) if table.is_dir() else read_table(table, user_hardware=[hardware])
    )
    # On a CPU, and for runs of our own, only what the engine runs can be measured next.
    own = table.is_dir() or hardware.device.kind is DeviceKind.CPU
    left = {row.id: reason_not_fittable(row) for row in read.rows}
    left |= {
        row.id: f"was measured on {row.hardware.name}"
        for row in read.rows
        if is_other_hardware(row, hardware)
    }
    rows = [row for row in read.rows if not left[row.id]]
    runs = runs_from_rows(rows, hardware)
    require_enough_runs(runs, source=str(table))
    found = fit_runs(runs, centre=PriorCentre.HARDWARE)
    fitted, learnt = apply_fit(hardware, found, source=table.name)

    console = make_console(sys.stdout)
    for row_id, reason in [(one.id, one.reason) for one in read.skipped] + [
        (i, why) for i, why in left.items() if why
    ]:
        console.print(f"{row_id}: left out, {reason}", soft_wrap=True, highlight=False)
    before = relative_errors(runs, [run.prepared.step_s(()) for run in runs])
    after = relative_errors(
        runs, [run.prepared.step_s(found.constants_for(run.hardware)) for run in runs]
    )
    held = relative_errors(
        runs, predict_left_out(runs, lambda run: run.id, centre=PriorCentre.HARDWARE)
    )
    for name, values in (
        ("before", before),
        ("after", after),
        ("each run left out of its fit", held),
    ):
        worst = max(values, key=abs)
        mean = fmean(abs(value) for value in values)
        console.print(
            f"error {name}: mean {mean:.1%}, worst {worst:+.1%} ({len(runs)} runs)", highlight=False
        )
    for one in learnt:
        spread = f"+-{one.sd:.0%}, was +-{one.prior_sd:.0%}"
        console.print(f"{one.name}: {one.prior:.4g} -> {one.value:.4g} ({spread})", highlight=False)
    unseen = len(found.free_constants) - len(learnt)
    console.print(
        f"{unseen} constants keep their value: these runs say too little of them", highlight=False
    )
    ask = (
        suggest_next_run(found, rows, hardware, can_run=_runs_here)
        if own
        else suggest_next_run(found, rows, hardware)
    )
    if ask is not None:
        told = f"{ask.constant} from +-{ask.sd:.0%} to +-{ask.sd_after:.0%}"
        line = f"next, measure {ask.model} in {ask.layout}: uncertain by {ask.log_time_sd:.0%}; it takes {told}"
        console.print(line, soft_wrap=True, highlight=False)
    write_toml(out, fitted)
    console.print(f"wrote {out}", soft_wrap=True)
    return 0
