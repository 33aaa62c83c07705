"""Constants for scoring: fitted on measured rows, all of them or those outside the group of the row
that is scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from moewright.calibration.fit import Fit, MeasuredRun, fit_constants
from moewright.calibration.score import Calibration, predict_peak
from moewright.calibration.table import MeasuredRow, PeakKind
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.repricing import RepriceableStep
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant
from moewright.spec.sourced import Sourced, SourceKind

MIN_COMPLETE_ROWS = 3
_MIN_PEAKS = 3
_STACK_BYTES = "stack_bytes"

Calibrator = Callable[[MeasuredRow], Calibration]


def select_complete_rows(rows: Sequence[MeasuredRow]) -> tuple[MeasuredRow, ...]:
    """Rows whose speed can teach: complete, timed, and each measurement once."""
    return tuple(row for row in rows if row.is_complete and row.speed and not row.duplicate_of)


def run_from_row(row: MeasuredRow) -> MeasuredRun:
    """A usable row as the fit takes it."""
    if row.speed is None:
        raise ValueError(f"{row.id} has no speed")
    seconds = row.workload.tokens_per_step / row.speed.tokens_per_s_per_device / row.hardware.count
    prepared = RepriceableStep(row.model, row.workload, row.hardware, row.layout)
    return MeasuredRun(id=row.id, prepared=prepared, hardware=row.hardware, measured_s=seconds)


def calibrate_on(rows: Sequence[MeasuredRow], *, table_name: str) -> Calibrator:
    """One fit for every row that is scored. Raises BadInput where the rows are too few."""
    teachers = select_complete_rows(rows)
    if len(teachers) < MIN_COMPLETE_ROWS:
        rule = f"has {len(teachers)} complete timed rows; a fit needs {MIN_COMPLETE_ROWS}"
        raise BadInput(Reason(field=table_name, rule=rule))
    found = fit_constants([run_from_row(row) for row in teachers])
    beside = _stack_constants(_unexplained_bytes(rows))
    source = f"constants fitted on {len(teachers)} rows of {table_name}"
    return lambda row: _calibration(found, beside, row, source)


def calibrate_leaving_out(rows: Sequence[MeasuredRow], columns: Sequence[str]) -> Calibrator:
    """For each row a fit without the rows that share its values in `columns` (of the table; "id"
    leaves out one).

    Raises BadInput for a column that the table does not have, or where too few rows are left.
    """
    for column in columns:
        if rows and column not in rows[0].cells:
            raise BadInput(
                Reason(field="--leave-out", value=column, rule="is no column of the table")
            )
    teachers = select_complete_rows(rows)
    if len(teachers) < MIN_COMPLETE_ROWS:
        rule = f"the table has {len(teachers)} complete timed rows; a fit needs {MIN_COMPLETE_ROWS}"
        raise BadInput(Reason(field="--leave-out", value=",".join(columns), rule=rule))
    runs = [run_from_row(row) for row in teachers]
    whole, missing = fit_constants(runs), _unexplained_bytes(rows)
    known: dict[tuple[str, ...], Calibrator] = {}

    def of_group(key: tuple[str, ...], row: MeasuredRow) -> Calibrator:
        left = [place for place, one in enumerate(teachers) if _key(one, columns) != key]
        if len(left) < MIN_COMPLETE_ROWS:
            rule = f"leaves {len(left)} complete timed rows for {row.id}; a fit needs {MIN_COMPLETE_ROWS}"
            raise BadInput(Reason(field="--leave-out", value=",".join(columns), rule=rule))
        # A group that taught nothing leaves the fit of all rows as it is.
        same = len(left) == len(runs)
        found = (
            whole
            if same
            else fit_constants([runs[place] for place in left], start=whole.restrict_to_runs(left))
        )
        beside = _stack_constants([one for one in missing if _key(one[0], columns) != key])
        said = ", ".join(f"{column}={value}" for column, value in zip(columns, key, strict=True))
        source = f"constants fitted on {len(left)} rows, without {said}"
        return lambda one: _calibration(found, beside, one, source)

    def calibrate(row: MeasuredRow) -> Calibration:
        key = _key(row, columns)
        if key not in known:
            known[key] = of_group(key, row)
        return known[key](row)

    return calibrate


def _key(row: MeasuredRow, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(row.cells[column] for column in columns)


def _calibration(
    found: Fit, beside: Mapping[str, Constant], row: MeasuredRow, source: str
) -> Calibration:
    extra = (beside[row.release_family],) if row.release_family in beside else ()
    return Calibration(constants=(*found.constants_for(row.hardware), *extra), source=source)


def _unexplained_bytes(rows: Sequence[MeasuredRow]) -> list[tuple[MeasuredRow, float]]:
    """Rows with a whole-device peak, and the bytes of it that the model without a stack's own does
    not explain."""
    found = []
    for row in rows:
        if row.peak and row.peak.kind is PeakKind.DEVICE and not row.duplicate_of:
            predicted = predict_peak(
                row, estimate(row.model, row.workload, row.hardware, row.layout)
            )
            beyond = (row.peak.value - predicted) * row.peak.unit_bytes + Constants(row.hardware)[
                _STACK_BYTES
            ]
            found.append((row, beyond))
    return found


def _stack_constants(missing: Sequence[tuple[MeasuredRow, float]]) -> Mapping[str, Constant]:
    """Bytes that the devices of a software family hold beside the model's: the median over its
    whole-device peaks."""
    by_release: dict[str, list[float]] = {}
    for row, beyond in missing:
        by_release.setdefault(row.release_family, []).append(beyond)
    return {
        release: Constant(
            name=_STACK_BYTES,
            value=Sourced(
                value=max(0.0, median(found)),
                kind=SourceKind.FITTED,
                source=f"median over {len(found)} whole-device peaks of {release}",
            ),
        )
        for release, found in by_release.items()
        if len(found) >= _MIN_PEAKS
    }
