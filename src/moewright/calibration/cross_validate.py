"""Constants for scoring that are fitted on measured rows.

They are fitted on all rows of a table, or for each scored row on those outside its group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, sqrt
from statistics import median

from moewright.calibration.cells import PeakKind
from moewright.calibration.fit import RUN_NOISE, Fit, MeasuredRun, fit_constants
from moewright.calibration.fit_inputs import is_priced_in_full, run_from_row, runs_from_rows
from moewright.calibration.measured_row import MeasuredRow, RowStatement
from moewright.calibration.own_runs import carry_over, choose_telling_runs, weigh_own_runs
from moewright.calibration.score import Calibration, predict_peak
from moewright.calibration.software_facts import stack_log_sd
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Constant, OwnRun
from moewright.spec.units import Sourced, SourceKind

MIN_TIMED_ROWS = 3  # fewer leave a fold without a row to fit
_MIN_PEAKS = 3  # fewer have no median apart from an outlier
_STACK_BYTES = "stack_bytes"

Calibrator = Callable[[MeasuredRow], Calibration]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnexplainedPeak:
    """A row with a whole-device peak, and the bytes of it that the model does not explain."""

    row: MeasuredRow
    unexplained_bytes: float


def select_timed_rows(rows: Sequence[MeasuredRow]) -> tuple[MeasuredRow, ...]:
    """Return the rows that have a speed, each measurement once."""
    return tuple(row for row in rows if row.speed and not row.duplicate_of)


def _weigh_runs(
    rows: Sequence[MeasuredRow], own_rows: Collection[str] = frozenset()
) -> tuple[MeasuredRun, ...]:
    """Return rows as runs; what is not priced in full has no weight, one's own rows apart."""
    return tuple(
        run if row.id in own_rows or is_priced_in_full(row) else replace(run, weight=0.0)
        for row, run in zip(rows, runs_from_rows(rows), strict=True)
    )


def calibrate_as_shipped(row: MeasuredRow) -> Calibration:
    """Return what the planner's own constants predict of a row, over all its readings.

    Its interval is wider where no run of its trainer was fitted.
    """
    if row.speed is None:
        return Calibration()
    of_stack = stack_log_sd(row.cells)
    is_mixed = row.kind is RowStatement.NATURAL or len(row.readings) > 1
    if not (is_mixed or of_stack):
        return Calibration()
    step_sd = estimate(row.model, row.workload, row.hardware, row.layout).step_sd
    if not is_mixed:
        return Calibration(log_sd=hypot(step_sd, of_stack))
    run = run_from_row(row)
    # Beyond the noise of a row that is described in full, which step_sd has in it.
    extra = sqrt(max(0.0, run.noise**2 - RUN_NOISE**2))
    return Calibration(step_s=run.prepared.step_s(()), log_sd=hypot(step_sd, extra, of_stack))


def calibrate_on(rows: Sequence[MeasuredRow], *, table_name: str) -> Calibrator:
    """Fit the constants once, for every row that is scored.

    Raises:
        BadInput: the rows are too few.
    """
    timed = select_timed_rows(rows)
    if len(timed) < MIN_TIMED_ROWS:
        rule = f"has {len(timed)} timed rows; a fit needs {MIN_TIMED_ROWS}"
        raise BadInput(Reason(field=table_name, rule=rule))
    fit = fit_constants(_weigh_runs(timed))
    stack_constants = _stack_constants(_unexplained_peaks(rows))
    source = f"constants fitted on {len(timed)} rows of {table_name}"
    fold = _Fold(fit=fit, stack_constants=stack_constants, source=source)
    return lambda row: fold.calibrate(row, run_from_row(row) if row.speed else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fold:
    """Constants fitted without some rows, which they predict.

    `key` has the values that the left-out rows share; `own_rows` are the ids of some of them that
    were fitted nevertheless. `own_runs` holds what the constants leave open of the rows that were
    fitted, by publisher.
    """

    fit: Fit
    stack_constants: Mapping[str, Constant]
    source: str
    own_runs: Mapping[str, tuple[OwnRun, ...]] = field(default_factory=dict)
    key: Hashable = None
    own_rows: frozenset[str] = frozenset()

    def calibrate(self, row: MeasuredRow, run: MeasuredRun | None) -> Calibration:
        """Return what the fold predicts of a row; `run` is the row as a run where it is timed."""
        constants = self.fit.constants_for(
            row.hardware, publisher=row.publisher, network=row.cells["network"]
        )
        stack_constant = self.stack_constants.get(row.release_family)
        with_stack = constants if stack_constant is None else (*constants, stack_constant)
        if run is None:
            return Calibration(constants=with_stack, source=self.source, group=self.key)
        is_own = row.id in self.own_rows
        return Calibration(
            constants=with_stack,
            source=self.source,
            step_s=run.prepared.step_s(constants)
            * carry_over(self.own_runs.get(row.publisher, ()), run),
            log_sd=hypot(run.noise, self.fit.log_time_sd(run)),
            group=self.key,
            skipped="one of the publisher's own rows, which were fitted" if is_own else "",
        )


def calibrate_leaving_out(
    rows: Sequence[MeasuredRow],
    columns: Sequence[str],
    *,
    own_rows: int = 0,
    own_columns: Sequence[str] = (),
) -> Calibrator:
    """Fit the constants for each row without the rows that share its values in `columns`.

    The columns are those of the table; "id" leaves out one row at a time. So many `own_rows` of
    those that share its values, in `own_columns` too, are fitted nevertheless, as a user's own
    first runs would be, and not scored: those whose choices tell most of the others. What the
    constants leave open of fitted rows of the publisher is carried over to rows that make the same
    choices.

    Raises:
        BadInput: the table does not have a column, or too few rows are left.
    """
    for column in (*columns, *own_columns):
        if rows and column not in rows[0].cells:
            raise _leave_out_error(column, "is no column of the table")
    timed = select_timed_rows(rows)
    joined_columns = ",".join(columns)
    if len(timed) < MIN_TIMED_ROWS:
        rule = f"the table has {len(timed)} timed rows; a fit needs {MIN_TIMED_ROWS}"
        raise _leave_out_error(joined_columns, rule)
    runs = _weigh_runs(timed)
    own_runs = _weigh_runs(timed, {row.id for row in timed}) if own_rows else runs
    run_of_row = {run.id: run for run in runs}
    # Once: every fold starts from it, with its derivatives.
    fit_of_all = fit_constants(runs)
    peaks = _unexplained_peaks(rows)
    own_key = tuple(dict.fromkeys((*columns, *own_columns)))
    folds: dict[tuple[str, ...], _Fold] = {}

    def build_fold(key: tuple[str, ...], row: MeasuredRow) -> _Fold:
        outer = _key(row, columns)
        inside = [index for index, other in enumerate(timed) if _key(other, columns) == outer]
        alike = [runs[index] for index in inside if _key(timed[index], own_key) == key]
        own = _choose_own_rows(alike, own_rows)
        kept = [
            index for index, other in enumerate(timed) if index not in inside or other.id in own
        ]
        if len(kept) < MIN_TIMED_ROWS:
            rule = f"leaves {len(kept)} timed rows for {row.id}; a fit needs {MIN_TIMED_ROWS}"
            raise _leave_out_error(joined_columns, rule)
        fit = fit_of_all
        # Where the group has no timed rows, the fit of all rows is the fit without it.
        if len(kept) < len(runs):
            start = fit_of_all.restrict_to_runs(kept)
            kept_runs = [own_runs[i] if timed[i].id in own else runs[i] for i in kept]
            fit = fit_constants(kept_runs, start=start)
        pairs = zip(own_key, key, strict=True)
        group = ", ".join(f"{column}={value}" for column, value in pairs)
        return _Fold(
            fit=fit,
            stack_constants=_stack_constants(
                [peak for peak in peaks if _key(peak.row, columns) != outer]
            ),
            source=f"constants fitted on {len(kept)} rows, without {group}",
            key=outer,
            own_rows=own,
            own_runs={
                publisher: _weigh_rows_of(fit, [runs[i] for i in kept], publisher)
                for publisher in {timed[index].publisher for index in inside}
            },
        )

    def calibrate(row: MeasuredRow) -> Calibration:
        key = _key(row, own_key)
        if key not in folds:
            folds[key] = build_fold(key, row)
        return folds[key].calibrate(row, run_of_row.get(row.id))

    return calibrate


def _weigh_rows_of(fit: Fit, runs: Sequence[MeasuredRun], publisher: str) -> tuple[OwnRun, ...]:
    """Return the runs of a publisher, weighed by what a fit leaves open of them."""
    own = [run for run in runs if run.publisher == publisher]
    constants_of = {
        run.groups: fit.constants_for(run.hardware, publisher=run.publisher, network=run.network)
        for run in own
    }
    predicted = [run.prepared.step_s(constants_of[run.groups]) for run in own]
    return weigh_own_runs(own, predicted, source=publisher)


def _choose_own_rows(runs: Sequence[MeasuredRun], count: int) -> frozenset[str]:
    """Return the ids of the runs that tell most of the others; none where no other would be left.

    Their measured times do not matter: one would choose them before any run.
    """
    if not count or len(runs) <= count:
        return frozenset()
    chosen = choose_telling_runs([run.choices for run in runs], count)
    return frozenset(runs[index].id for index in chosen)


def _leave_out_error(value: str, rule: str) -> BadInput:
    return BadInput(Reason(field="--leave-out", value=value, rule=rule))


def _key(row: MeasuredRow, columns: Sequence[str]) -> tuple[str, ...]:
    """Return what a row shares with those that are left out with it, a text for each column.

    Parts are named by the catalogue, for tables write one in several ways.
    """
    return tuple(
        row.hardware.device.name if column == "hardware" else row.cells[column]
        for column in columns
    )


def _unexplained_peaks(rows: Sequence[MeasuredRow]) -> list[_UnexplainedPeak]:
    """Return the whole-device peaks less what is predicted without the software's own bytes."""
    peaks = []
    for row in rows:
        if row.peak is None or row.peak.kind is not PeakKind.DEVICE or row.duplicate_of:
            continue
        prediction = estimate(row.model, row.workload, row.hardware, row.layout)
        missing = (row.peak.value - predict_peak(row, prediction)) * row.peak.unit_bytes
        # The prediction has the hardware's own value in it, whose place the fitted one takes.
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
