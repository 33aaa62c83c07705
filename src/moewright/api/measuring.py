"""Predictions beside measurements: scores of the planner, refitted constants, sweeps of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.api.comparison import summarize_plan
from moewright.api.requests import read_hardware, read_plan_request
from moewright.calibration.cross_validate import (
    calibrate_as_shipped,
    calibrate_leaving_out,
    calibrate_on,
)
from moewright.calibration.fit import FittedConstant, PriorCentre, fit_constants
from moewright.calibration.fit_inputs import (
    NextRun,
    apply_fit,
    is_other_hardware,
    reason_not_fittable,
    relative_errors,
    require_runs,
    runs_from_rows,
    suggest_next_run,
)
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.own_runs import (
    carry_over,
    predict_own_runs,
    read_engine_runs,
    weigh_own_runs,
)
from moewright.calibration.score import Score, score_table
from moewright.calibration.table import read_table
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.tuning.sweep import predict_layout


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SweepResult(Record):
    """Estimates of several layouts of one job, in the order asked for.

    `refusals` holds the layouts that are illegal, each with its reason.
    """

    plans: tuple[Plan, ...]
    refusals: tuple[tuple[str, str], ...]

    def title(self) -> str:
        """Return how many layouts were estimated and refused."""
        return f"{len(self.plans)} layouts estimated, {len(self.refusals)} refused"

    def to_rows(self) -> list[Row]:
        """Return a row for each layout."""
        refused = [{"layout": text, "verdict": reason} for text, reason in self.refusals]
        return [*(summarize_plan(plan) for plan in self.plans), *refused]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FitResult(Record):
    """A hardware with constants refitted to measured runs, and what the fit is worth.

    Errors are relative: predicted over measured step time, less 1, one for each run.
    """

    hardware: Hardware
    constants: tuple[FittedConstant, ...]  # those that the runs say something of
    kept_count: int  # constants that keep their value
    errors_before: tuple[float, ...]
    errors_after: tuple[float, ...]
    errors_left_out: tuple[float, ...]  # each run predicted by a fit without it
    left_out: tuple[tuple[str, str], ...]  # rows that were not used, with the reason
    next_run: NextRun | None  # the measurement that would teach most

    def title(self) -> str:
        """Return the number of runs and the mean error before and after."""
        count = len(self.errors_after)
        before, after = (
            sum(map(abs, errors)) / count for errors in (self.errors_before, self.errors_after)
        )
        return f"{count} runs: mean error {before:.1%} before the fit, {after:.1%} after"

    def to_rows(self) -> list[Row]:
        """Return a row for each constant that changed."""
        return [
            {
                "constant": constant.name,
                "before": constant.prior,
                "after": constant.value,
                "sd_before": constant.prior_sd,
                "sd_after": constant.sd,
            }
            for constant in self.constants
        ]


def sweep(
    model: str | Path | ModelSpec,
    layouts: Sequence[str | Layout],
    *,
    on: str | Hardware = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
) -> SweepResult:
    """Estimate several layouts of one job; `moewright bench sweep` also runs them.

    Raises:
        BadInput: model, hardware or a layout text cannot be read.

    Example:
        >>> import moewright as mw
        >>> table = mw.sweep("Qwen3-30B-A3B", ["ep8", "tp2,ep8", "ep3"], on="8xH100")
        >>> len(table.plans), len(table.refusals)
        (2, 1)
    """
    options = WorkloadOptions(seq_len=seq_len, global_batch=global_batch)
    request = read_plan_request(model, on, options)
    plans = []
    refusals = []
    nouns = (request.model, request.workload, request.hardware)
    for layout in layouts:
        prediction = predict_layout(*nouns, layout)
        if prediction.plan is None:
            refusals.append((str(layout), prediction.refusal))
        else:
            plans.append(prediction.plan)
    return SweepResult(plans=tuple(plans), refusals=tuple(refusals))


def validate(
    *tables: Path | str,
    fit_on: Path | str | None = None,
    leave_out: Sequence[str] = (),
    own_rows: int = 0,
    own_columns: Sequence[str] = (),
) -> Score:
    """Score the planner on tables of measured runs: errors, order of layouts, memory, verdicts.

    Args:
        tables: CSV files with the columns of docs/tables.md.
        fit_on: fit the constants on this table first, in place of the planner's own.
        leave_out: cross-validate: fit the constants for each row without the rows that share its
            values in these columns.
        own_rows: with `leave_out`, so many of the rows that share its values are fitted
            nevertheless, and not scored: what a user's first runs teach.
        own_columns: with `own_rows`, those rows share the values of a row in these columns too.

    Raises:
        BadInput: a table or a column cannot be read.

    Example:
        >>> import moewright as mw
        >>> score = mw.validate("measurements.csv")
        >>> score.summary.scored > 0
        True
    """
    if fit_on is not None and leave_out:
        rule = "says where constants come from, and so does --leave-out"
        raise BadInput(
            Reason(field="--fit-on", value=str(fit_on), rule=rule, nearest="one of the two")
        )
    if not tables:
        raise BadInput(Reason(field="TABLES", rule="needs a table of measured runs"))
    rows = read_table(*map(Path, tables))
    if fit_on is not None:
        source = Path(fit_on)
        calibrate = calibrate_on(read_table(source).rows, table_name=source.name)
        return score_table(rows, calibrate)
    if leave_out:
        calibrate = calibrate_leaving_out(
            rows.rows, list(leave_out), own_rows=own_rows, own_columns=list(own_columns)
        )
        return score_table(rows, calibrate)
    return score_table(rows, calibrate_as_shipped)


def fit(table: Path | str, *, on: str | Hardware) -> FitResult:
    """Refit the constants of a hardware to measured runs.

    What they leave open of each run is carried over to runs that make the same choices, as
    `own_runs` of the hardware.

    Args:
        table: a CSV of measured runs, or a folder of runs of this engine; one will do.
        on: the hardware; rows measured on other devices are left out.

    Raises:
        BadInput: the table cannot be read, or holds too few runs of this hardware.

    Example:
        >>> import moewright as mw
        >>> result = mw.fit("measurements.csv", on="H800")
        >>> len(result.errors_after) >= 3
        True
    """
    path = Path(table)
    hardware = read_hardware(on)
    if path.is_dir():
        measurements = read_engine_runs(path)
    else:
        measurements = read_table(path, user_hardware=[hardware])
    reasons = {row.id: _reason_left_out(row, hardware) for row in measurements.rows}
    rows = [row for row in measurements.rows if not reasons[row.id]]
    runs = runs_from_rows(rows, hardware)
    require_runs(runs, source=str(path))
    result = fit_constants(runs, centre=PriorCentre.HARDWARE)
    fitted, learnt = apply_fit(hardware, result, source=path.name)
    # With the constants that the hardware came with.
    before = [run.prepared.step_s(()) for run in runs]
    fitted_s = [run.prepared.step_s(fitted.constants) for run in runs]
    own_runs = weigh_own_runs(runs, fitted_s, source=path.name)
    after = [step_s * carry_over(own_runs, run) for run, step_s in zip(runs, fitted_s, strict=True)]
    without_it = predict_own_runs(runs, centre=PriorCentre.HARDWARE)
    # On a CPU, and for runs of this engine, only what the engine runs can be measured next.
    if path.is_dir() or hardware.device.kind is DeviceKind.CPU:
        next_run = suggest_next_run(result, rows, hardware, can_run=_runs_here)
    else:
        next_run = suggest_next_run(result, rows, hardware)
    skipped = [(row.id, row.reason) for row in measurements.skipped]
    unused = [(row_id, reason) for row_id, reason in reasons.items() if reason]
    return FitResult(
        hardware=replace(fitted, own_runs=own_runs),
        constants=tuple(learnt),
        kept_count=len(result.free_constants) - len(learnt),
        errors_before=tuple(relative_errors(runs, before)),
        errors_after=tuple(relative_errors(runs, after)),
        errors_left_out=tuple(relative_errors(runs, without_it)),
        left_out=(*skipped, *unused),
        next_run=next_run,
    )


def _reason_left_out(row: MeasuredRow, hardware: Hardware) -> str:
    """Return why a row cannot be fitted on the hardware, or ""."""
    if is_other_hardware(row, hardware):
        return f"was measured on {row.hardware.name}"
    return reason_not_fittable(row)


def _runs_here(row: MeasuredRow, layout: Layout) -> bool:
    return not unsupported_layout(replace(row.job, layout=layout))
