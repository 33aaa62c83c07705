"""Constants for scoring: fitted on measured rows, all of them or those outside the group of the row
that is scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from moewright.calibration.fit import Fit, Run, fit
from moewright.calibration.score import Calibration, predicted_peak
from moewright.calibration.table import Measured, PeakKind
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.repricing import Prepared
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant
from moewright.spec.sourced import Sourced, SourceKind

FEWEST_RUNS = 3
_FEWEST_PEAKS = 3
_STACK_BYTES = "stack_bytes"

Calibrate = Callable[[Measured], Calibration]


def usable(rows: Sequence[Measured]) -> tuple[Measured, ...]:
    """Rows whose speed can teach: complete, timed, and each measurement once."""
    return tuple(row for row in rows if row.complete and row.speed and not row.same_as)


def run_of(row: Measured) -> Run:
    """A usable row as the fit takes it."""
    if row.speed is None:
        raise ValueError(f"{row.id} has no speed")
    seconds = row.workload.tokens_per_step / row.speed.tokens_per_s_per_device / row.hardware.count
    prepared = Prepared(row.model, row.workload, row.hardware, row.layout)
    return Run(id=row.id, prepared=prepared, hardware=row.hardware, measured_s=seconds)


def fitted_on(rows: Sequence[Measured], *, name: str) -> Calibrate:
    """One fit for every row that is scored. Raises BadInput where the rows are too few."""
    teachers = usable(rows)
    if len(teachers) < FEWEST_RUNS:
        rule = f"has {len(teachers)} complete timed rows; a fit needs {FEWEST_RUNS}"
        raise BadInput(Reason(field=name, rule=rule))
    found = fit([run_of(row) for row in teachers])
    beside = _beside(_missing(rows))
    source = f"constants fitted on {len(teachers)} rows of {name}"
    return lambda row: _calibration(found, beside, row, source)


def leaving_out(rows: Sequence[Measured], columns: Sequence[str]) -> Calibrate:
    """For each row a fit without the rows that share its values in `columns` (of the table; "id"
    leaves out one).

    Raises BadInput for a column that the table does not have, or where too few rows are left.
    """
    for column in columns:
        if rows and column not in rows[0].cells:
            raise BadInput(
                Reason(field="--leave-out", value=column, rule="is no column of the table")
            )
    teachers = usable(rows)
    if len(teachers) < FEWEST_RUNS:
        rule = f"the table has {len(teachers)} complete timed rows; a fit needs {FEWEST_RUNS}"
        raise BadInput(Reason(field="--leave-out", value=",".join(columns), rule=rule))
    runs = [run_of(row) for row in teachers]
    whole, missing = fit(runs), _missing(rows)
    known: dict[tuple[str, ...], Calibrate] = {}

    def of_group(key: tuple[str, ...], row: Measured) -> Calibrate:
        left = [place for place, one in enumerate(teachers) if _key(one, columns) != key]
        if len(left) < FEWEST_RUNS:
            rule = f"leaves {len(left)} complete timed rows for {row.id}; a fit needs {FEWEST_RUNS}"
            raise BadInput(Reason(field="--leave-out", value=",".join(columns), rule=rule))
        # A group that taught nothing leaves the fit of all rows as it is.
        same = len(left) == len(runs)
        found = whole if same else fit([runs[place] for place in left], start=whole.of_runs(left))
        beside = _beside([one for one in missing if _key(one[0], columns) != key])
        said = ", ".join(f"{column}={value}" for column, value in zip(columns, key, strict=True))
        source = f"constants fitted on {len(left)} rows, without {said}"
        return lambda one: _calibration(found, beside, one, source)

    def calibrate(row: Measured) -> Calibration:
        key = _key(row, columns)
        if key not in known:
            known[key] = of_group(key, row)
        return known[key](row)

    return calibrate


def _key(row: Measured, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(row.cells[column] for column in columns)


def _calibration(
    found: Fit, beside: Mapping[str, Constant], row: Measured, source: str
) -> Calibration:
    extra = (beside[row.release],) if row.release in beside else ()
    return Calibration(constants=(*found.constants(row.hardware), *extra), source=source)


def _missing(rows: Sequence[Measured]) -> list[tuple[Measured, float]]:
    """Rows with a whole-device peak, and the bytes of it that the model without a stack's own does
    not explain."""
    found = []
    for row in rows:
        if row.peak and row.peak.kind is PeakKind.DEVICE and not row.same_as:
            predicted = predicted_peak(
                row, estimate(row.model, row.workload, row.hardware, row.layout)
            )
            beyond = (row.peak.value - predicted) * row.peak.unit_bytes + Constants(row.hardware)[
                _STACK_BYTES
            ]
            found.append((row, beyond))
    return found


def _beside(missing: Sequence[tuple[Measured, float]]) -> Mapping[str, Constant]:
    """Bytes that the devices of a software family hold beside the model's: the median over its
    whole-device peaks."""
    by_release: dict[str, list[float]] = {}
    for row, beyond in missing:
        by_release.setdefault(row.release, []).append(beyond)
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
        if len(found) >= _FEWEST_PEAKS
    }
