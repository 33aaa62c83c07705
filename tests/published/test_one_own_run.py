"""A part that only a datasheet describes, after one run: its other published runs.

The part is stripped of its kernel tables and fitted constants. Each run is fitted by itself, and
the others are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from moewright.calibration.fit import MeasuredRun, PriorCentre, fit_constants
from moewright.calibration.fit_inputs import apply_fit, reason_not_fittable, runs_from_rows
from moewright.calibration.table import read_table

TABLE = Path(__file__).parent / "data" / "measurements.csv"
FEW = 8  # runs of a part that are tried, spread over the table


def stripped_runs(part: str, publisher: str, tmp_path: Path) -> tuple[MeasuredRun, ...]:
    """Return runs of a part on what its datasheet says of it."""
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    own = [line for line in lines[1:] if line.startswith(publisher) and f",{part}," in line]
    path = tmp_path / "rows.csv"
    path.write_text("".join([lines[0], *own]), encoding="utf-8")
    rows = [row for row in read_table(path).rows if not reason_not_fittable(row)]
    rows = rows[:: max(1, len(rows) // FEW)][:FEW]
    hardware = rows[0].hardware
    bare = replace(hardware, device=replace(hardware.device, rates=()), constants=())
    return runs_from_rows(rows, bare)


def others_error(runs: Sequence[MeasuredRun], index: int) -> float:
    """Return the median error of the other runs once one of them is fitted."""
    fit = fit_constants([runs[index]], centre=PriorCentre.HARDWARE)
    fitted, learnt = apply_fit(runs[index].hardware, fit, source="one run")
    assert learnt
    return median(
        abs(run.prepared.step_s(fitted.constants) / run.measured_s - 1)
        for place, run in enumerate(runs)
        if place != index
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "publisher"),
    [("H800", "seed000"), pytest.param("B200", "bridge", marks=pytest.mark.thorough)],
)
def test_one_run_brings_the_others_within_a_fifth(
    part: str, publisher: str, tmp_path: Path
) -> None:
    runs = stripped_runs(part, publisher, tmp_path)
    assert len(runs) >= 4
    errors = [others_error(runs, index) for index in range(len(runs))]
    assert median(errors) <= 0.15
    assert max(errors) <= 0.2
