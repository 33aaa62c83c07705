"""Constants for scoring that are fitted on measured rows.

They are fitted on all rows of a table, or for each scored row on those outside its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moewright.calibration.cells import PeakKind
from moewright.calibration.fit import Fit, fit_constants
from moewright.calibration.fit_inputs import run_from_row
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.score import Calibration, predict_peak
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant
from moewright.spec.sourced import Sourced, SourceKind

MIN_COMPLETE_ROWS = 3
_MIN_PEAKS = 3
_STACK_BYTES = "stack_bytes"

Calibrator = Callable[[MeasuredRow], Calibration]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnexplainedPeak:
    """A row with a whole-device peak, and the bytes of it that the model does not explain."""

    row: MeasuredRow
    unexplained_bytes: float


def select_complete_rows(rows: Sequence[MeasuredRow]) -> tuple[MeasuredRow, ...]:
    """Return the rows whose speed can be fitted: complete, timed, and each measurement once."""
    return tuple(row for row in rows if row.is_complete and row.speed and not row.duplicate_of)


def calibrate_on(rows: Sequence[MeasuredRow], *, table_name: str) -> Calibrator:
    """Fit the constants once, for every row that is scored.

    Raises:
        BadInput: the rows are too few.
    """
    complete = select_complete_rows(rows)
    if len(complete) < MIN_COMPLETE_ROWS:
        rule = f"has {len(complete)} complete timed rows; a fit needs {MIN_COMPLETE_ROWS}"
        raise BadInput(Reason(field=table_name, rule=rule))
    fit = fit_constants([run_from_row(row) for row in complete])
    stack_constants = _stack_constants(_unexplained_peaks(rows))
    source = f"constants fitted on {len(complete)} rows of {table_name}"
    return lambda row: _calibrate(row, fit, stack_constants, source)


def calibrate_leaving_out(rows: Sequence[MeasuredRow], columns: Sequence[str]) -> Calibrator:
    """Fit the constants for each row without the rows that share its values in `columns`.

    The columns are those of the table; "id" leaves out one row at a time.

    Raises:
        BadInput: the table does not have a column, or too few rows are left.
    """
    for column in columns:
        if rows and column not in rows[0].cells:
            raise _leave_out_error(column, "is no column of the table")
    complete = select_complete_rows(rows)
    joined_columns = ",".join(columns)
    if len(complete) < MIN_COMPLETE_ROWS:
        rule = f"the table has {len(complete)} complete timed rows; a fit needs {MIN_COMPLETE_ROWS}"
        raise _leave_out_error(joined_columns, rule)
    runs = [run_from_row(row) for row in complete]
    fit_of_all = fit_constants(runs)
    peaks = _unexplained_peaks(rows)
    calibrators: dict[tuple[str, ...], Calibrator] = {}

    def build_calibrator(key: tuple[str, ...], row: MeasuredRow) -> Calibrator:
        kept = [index for index, other in enumerate(complete) if _key(other, columns) != key]
        if len(kept) < MIN_COMPLETE_ROWS:
            rule = f"leaves {len(kept)} complete timed rows for {row.id}"
            raise _leave_out_error(joined_columns, f"{rule}; a fit needs {MIN_COMPLETE_ROWS}")
        fit = fit_of_all
        # Where the group has no complete rows, the fit of all rows is the fit without it.
        if len(kept) < len(runs):
            start = fit_of_all.restrict_to_runs(kept)
            fit = fit_constants([runs[index] for index in kept], start=start)
        stack_constants = _stack_constants(
            [peak for peak in peaks if _key(peak.row, columns) != key]
        )
        pairs = zip(columns, key, strict=True)
        group = ", ".join(f"{column}={value}" for column, value in pairs)
        source = f"constants fitted on {len(kept)} rows, without {group}"
        return lambda scored: _calibrate(scored, fit, stack_constants, source)

    def calibrate(row: MeasuredRow) -> Calibration:
        key = _key(row, columns)
        if key not in calibrators:
            calibrators[key] = build_calibrator(key, row)
        return calibrators[key](row)

    return calibrate


def _leave_out_error(value: str, rule: str) -> BadInput:
    return BadInput(Reason(field="--leave-out", value=value, rule=rule))


def _key(row: MeasuredRow, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(row.cells[column] for column in columns)


def _calibrate(
    row: MeasuredRow, fit: Fit, stack_constants: Mapping[str, Constant], source: str
) -> Calibration:
    constants = fit.constants_for(
        row.hardware, publisher=row.publisher, network=row.cells["network"]
    )
    stack_constant = stack_constants.get(row.release_family)
    if stack_constant is not None:
        constants = (*constants, stack_constant)
    return Calibration(constants=constants, source=source)


def _unexplained_peaks(rows: Sequence[MeasuredRow]) -> list[_UnexplainedPeak]:
    """Return the whole-device peaks less what is predicted without the software's own bytes."""
    peaks = []
    for row in rows:
        if row.peak is None or row.peak.kind is not PeakKind.DEVICE or row.duplicate_of:
            continue
        prediction = estimate(row.model, row.peak_workload, row.hardware, row.layout)
        missing = (row.peak.value - predict_peak(row, prediction)) * row.peak.unit_bytes
        unexplained_bytes = missing + Constants(row.hardware)[_STACK_BYTES]
        peaks.append(_UnexplainedPeak(row=row, unexplained_bytes=unexplained_bytes))
    return peaks


def _stack_constants(peaks: Sequence[_UnexplainedPeak]) -> Mapping[str, Constant]:
    """Return the bytes that devices hold beyond the model's, by software family.

    Each is the median over the whole-device peaks of the family.
    """
    bytes_of_release: dict[str, list[float]] = {}
    for peak in peaks:
        family = peak.row.release_family
        bytes_of_release.setdefault(family, []).append(peak.unexplained_bytes)
    return {
        release: Constant(
            name=_STACK_BYTES,
            value=Sourced(
                value=max(0.0, median(unexplained)),
                kind=SourceKind.FITTED,
                source=f"median over {len(unexplained)} whole-device peaks of {release}",
            ),
        )
        for release, unexplained in bytes_of_release.items()
        if len(unexplained) >= _MIN_PEAKS
    }
